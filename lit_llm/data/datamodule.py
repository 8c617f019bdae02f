"""The base of all data modules: batch sizes, the order of samples, held-out loaders, and the position in the data.

One Lightning epoch is the whole run: the training loader has the length of ``max_steps`` optimizer steps. Passes over the
data ("data epochs") exist only inside the order (``lit_llm.data.order``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lit_llm.callbacks import BatchRamp, ignore_signals
from lit_llm.core._lightning import set_micro_batches_made
from lit_llm.core.batch_sizes import batch_problem, micro_batch
from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.core.number_domain import INT64, range_problems, whole
from lit_llm.data.batches import GlobalOrder, HeldOutOrder, ResumableLoader
from lit_llm.data.blocks import Blocks, HeldOutBlocks, PackedBlocks, PairBlocks, StreamBlocks, TrainBlocks
from lit_llm.data.corpus import Corpus, OpenedCorpus
from lit_llm.data.document_ends import Documents
from lit_llm.data.order import sample_index
from lit_llm.data.pack_plan import PackPlan, open_plan
from lit_llm.data.run_length import at_least_one, set_accumulation, set_end
from lit_llm.data.stored_files import BackgroundCheck, Seen, StoredFiles
from lit_llm.data.teacher import Teacher, TeacherInfo
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.chat import ChatForm
from lit_llm.tokenizers import Tokenizer


class TokenDataModule(LightningDataModule, ABC):
    """Base of the data modules. Subclasses check and open their sources.

    Batches are dicts of int64 ``input_ids`` and ``targets``, both (B, block_size); see ``lit_llm.data.blocks``.

    After ``setup``: ``vocab_size``, ``eos_id``, ``bos_id``, ``tokenizer``, ``token_bytes`` ((vocab_size,) int64 UTF-8 bytes
    of each id, or None without a tokenizer), ``train_tokens``, ``val_tokens``, and ``fingerprint`` (counts and a hash of the
    tokens; it starts with "tokens-" if the hash is of every token).

    A ``BatchRamp`` among the trainer's callbacks sets the samples of each step, up to ``global_batch_size``.

    Args:
        micro_batch_size: the most sequences in one forward pass of one rank (``lit_llm.core.batch_sizes``). None: no limit.
        global_batch_size: sequences per optimizer step over all ranks. Accumulation is derived from it.
        block_size: tokens predicted per sequence (T). None: the block size of the model.
        seed: seed of the order of the training samples.
        num_workers: processes that read ahead. Reading is cheap, so 0 is right unless the disk is slow.
        packing: concatenate: a block of training is ``block_size`` consecutive tokens. best_fit: whole documents share a block,
            and only longer ones are cut (``lit_llm.data.packing``). Validation reads consecutive tokens.
    """

    # Whether no training target is ignored (-100), so that the tokens of a step need not be counted. `setup` finds masks.
    every_target_counts = True
    # Whether rank 0 opens the data for all ranks. They must have the same paths everywhere.
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
        super().__init__()
        self.micro_batch_size, self.global_batch_size, self.block_size = micro_batch_size, global_batch_size, block_size
        self.seed, self.num_workers, self.packing = seed, num_workers, packing
        if packing == "best_fit":
            self.every_target_counts = False  # blocks have padding
        # Whether batches have the numbers of documents, if the shards know where documents end. The model asks for it.
        self.gives_documents = False
        self.teachers: dict[str, Teacher] = {}  # of the training streams, by name, if `find_teachers` was called
        self._plans: dict[str, PackPlan] = {}  # of the training streams, by name
        self._plans_shared = False  # whether all ranks know that the plans are there
        self.ramp: BatchRamp | None = None  # set by `find_ramp`
        self.pipeline: Any = None  # the PipelineLayout that `find_pipeline` finds
        self._opened: OpenedCorpus | None = None
        self._background: BackgroundCheck | None = None  # while this process trains
        self._received = False  # whether all ranks have what rank 0 has opened
        # The sample and step counts at which this process started: zero, or those of a checkpoint.
        self._base_samples, self._base_step = 0, 0

    # ---- Implemented by subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def source_problems(self) -> list[str]:
        """Cheap checks of the subclass's arguments: one sentence per problem."""

    @abstractmethod
    def open_corpus(self) -> Corpus:
        """Open the tokens, which exist at this point. Called once on every rank, or on rank 0: ``opens_on_rank_zero``."""

    def load_tokenizer(self, corpus: Corpus) -> Tokenizer | None:
        """The tokenizer of a corpus that rank 0 has opened: tokenizers are not sent to other ranks."""
        return corpus.tokenizer

    def source_files(self) -> list[Path]:
        """The files that hold the data, so that a changed one can be named; none if they are unknown."""
        return []

    def seen_sources(self) -> Seen | None:
        """The texts that the tokens were made from; None if the files of the tokens are the data."""
        return None

    def source_folders(self) -> list[Path]:
        """The folders that are read with everything below them."""
        return []

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

    def _batch_problems(self, ranks: int) -> list[str]:
        whole, length, ramp = self.global_batch_size, self.block_size, self.ramp
        layout = self.micro_batch_size, ranks, self.pipeline
        if ramp is None or length is None:  # `setup` reports a missing block size
            problem = batch_problem(whole, *layout)
            return [] if problem is None else [problem]
        sizes = dict.fromkeys(size for _, size in ramp.tokens_per_batch)
        found = [problem for size in sizes if (problem := batch_problem(size, *layout, length=length))]
        final = ramp.stages[-1].size
        if final % length == 0 and final != whole * length:
            found.append(
                f"batch_ramp ends with {final} tokens per batch, but global_batch_size {whole} x block_size {length} = "
                f"{whole * length}: the two must be equal (--data.global_batch_size {final // length})."
            )
        return found

    def find_run(self, *, max_steps: int, max_epochs: int | None, saved: Mapping[str, Any] | None) -> None:
        """What is known of a run of `fit` before its Trainer has the data, for data modules whose checks depend on it.

        Args:
            max_steps, max_epochs: of the Trainer.
            saved: the ``state_dict`` of the checkpoint that the run continues from.
        """

    def find_ramp(self, callbacks: Iterable[Callback | None]) -> None:
        """Use the ``BatchRamp`` among a trainer's callbacks, if there is one."""
        self.ramp = next((callback for callback in callbacks if isinstance(callback, BatchRamp)), None)

    def find_pipeline(self, strategy: object) -> None:
        """Derive micro-batches that the pipeline of a strategy can run, if it has one."""
        self.pipeline = getattr(strategy, "pipeline_layout", None)

    def setup(self, stage: str | None = None) -> None:
        """Open the data and, for "fit", set the trainer's accumulation and last step.

        Raises:
            UserError: all problems, one sentence per line.
        """
        if stage == "fit" and self.trainer is not None:
            self.find_ramp(self.trainer.callbacks)  # type: ignore[attr-defined]
            self.find_pipeline(self.trainer.strategy)
        if self.opens_on_rank_zero and not self._received and self.trainer is not None and self.trainer.world_size > 1:
            self._opened = self._receive()
            self._received = True
        else:
            self._opened = self._open()
        if any(self.corpus.streams[name].masked for name in self._train_streams()):
            self.every_target_counts = False
        assert self.block_size is not None  # `_open` has checked it
        if self.train_tokens < self.block_size + 1:
            raise UserError(
                f"The training text has {self.train_tokens} tokens, but a block needs {self.block_size + 1} "
                f"({self.block_size} and the next one): give more text, or lower --model.block_size."
            )
        if self.pairs and "train" not in self.corpus.streams:
            raise UserError(
                "A mixture has no pairs of answers: train on one folder with them (--data TokenShards --data.path DIR)."
            )
        if self.pairs and self.packing != "best_fit":
            raise UserError("Both answers of a pair must be in one block (--data.packing best_fit).")
        if self.pairs or (self.packing == "best_fit" and stage in ("fit", None)):
            self._open_plans()
        if stage == "fit" and self.trainer is not None:
            set_accumulation(self.trainer, self)
            set_end(self.trainer, self)

    def _open(self) -> OpenedCorpus:
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

    def changed_files(self, saved: Mapping[str, Any], *, accepted: bool) -> list[str]:
        """A sentence for each file of the tokens that holds something else than at a checkpoint.

        Args:
            saved: the ``state_dict`` of the checkpoint.
            accepted: as of `StoredFiles.changes`.
        """
        if self.seen_sources() is not None:  # then the checkpoint has the states of texts
            return []
        return self.files.changes(saved.get("files", {}), accepted=accepted)

    def refuse_changed_files(self) -> None:
        """
        Raises:
            UserError: A file of the tokens has been found in the background that does not hold what it must.
        """
        if self._background is not None and self._background.problem is not None:
            raise UserError(self._background.problem)

    def teardown(self, stage: str) -> None:
        if self._background is not None:
            self._background.stop()
            self.refuse_changed_files()

    def _receive(self) -> OpenedCorpus:
        """What rank 0 has opened, on every rank. A collective. Problems on rank 0 are raised on every rank."""
        opened, problems = None, list[str]()
        strategy = self.trainer.strategy  # type: ignore[union-attr]
        if strategy.is_global_zero:
            with noting(problems):
                opened = self._open()
        own = opened
        sent = None if opened is None else replace(opened, corpus=replace(opened.corpus, tokenizer=None))
        opened, problems = strategy.broadcast((sent, problems))
        if opened is None:
            raise UserError("\n".join(problems))
        return own or replace(opened, corpus=replace(opened.corpus, tokenizer=self.load_tokenizer(opened.corpus)))

    def _open_plans(self) -> None:
        """Open the plans of the training streams. One process makes those that are missing, then all read them. A collective.

        Rank 0 may have opened them alone before, to check the data: then it still takes part.
        """
        if self._plans_shared:
            return
        trainer = self.trainer
        if trainer is None or trainer.world_size == 1:
            self._plans = self._plans or self._make_plans()
            return
        makes = trainer.is_global_zero if self.opens_on_rank_zero else trainer.local_rank == 0  # a cache may be each node's own
        problems: list[str] = []
        if makes:
            with noting(problems):
                self._plans = self._plans or self._make_plans()
        refuse(trainer.strategy.broadcast(problems) or problems)
        self._plans, self._plans_shared = self._plans or self._make_plans(), True

    def _make_plans(self) -> dict[str, PackPlan]:
        streams, hashes = self.corpus.streams, self._open_data.hashes
        return {
            name: open_plan(self._documents(streams[name]), size=self._block_size, tokens_hash=hashes[name])
            for name in (streams if self.pairs else self._train_streams())
        }

    def find_teachers(self) -> TeacherInfo:
        """Let training batches have what a teacher gives.

        Raises:
            UserError: as `Teacher`; or the sources of a mixture have different ones.
        """
        of_blocks = {"vocab_size": self.vocab_size, "block_size": self._block_size, "packing": self.packing}
        hashes = self._open_data.hashes
        for name in self._train_streams():
            self.teachers[name] = Teacher(self.corpus.streams[name], of_blocks | {"tokens": hashes[name]})
            self.files.add(self.teachers[name].files())
        infos = [each.info for each in self.teachers.values()]
        if len({info.name for info in infos}) > 1:
            raise UserError("The sources have different teachers: prepare all with one, and equal --top_k and --temperature.")
        return infos[0]

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
        """Whether documents are pairs of a chosen and a rejected answer. A batch has "pairs" then (``PairBlocks``)."""
        return any(stream.pairs for stream in self.corpus.streams.values())

    @property
    def pair_folder(self) -> Path:
        """Where the shards of pairs are."""
        folder = self.corpus.streams["train"].folder_of_manifest
        assert folder is not None, "a manifest says that there are pairs"
        return folder

    def pair_positions(self) -> np.ndarray:
        """(n,) int64, ascending: where each pair of all splits begins, as "pairs" of a batch says it."""
        streams = self.corpus.streams
        starts = (
            pool + self._tokens_before(name) for name in streams for pool, _ in self._documents(streams[name]).pools(2**18)
        )
        return np.concatenate([*starts, np.empty(0, dtype=np.int64)])

    def pair_loaders(self) -> list[DataLoader]:
        """All pairs of all splits that blocks have, each once, in batches of equal number on all ranks."""
        return [self._held_out_loader(name) for name in self.corpus.streams]

    def _tokens_before(self, name: str) -> int:
        """Of the streams before that of this name."""
        sizes = {other: len(stream) for other, stream in self.corpus.streams.items()}
        return sum(list(sizes.values())[: list(sizes).index(name)])

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.corpus.tokenizer

    @property
    def chat_form(self) -> ChatForm | None:
        """How the documents are written, if they are conversations."""
        return next(iter(chat_forms(self.corpus.streams[name] for name in self._train_streams())), None)

    @property
    def eos_id(self) -> int | None:
        if self.corpus.eos_id is not None:
            return self.corpus.eos_id
        return None if self.tokenizer is None else self.tokenizer.eos_id

    @property
    def bos_id(self) -> int | None:
        return self.corpus.bos_id

    @property
    def unknown_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.unknown_id

    @property
    def token_bytes(self) -> Tensor | None:
        if self.tokenizer is None:
            return None
        sizes = torch.zeros(self.vocab_size, dtype=torch.int64)  # (V,): ids outside the tokenizer have no bytes
        known = torch.from_numpy(self.tokenizer.token_bytes())
        sizes[: len(known)] = known
        return sizes

    def token_bytes_of(self, split: str) -> Tensor | None:
        """``token_bytes``, in float64 if their sum over the split is not the text's bytes: then so changed that it is.

        Unknown characters get their own mean. Else, such as for a space that a tokenizer puts before each text, all ids change
        by one factor.
        """
        sizes, text = self.token_bytes, self.corpus.text_sizes.get(split)
        if sizes is None or text is None or text.bytes == text.token_bytes:
            return sizes
        sizes, unknown = sizes.double(), None if self.tokenizer is None else self.tokenizer.unknown_id
        if unknown is None or not text.unknown_tokens:
            return sizes * (text.bytes / max(text.token_bytes, 1))
        sizes[unknown] = (text.bytes - text.token_bytes) / text.unknown_tokens
        return sizes

    @property
    def train_tokens(self) -> int:
        return len(self.corpus.streams["train"])

    @property
    def val_tokens(self) -> int:
        return len(self.corpus.streams["val"])

    @property
    def knows_documents(self) -> bool:
        """Whether all shards know where documents end, other than by an id."""
        return self._opened is not None and self._opened.with_documents.issuperset(self.corpus.streams)

    @property
    def ends_open(self) -> bool:
        """Whether the end of each training document opens the next: all end with an id, and begin with none."""
        return all(self._ends_open(stream) for name, stream in self.corpus.streams.items() if split_of(name) == "train")

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
        return at_least_one(self.trainer, "limit_val_batches", self._held_out_loader("val"))

    def test_dataloader(self) -> DataLoader:
        return at_least_one(self.trainer, "limit_test_batches", self._held_out_loader("test"))

    def _held_out_loader(self, name: str) -> DataLoader:
        blocks = self._held_out_blocks(name)
        rank, world_size = self._data_parallel()
        micro = self.micro_batch_size or self.global_batch_size // world_size
        return self._loader(blocks, HeldOutOrder(blocks, micro_batch_size=micro, rank=rank, world_size=world_size))

    def _loader(self, blocks: Blocks, order: GlobalOrder | HeldOutOrder) -> DataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return ResumableLoader(
            blocks,
            sampler=order,
            batch_size=None,  # the sampler yields whole micro-batches
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=ignore_signals,  # Ctrl-C and SLURM signal the process group; the main process stops its workers
            pin_memory=on_cuda,
        )

    # ---- Position in the data -----------------------------------------------------------------------------------

    @property
    def consumed_samples(self) -> int:
        """Global samples trained on so far: the only state of the data, derived from the trainer's step count."""
        return self.samples_at(self.step)

    def samples_at(self, step: int) -> int:
        """Samples of the run after ``step`` steps, of which a checkpoint may have had other batch sizes."""
        return self._base_samples + self.samples_before(step) - self.samples_before(self._base_step)

    @property
    def step_samples(self) -> range:
        """Global numbers of the samples in the next optimizer step."""
        return range(self.consumed_samples, self.consumed_samples + self.batch_samples(self.step))

    @property
    def first_steps(self) -> list[int]:
        """The first step of each stage of the ramp, counted from 0; without a ramp there is one."""
        return [0] if self.ramp is None else [stage.step for stage in self.ramp.stages]

    def batch_samples(self, step: int) -> int:
        """Global samples in step ``step``, counted from 0."""
        return self.global_batch_size if self.ramp is None else self.ramp.batch_tokens(step) // self._block_size

    def samples_before(self, step: int) -> int:
        """Global samples in the first ``step`` steps."""
        return step * self.global_batch_size if self.ramp is None else self.ramp.tokens_before(step) // self._block_size

    def micro_batch_samples(self, step: int) -> int:
        """Samples of a micro-batch of one rank in step ``step``, counted from 0."""
        return micro_batch(self.batch_samples(step), self.micro_batch_size, self._data_parallel()[1], self.pipeline)

    def micro_batches(self, step: int) -> int:
        """Micro-batches of each rank in step ``step``, counted from 0."""
        return self.batch_samples(step) // (self.micro_batch_samples(step) * self._data_parallel()[1])

    def micro_batches_before(self, step: int) -> int:
        """Micro-batches of each rank in the first ``step`` steps."""
        stages = zip(self.first_steps, [*self.first_steps[1:], step], strict=True)
        return sum(max(0, min(end, step) - first) * self.micro_batches(first) for first, end in stages)

    def micro_batch_tokens(self, step: int) -> int:
        """Tokens of one micro-batch on one rank in step ``step``, counted from 0."""
        return self.micro_batch_samples(step) * self._block_size

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._base_step if self.trainer is None else self.trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        files = {"files": dict(self._opened.sources)} if self._opened is not None and self._opened.sources else {}
        return {"consumed_samples": self.consumed_samples, "global_step": self.step} | self._identity() | files

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("consumed_samples", "global_step"):
            count: Any = state_dict.get(name)
            if type(count) is not int or not 0 <= count < 2**63:
                raise UserError(f"the checkpoint has {name} {str(count)[:40]!r}: restore it, or use another one (--resume)")
        self._base_samples, self._base_step = state_dict["consumed_samples"], state_dict["global_step"]
        # On rank 0 only: it may read the data.
        resumes = self.trainer is not None and self.trainer.state.fn == "fit" and self.trainer.is_global_zero
        if resumes and (changed := self._changes(state_dict)):
            rank_zero_warn(
                "The data differ from those of the checkpoint, so the run continues with different batches: "
                f"{'; '.join(changed)}."
            )

    def changes_since(self, checkpoint: dict[str, Any]) -> list[str]:
        """One sentence for each setting that affects the next batches and differs from a checkpoint's.

        The data themselves are compared only after `setup`, which opens them.
        """
        if type(self).__qualname__ not in checkpoint:
            return [
                f"the checkpoint was not trained with {type(self).__qualname__}, so the position in the data is unknown "
                "(--data, or --accept_changes true to start with the first sample)"
            ]
        if not isinstance(saved := checkpoint[type(self).__qualname__], dict):
            raise UserError(f"the checkpoint's {type(self).__qualname__} is no dict: restore it, or use another one (--resume)")
        found = self._changes(saved)
        return [f"{change} (--accept_changes true continues with it)" for change in found]

    def _changes(self, saved: dict[str, Any]) -> list[str]:
        """What differs from a saved state, one phrase each."""
        return [self.describe_change(name, before, saved) for name, before in self.changed_settings(saved).items()]

    def describe_change(self, name: str, before: Any, saved: dict[str, Any]) -> str:
        """One phrase about a part of `_identity` that was ``before`` in a saved state."""
        if name == "fingerprint":
            return self._open_data.change_since(str(before), saved.get("files", {}), self.source_files())
        key = {"batch_ramp": "batch_ramp.tokens_per_batch", "teacher": "the teacher"}.get(name, f"data.{name}")
        return f"{key} was {before} in the checkpoint and is {self._identity()[name]}"

    def changed_settings(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The settings that differ from a saved state, with their saved values ("none" if not saved)."""
        before = {name: saved.get(name, "none") for name in self._identity()}
        changed = {name: before[name] for name, now in self._identity().items() if before[name] != now}
        if "fingerprint" in changed and self._open_data.is_of_samples(str(changed["fingerprint"])):
            del changed["fingerprint"]
        return changed

    def _identity(self) -> dict[str, Any]:
        """The settings that, with the position, determine the next batches."""
        identity = {
            "global_batch_size": self.global_batch_size,
            "batch_ramp": "none" if self.ramp is None else [list(pair) for pair in self.ramp.tokens_per_batch],
            "block_size": self._block_size,
            "seed": self.seed,
            "packing": self.packing,
        }
        for teacher in self.teachers.values():  # the same of all sources
            identity["teacher"] = teacher.info.name
        return identity if self._opened is None else identity | self._data_identity()

    def _data_identity(self) -> dict[str, Any]:
        """The part of `_identity` that shows once the data are open."""
        return {"fingerprint": self.fingerprint}

    # ---- The trainer --------------------------------------------------------------------------------------------

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass over the training data."""
        return len(self.train_blocks())

    def epochs_by_source(self, steps: int) -> dict[str, float]:
        """Passes over each source that a run of `steps` steps reads. Data without sources have one, without a name."""
        return {"": self.samples_at(steps) / self.epoch_samples}

    def describe_phases(self) -> list[str]:
        """A line about the phases of a mixture that are to come; none for other data, or at the end of a run."""
        return []

    def _data_parallel(self) -> tuple[int, int]:
        """(data-parallel rank, world size). Single-device strategies lack the property."""
        if self.trainer is None:
            return 0, 1
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    @property
    def max_steps(self) -> int:
        """Of the trainer; -1: no end, or not known."""
        return -1 if self.trainer is None else self.trainer.max_steps

    @property
    def _block_size(self) -> int:
        assert self.block_size is not None, "setup() checks it"
        return self.block_size

    # ---- Blocks and their order ---------------------------------------------------------------------------------

    def train_blocks(self) -> Blocks:
        """The blocks of training, in the order of the text."""
        return self._train_blocks_of("train")

    def _held_out_blocks(self, split: str) -> Blocks:
        if split not in self.corpus.streams:
            raise UserError(self.missing_text(split))
        return self._held_out_blocks_of(split)

    def missing_text(self, split: str) -> str:
        """Why a split cannot be read."""
        return f"No {split} text: give --data.{split}."

    def _train_streams(self) -> list[str]:
        """The streams that the training reads."""
        return ["train"]

    def _train_blocks_of(self, name: str) -> Blocks:
        """The blocks of the training stream of that name in ``corpus.streams``."""
        blocks: StreamBlocks = (
            self._blocks_of_plan(name)
            if self.packing == "best_fit"
            else TrainBlocks(self.corpus.streams[name], **self._block_settings(name))
        )
        blocks.teacher = self.teachers.get(name)
        return blocks

    def _blocks_of_plan(self, name: str) -> PackedBlocks:
        stream, settings = self.corpus.streams[name], self._block_settings(name)
        if self.pairs:
            return PairBlocks(stream, self._plans[name], first=self._tokens_before(name), **settings)
        return PackedBlocks(stream, self._plans[name], **settings)

    def _held_out_blocks_of(self, name: str) -> Blocks:
        """The blocks of the held-out stream of that name in ``corpus.streams``."""
        return (
            self._blocks_of_plan(name) if self.pairs else HeldOutBlocks(self.corpus.streams[name], **self._block_settings(name))
        )

    def _block_settings(self, name: str) -> dict[str, Any]:
        # Batches have rows of all streams of a split.
        alike = {other for other in self.corpus.streams if split_of(other) == split_of(name)}
        known = (self.gives_documents or self.pairs) and self._open_data.with_documents.issuperset(alike)
        documents = self._documents(self.corpus.streams[name]) if known else None
        return {"block_size": self._block_size, "vocab_size": self.vocab_size, "documents": documents}

    def _documents(self, stream: TokenStream) -> Documents:
        return Documents(stream, ends_open=self._ends_open(stream))

    def _ends_open(self, stream: TokenStream) -> bool:
        given = self.eos_id is not None and self.bos_id is None
        return given if stream.ends_open is None else stream.ends_open

    def locate(self, g: np.ndarray) -> np.ndarray:
        """The addresses of the blocks that the global samples (n,) read: (n,), or (n, k) if an address has k numbers."""
        return sample_index(g, samples=len(self.train_blocks()), seed=self.seed)


def chat_forms(streams: Iterable[TokenStream]) -> dict[ChatForm, Path]:
    """The forms of conversations in the folders of manifests, and a folder of each.

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
