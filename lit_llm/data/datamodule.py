"""The base of all data modules: batch sizes, the order of samples, held-out loaders, and the position in the data.

One Lightning epoch is the whole run: the training loader has the length of ``max_steps`` optimizer steps. Passes over the
data ("data epochs") exist only inside the order (``lit_llm.data.order``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm.core._lightning import set_micro_batches_made
from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.core.number_domain import INT64, range_problems, whole
from lit_llm.data.batches import GlobalOrder, HeldOutOrder, ResumableLoader
from lit_llm.data.blocks import Blocks, HeldOutBlocks, PackedBlocks, PairBlocks, StreamBlocks, TrainBlocks
from lit_llm.data.corpus import Corpus, OpenedCorpus
from lit_llm.data.order import sample_index
from lit_llm.data.pack_plan import PackPlan, open_plan
from lit_llm.data.position import DataPosition
from lit_llm.data.run_length import at_least_one, set_accumulation, set_end
from lit_llm.data.stored_files import BackgroundCheck, Seen, StoredFiles
from lit_llm.data.teacher import Teacher, TeacherInfo
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.chat import ChatForm
from lit_llm.tokenizers import Tokenizer


class TokenDataModule(DataPosition):
    """Base of the data modules. Subclasses check and open their sources.

    Batches are dicts of int64 ``input_ids`` and ``targets``, both (B, block_size); see ``lit_llm.data.blocks``.

    After ``setup``: ``vocab_size``, ``eos_id``, ``bos_id``, ``tokenizer``, ``token_bytes`` ((vocab_size,) int64 UTF-8 bytes
    of each id, or None without a tokenizer), ``train_tokens``, ``val_tokens``, and ``fingerprint`` (counts and a hash of the
    tokens).

    Args:
        micro_batch_size: the most sequences in one forward pass of one rank (``lit_llm.core.batch_sizes``). None: no limit.
        global_batch_size: sequences per optimizer step over all ranks. Accumulation is derived from it.
        block_size: tokens predicted per sequence (T). None: the block size of the model.
        seed: seed of the order of the training samples.
        num_workers: processes that read ahead. Reading is cheap, so 0 is right unless the disk is slow.
        packing: concatenate: a block of training is ``block_size`` consecutive tokens. best_fit: whole documents share a block,
            and only documents longer than a block are cut (``lit_llm.data.packing``). Validation reads consecutive tokens.
    """

    # Whether no training target is ignored (-100), so that the tokens of a step need not be counted. Masks make it False.
    every_target_counts = True
    # Whether rank 0 opens the data for all ranks. The data must have the same paths on all ranks.
    opens_on_rank_zero = False
    # Whether `problems` refuses a run without max_steps.
    needs_max_steps = False

    def __init__(
        self,
        *,
        micro_batch_size: Annotated[int | None, whole(1, 10**7)] = None,
        global_batch_size: Annotated[int, whole(1, 10**9)] = 32,
        block_size: Annotated[int | None, whole(1, 10**9)] = None,
        seed: Annotated[int, whole(-INT64, INT64)] = 0,
        num_workers: Annotated[int, whole(0, 256)] = 0,
        packing: Literal["concatenate", "best_fit"] = "concatenate",
    ) -> None:
        super().__init__(micro_batch_size, global_batch_size, block_size)
        self.seed, self.num_workers, self.packing = seed, num_workers, packing
        if packing == "best_fit":
            self.every_target_counts = False  # blocks have padding
        # Whether batches have the numbers of documents, if the shards know where documents end. The model asks for it.
        self.gives_documents = False
        self.teachers: dict[str, Teacher] = {}  # of the training streams, by name, if `find_teachers` was called
        self._plans: dict[str, PackPlan] = {}  # of the training streams, by name
        self._plans_shared = False  # whether all ranks know that the plans are there
        self._opened: OpenedCorpus | None = None
        self._background: BackgroundCheck | None = None  # set while this process trains

    # ---- Implemented by subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def source_problems(self) -> list[str]:
        """Cheap checks of the subclass's arguments: one sentence per problem."""

    @abstractmethod
    def open_corpus(self) -> Corpus:
        """Open the tokens, which exist at this point. Called once on every rank, or on rank 0: ``opens_on_rank_zero``."""

    def source_files(self) -> list[Path]:
        """The files that hold the data, so that a changed one can be named; none if they are unknown."""
        return []

    def seen_sources(self) -> Seen | None:
        """The texts that the tokens were made from; None if the files of the tokens are the data."""
        return None

    # ---- Checks and set-up --------------------------------------------------------------------------------------

    def problems(self, world_size: int = 1) -> list[str]:
        """One sentence for each problem that can be found before any work is done.

        Args:
            world_size: data-parallel ranks of the run.
        """
        found = range_problems(type(self), "data", vars(self))
        if not found:
            found += self._batch_problems(world_size)
        return found + self.source_problems()

    def find_run(self, *, max_steps: int, max_epochs: int | None, saved: Mapping[str, Any] | None) -> None:
        """Tell a data module about a run of `fit` before the Trainer has the data, if its checks depend on the run.

        `max_steps` and `max_epochs` are the Trainer's. `saved` is the data's state in the checkpoint that the run continues.
        """

    def setup(self, stage: str | None = None) -> None:
        """Open the data and, for "fit", set the trainer's accumulation and last step.

        Raises:
            UserError: all problems, one sentence per line.
        """
        if stage == "fit" and self.trainer is not None:
            self.find_ramp(self.trainer.callbacks)  # type: ignore[attr-defined]
            self.find_pipeline(self.trainer.strategy)
        self._opened = self.read_corpus()
        if any(self.corpus.streams[name].masked for name in self._train_streams()):
            self.every_target_counts = False
        assert self.block_size is not None  # `read_corpus` has checked it
        if self.train_tokens < self.block_size + 1:
            raise UserError(
                f"The training text has {self.train_tokens} tokens, but a block needs {self.block_size + 1} "
                f"({self.block_size} and the next one): give more text, or lower --model.block_size."
            )
        if self.corpus.pairs and "train" not in self.corpus.streams:
            raise UserError(
                "A mixture has no pairs of answers: train on one folder with them (--data TokenShards --data.path DIR)."
            )
        if self.corpus.pairs and self.packing != "best_fit":
            raise UserError("Both answers of a pair must be in one block (--data.packing best_fit).")
        if self.corpus.pairs or (self.packing == "best_fit" and stage in ("fit", None)):
            self._open_plans()
        if stage == "fit" and self.trainer is not None:
            set_accumulation(self.trainer, self)
            set_end(self.trainer, self)

    def read_corpus(self) -> OpenedCorpus:
        self.raise_problems()
        if self.block_size is None:
            raise UserError("No block size: set --data.block_size (the command line uses --model.block_size).")
        if self._opened is not None:
            return self._opened
        return OpenedCorpus.of(self.open_corpus(), self.seen_sources())

    @property
    def files(self) -> StoredFiles:
        """The files that hold the tokens."""
        return self._open_data.files

    def refuse_changed_files(self) -> None:
        """Raise a ``UserError`` if the background check has found a file of the tokens that has changed."""
        if self._background is not None and self._background.problem is not None:
            raise UserError(self._background.problem)

    def teardown(self, stage: str) -> None:
        if self._background is not None:
            self._background.stop()
            self.refuse_changed_files()

    def _open_plans(self) -> None:
        """Open the plans of the training streams. One process makes missing plans, then all ranks read them. A collective.

        Rank 0 may have opened the plans alone before, to check the data: it still takes part.
        """
        if self._plans_shared:
            return
        corpus, problems = self.corpus, list[str]()
        trainer = self.trainer if self.trainer is not None and self.trainer.world_size > 1 else None

        def made() -> dict[str, PackPlan]:
            names, hashes = corpus.streams if corpus.pairs else self._train_streams(), self._open_data.hashes
            return {name: open_plan(corpus.documents(name), size=self._block_size, tokens_hash=hashes[name]) for name in names}

        # Each node may have a token cache of its own, with its own plans.
        if trainer is None or (trainer.is_global_zero if self.opens_on_rank_zero else trainer.local_rank == 0):
            with noting(problems):
                self._plans = self._plans or made()
        refuse(problems if trainer is None else trainer.strategy.broadcast(problems) or problems)
        self._plans, self._plans_shared = self._plans or made(), trainer is not None

    def cut_conversations(self) -> str:
        """A sentence, if the plans of training documents with masks have documents that are longer than a block; else ""."""
        counts = [plan.counts for name, plan in self._plans.items() if self.corpus.streams[name].masked]
        cut, every = sum(each.cut for each in counts), sum(each.documents for each in counts)
        if not cut:
            return ""
        return (
            f"{cut:,} of {every:,} training conversations are longer than data.block_size {self._block_size} and are cut, so "
            "that answers may lose their question (--data.block_size)"
        )

    def find_teachers(self) -> TeacherInfo:
        """Add a teacher's ids and log-probabilities to training batches, and return the record of the teacher.

        Raises:
            UserError: as `Teacher`; or the sources of a mixture have different teachers.
        """
        expected = {"vocab_size": self.vocab_size, "block_size": self._block_size, "packing": self.packing}
        for name in self._train_streams():
            self.teachers[name] = Teacher(self.corpus.streams[name], expected | {"tokens": self._open_data.hashes[name]})
            self.files.add(self.teachers[name].files())
        if len({teacher.info.name for teacher in self.teachers.values()}) > 1:
            raise UserError("The sources have different teachers: prepare all with one, and equal --top_k and --temperature.")
        return next(iter(self.teachers.values())).info

    def raise_problems(self) -> None:
        """Raise a ``UserError`` with all ``problems``, if there are any."""
        refuse(self.problems(self._data_parallel()[1]))

    @property
    def is_open(self) -> bool:
        """Whether `setup` has opened the data."""
        return self._opened is not None

    @property
    def _open_data(self) -> OpenedCorpus:
        assert self._opened is not None, "setup() opens the data"
        return self._opened

    @property
    def corpus(self) -> Corpus:
        return self._open_data.corpus

    @property
    def pairs(self) -> bool:
        """Whether documents are pairs of a chosen and a rejected answer. If so, batches have "pairs" (``PairBlocks``)."""
        return self.corpus.pairs

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.corpus.tokenizer

    @property
    def chat_form(self) -> ChatForm | None:
        """The form of the conversations; None if the documents are none."""
        return next(iter(chat_forms(self.corpus.streams[name] for name in self._train_streams())), None)

    @property
    def eos_id(self) -> int | None:
        return self.corpus.eos_id

    @property
    def bos_id(self) -> int | None:
        return self.corpus.bos_id

    @property
    def unknown_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.unknown_id

    @property
    def token_bytes(self) -> Tensor | None:
        return self.corpus.token_bytes()

    @property
    def train_tokens(self) -> int:
        return len(self.corpus.streams["train"])

    @property
    def val_tokens(self) -> int:
        return len(self.corpus.streams["val"])

    held_out = ""
    """The end of the line about the validation split that `validate` prints: of which data the split is a part."""

    @property
    def knows_documents(self) -> bool:
        """Whether all shards say where documents end, without a search for an id."""
        return self._opened is not None and self._opened.with_documents.issuperset(self.corpus.streams)

    @property
    def ends_open(self) -> bool:
        """Whether the id that ends a training document opens the next: all documents end with an id, and begin with none."""
        return all(self.corpus.ends_open(name) for name in self.corpus.streams if split_of(name) == "train")

    @property
    def source_names(self) -> list[str]:
        """The names of the sources of a mixture, in the order of a batch's ``sources``; empty without a mixture."""
        return []

    @property
    def fingerprint(self) -> str:
        return self._open_data.fingerprint

    # ---- Loaders ------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader:
        blocks = self.train_blocks()
        rank, world_size = self._data_parallel()
        if self.trainer is not None:
            if self.trainer.is_global_zero:
                self._background = BackgroundCheck(self.files)
            set_micro_batches_made(self.trainer, self.micro_batches_before)
        order = GlobalOrder(blocks, self, rank=rank, world_size=world_size)
        return self._loader(blocks, order)

    def val_dataloader(self) -> DataLoader:
        return at_least_one(self.trainer, "limit_val_batches", self.held_out_loader("val"))

    def test_dataloader(self) -> DataLoader:
        return at_least_one(self.trainer, "limit_test_batches", self.held_out_loader("test"))

    def held_out_loader(self, name: str) -> DataLoader:
        """A loader of the blocks of a split, each once. All ranks have the same number of batches."""
        blocks = self._held_out_blocks(name)
        rank, world_size = self._data_parallel()
        micro = self.micro_batch_size or self.global_batch_size // world_size
        return self._loader(blocks, HeldOutOrder(blocks, micro_batch_size=micro, rank=rank, world_size=world_size))

    def _loader(self, blocks: Blocks, order: GlobalOrder | HeldOutOrder) -> DataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return ResumableLoader(blocks, order, num_workers=self.num_workers, pin_memory=on_cuda)

    # ---- State --------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        identity = super().identity() | {"seed": self.seed, "packing": self.packing}
        for teacher in self.teachers.values():  # all sources have the same teacher
            identity["teacher"] = teacher.info.name
        return identity if self._opened is None else identity | self._fingerprints()

    def _fingerprints(self) -> dict[str, str]:
        return {"fingerprint": self.fingerprint}

    def changed_text(self, name: str, saved: dict[str, Any]) -> str:
        return self._open_data.change_since(saved.get("files", {}), self.source_files())

    def state_dict(self) -> dict[str, Any]:
        files = {"files": dict(self._opened.sources)} if self._opened is not None and self._opened.sources else {}
        return super().state_dict() | files

    # ---- What the run reads -------------------------------------------------------------------------------------

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass over the training data."""
        return len(self.train_blocks())

    def epochs_by_source(self, steps: int) -> dict[str, float]:
        """Source → the number of passes over it in a run of `steps` steps. Other data are one source without a name."""
        return {"": self.samples_at(steps) / self.epoch_samples}

    def describe_phases(self) -> list[str]:
        """One line about the phases of a mixture that are still to come; empty for other data, or at the end of a run."""
        return []

    # ---- Blocks and their order ---------------------------------------------------------------------------------

    def train_blocks(self) -> Blocks:
        """The blocks of training, in the order of the text."""
        return self._blocks_of("train")

    def _held_out_blocks(self, split: str) -> Blocks:
        if split not in self.corpus.streams:
            raise UserError(self.missing_text(split))
        return self._blocks_of(split)

    def missing_text(self, split: str) -> str:
        """Why a split cannot be read."""
        return f"No {split} text: give --data.{split}."

    def _train_streams(self) -> list[str]:
        """The streams that the training reads."""
        return ["train"]

    def _blocks_of(self, name: str) -> StreamBlocks:
        """The blocks of the stream ``name`` in ``corpus.streams``."""
        corpus, stream = self.corpus, self.corpus.streams[name]
        alike = {other for other in corpus.streams if split_of(other) == split_of(name)}  # a batch has rows of all of them
        known = (self.gives_documents or corpus.pairs) and self._open_data.with_documents.issuperset(alike)
        settings: dict[str, Any] = {"block_size": self._block_size, "vocab_size": self.vocab_size}
        settings["documents"] = corpus.documents(name) if known else None
        blocks: StreamBlocks
        if corpus.pairs:
            blocks = PairBlocks(stream, self._plans[name], first=corpus.tokens_before(name), **settings)
        elif name not in self._train_streams():
            blocks = HeldOutBlocks(stream, **settings)
        elif self.packing == "best_fit":
            blocks = PackedBlocks(stream, self._plans[name], **settings)
        else:
            blocks = TrainBlocks(stream, **settings)
        blocks.teacher = self.teachers.get(name)
        return blocks

    def locate(self, g: np.ndarray) -> np.ndarray:
        """The addresses of the blocks that the global samples (n,) read: (n,), or (n, k) if an address has k numbers."""
        return sample_index(g, samples=len(self.train_blocks()), seed=self.seed)


def chat_forms(streams: Iterable[TokenStream]) -> dict[ChatForm, Path]:
    """Each form of conversations in the folders of the streams' manifests → the first folder that has it.

    Raises:
        UserError: A file of a form is missing or damaged.
    """
    forms: dict[ChatForm, Path] = {}
    for stream in streams:
        if (folder := stream.folder_of_manifest) is not None and (form := ChatForm.read(folder)) is not None:
            forms.setdefault(form, folder)
    return forms


def split_of(name: str) -> str:
    """The split of a stream: "train" of "train", and of "web/train" in a mixture."""
    return name.rpartition("/")[2]
