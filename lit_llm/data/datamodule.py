"""The base class of all data modules: the methods that Lightning calls, checks of settings, loaders and saved states.

Three files make batches: `corpus.py` has the blocks of the text, `position.py` the numbers of the samples in each optimizer
step, and this file connects both to Lightning. `order.py` has the order of the samples.

One Lightning epoch is the whole run: the training loader has the length of ``max_steps`` optimizer steps. Passes over the
data ("data epochs") exist only inside the order of the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lit_llm.callbacks import BatchRamp
from lit_llm.callbacks._lightning import data_parallel
from lit_llm.core._lightning import set_micro_batches_made
from lit_llm.core.errors import UserError, noting, refuse
from lit_llm.core.number_domain import INT64, range_problems, whole
from lit_llm.data.batches import GlobalOrder, HeldOutOrder, ResumableLoader
from lit_llm.data.blocks import Blocks
from lit_llm.data.corpus import OpenedCorpus
from lit_llm.data.holds_corpus import HoldsCorpus
from lit_llm.data.order import sample_index
from lit_llm.data.position import StepSamples, batch_problems, saved_base, setting_changes
from lit_llm.data.run_length import at_least_one, set_accumulation, set_end
from lit_llm.data.stored_files import BackgroundCheck
from lit_llm.data.teacher import TeacherInfo


class TokenDataModule(HoldsCorpus, LightningDataModule):
    """Base class of the data modules. A subclass checks and opens its texts or token shards.

    Batches are dicts of int64 ``input_ids`` and ``targets``, both (B, block_size); see ``lit_llm.data.blocks``. After
    ``setup``, the properties of ``HoldsCorpus`` can be read, such as ``vocab_size``, ``tokenizer`` and ``train_tokens``.

    A ``BatchRamp`` among the trainer's callbacks sets the samples of each step, up to ``global_batch_size``.

    Args:
        micro_batch_size: the most sequences in one forward pass of one rank (``lit_llm.core.batch_sizes``). None: no limit.
        global_batch_size: sequences per optimizer step over all ranks. Gradient accumulation is derived from this number.
        block_size: tokens predicted per sequence (T). None: the block size of the model.
        seed: seed of the order of the training samples.
        num_workers: processes that read ahead. Reading is cheap, so 0 is right unless the disk is slow.
        packing: concatenate: a block of training is ``block_size`` consecutive tokens. best_fit: whole documents share a block,
            and only documents longer than a block are cut (``lit_llm.data.packing``). Validation reads consecutive tokens.
    """

    # Whether no training target is ignored (-100), so that the targets of a step need not be counted. False with masks.
    every_target_counts = True
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
        # Whether batches have "documents", if the shards say where documents end. True if the model needs document numbers.
        self.gives_documents = False
        self.ramp: BatchRamp | None = None  # set by `find_ramp`
        self.pipeline: Any = None  # the PipelineLayout that `find_pipeline` finds
        self._base = 0, 0  # the steps and samples at which this process started: zero, or those of a checkpoint
        self._plans_shared = False  # whether all ranks have opened the packing plans: then rank 0 may call `setup` alone
        self._background: BackgroundCheck | None = None  # set while this process trains

    # ---- The run, checks and set-up -----------------------------------------------------------------------------

    def find_run(self, *, max_steps: int, max_epochs: int | None, saved: Mapping[str, Any] | None) -> None:
        """`fit` calls this before the Trainer gets the module. Does nothing here; `Mixture` stores the run's length and phases.

        `max_steps` and `max_epochs` are the Trainer's. `saved` is the data module's state in the checkpoint from which the run
        continues; None: the run is new.
        """

    def find_ramp(self, callbacks: Iterable[Callback | None]) -> None:
        """Set `ramp` to the ``BatchRamp`` among a trainer's callbacks, which sets the batch size of each step; else to None."""
        self.ramp = next((callback for callback in callbacks if isinstance(callback, BatchRamp)), None)

    def find_pipeline(self, strategy: object) -> None:
        """Set `pipeline` to the strategy's pipeline layout, which limits the micro-batches in a step; None: no pipeline."""
        self.pipeline = getattr(strategy, "pipeline_layout", None)

    def find_teachers(self) -> TeacherInfo:
        """Open the files with a teacher model's predictions, for distillation: training batches then have the predictions.

        Return the settings with which the files were made. Raises a UserError if files are missing, damaged or made for other
        tokens or blocks, or if the sources of a mixture have different teachers."""
        self._opened = self.opened.with_teachers(self._block_size, self.packing)
        return next(iter(self._opened.teachers.values())).info

    def problems(self, world_size: int = 1) -> list[str]:
        """One sentence for each problem of a run on ``world_size`` data-parallel ranks, as far as cheap checks can tell."""
        problems = range_problems(type(self), "data", vars(self))
        if not problems:
            batch = self.global_batch_size, self.micro_batch_size, world_size, self.pipeline
            ramp = [] if self.ramp is None else [size for _, size in self.ramp.tokens_per_batch]
            problems += batch_problems(*batch, ramp=ramp, length=self.block_size)  # `setup` reports a missing block size
        return problems + self.source_problems()

    def raise_problems(self) -> None:
        """Raise a ``UserError`` with all ``problems``, if there are any."""
        refuse(self.problems(self._rank[1]))

    def setup(self, stage: str | None = None) -> None:
        """Open the data and, for "fit", set the trainer's gradient accumulation and the optimizer step at which training ends.

        Raises:
            UserError: all problems, one sentence per line.
        """
        if stage == "fit" and self.trainer is not None:
            self.find_ramp(self.trainer.callbacks)  # type: ignore[attr-defined]
            self.find_pipeline(self.trainer.strategy)
        self._opened = self.read_corpus()
        if any(self.corpus.streams[name].masked for name in self.corpus.train_streams):
            self.every_target_counts = False
        self.corpus.refuse_training(self._block_size, self.packing)
        if self.pairs or (self.packing == "best_fit" and stage in ("fit", None)):
            self._open_plans()
        if stage == "fit" and self.trainer is not None:
            set_accumulation(self.trainer, self)
            set_end(self.trainer, self)

    def read_corpus(self) -> OpenedCorpus:
        self.raise_problems()
        if self.block_size is None:
            raise UserError("No block size: set --data.block_size (the command line uses --model.block_size).")
        return self._opened or OpenedCorpus.of(self.open_corpus(), self.seen_sources())

    def _open_plans(self) -> None:
        """Open the packing plans, which say what each packed block contains. A collective: all ranks must call this method.

        One process (of each node, if nodes have data of their own) makes missing plans, then all ranks read the plans. Rank 0
        may have opened the plans before, alone, to check the data; it still takes part in the collective.
        """
        if self._plans_shared:
            return
        problems = list[str]()
        trainer = self.trainer if self.trainer is not None and self.trainer.world_size > 1 else None
        # Each node may have a token cache of its own, with its own plans.
        if trainer is None or (trainer.is_global_zero if self.opens_on_rank_zero else trainer.local_rank == 0):
            with noting(problems):
                self._opened = self.opened.with_plans(self._block_size)
        refuse(problems if trainer is None else trainer.strategy.broadcast(problems) or problems)
        self._opened, self._plans_shared = self.opened.with_plans(self._block_size), trainer is not None

    def refuse_changed_files(self) -> None:
        """Raise a ``UserError`` if the background check has found that a file of the tokens has changed."""
        if self._background is not None and self._background.problem is not None:
            raise UserError(self._background.problem)

    def teardown(self, stage: str) -> None:
        if self._background is not None:
            self._background.stop()
            self.refuse_changed_files()

    # ---- Loaders ------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader:
        blocks = self.blocks("train")
        rank, world_size = self._rank
        if self.trainer is not None:
            if self.trainer.is_global_zero:
                self._background = BackgroundCheck(self.opened.files)
            set_micro_batches_made(self.trainer, self.samples.micro_batches_before)
        order = GlobalOrder(blocks, self, rank=rank, world_size=world_size)
        return self._loader(blocks, order)

    def val_dataloader(self) -> DataLoader:
        return at_least_one(self.trainer, "limit_val_batches", self.held_out_loader("val"))

    def test_dataloader(self) -> DataLoader:
        return at_least_one(self.trainer, "limit_test_batches", self.held_out_loader("test"))

    def held_out_loader(self, split: str) -> DataLoader:
        """A DataLoader for the blocks of a held-out split. Ranks share the blocks, each read once, in equally many batches."""
        if not self.corpus.of_split(split):
            raise UserError(self.missing_text(split))
        blocks = self.blocks(split)
        rank, world_size = self._rank
        micro = self.micro_batch_size or self.global_batch_size // world_size
        return self._loader(blocks, HeldOutOrder(blocks, micro_batch_size=micro, rank=rank, world_size=world_size))

    def _loader(self, blocks: Blocks, order: GlobalOrder | HeldOutOrder) -> DataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return ResumableLoader(blocks, order, num_workers=self.num_workers, pin_memory=on_cuda)

    # ---- Samples and blocks -------------------------------------------------------------------------------------

    @property
    def samples(self) -> StepSamples:
        """The object that computes each optimizer step's samples and micro-batches from batch sizes, batch ramp and ranks."""
        stages = ((0, self.global_batch_size),) if self.ramp is None else self.ramp.sequences(self._block_size)
        return StepSamples(stages, self.micro_batch_size, self._rank[1], self.pipeline, self._base)

    @property
    def _rank(self) -> tuple[int, int]:
        """The data-parallel rank of this process, and the number of data-parallel ranks."""
        return (0, 1) if self.trainer is None else data_parallel(self.trainer)

    @property
    def _block_size(self) -> int:
        assert self.block_size is not None, "setup() checks it"
        return self.block_size

    @property
    def step(self) -> int:
        """The number of optimizer steps that the run has taken so far."""
        return self._base[0] if self.trainer is None else self.trainer.global_step

    @property
    def consumed_samples(self) -> int:
        """Number of samples that all ranks together have trained on so far, derived from the trainer's optimizer step."""
        return self.samples.before(self.step)

    @property
    def step_samples(self) -> range:
        """The numbers, counted over the run and all ranks, of the samples in the next optimizer step."""
        return range(self.consumed_samples, self.samples.before(self.step + 1))

    def micro_batch_tokens(self, step: int) -> int:
        """Tokens of one micro-batch on one rank in step ``step``, counted from 0."""
        return self.samples.micro_batch(step) * self._block_size

    def blocks(self, split: str) -> Blocks:
        """The dataset of the blocks of a split ("train", "val" or "test"), in the order of the text."""
        packed = self.packing == "best_fit"
        return self.opened.blocks(split, block_size=self._block_size, packed=packed, documents=self.gives_documents)

    def locate(self, g: np.ndarray) -> np.ndarray:
        """The address of the block that each global sample number in ``g`` (n,) reads: (n,), or (n, 2) in a mixture."""
        return sample_index(g, samples=len(self.blocks("train")), seed=self.seed)

    def epochs_by_source(self, steps: int) -> dict[str, float]:
        """Source → the number of passes over the source in a run of `steps` optimizer steps. Without a mixture: "" → passes."""
        return {"": self.samples.before(steps) / len(self.blocks("train"))}

    def describe_phases(self) -> list[str]:
        """A list with one line about the phases of a mixture that are not over. Empty without a mixture or after all phases."""
        return []

    # ---- State --------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Name → value of what determines the next batches, besides the position in the data: settings and, once the data are
        open, hashes of their tokens."""
        identity = {
            "global_batch_size": self.global_batch_size,
            "batch_ramp": "none" if self.ramp is None else [list(pair) for pair in self.ramp.tokens_per_batch],
            "block_size": self._block_size,
            "seed": self.seed,
            "packing": self.packing,
        }
        if self._opened is None:
            return identity
        for teacher in self._opened.teachers.values():  # all sources have the same teacher
            identity["teacher"] = teacher.info.name
        return identity | self._opened.fingerprints

    def state_dict(self) -> dict[str, Any]:
        files = {"files": dict(self._opened.sources)} if self._opened is not None and self._opened.sources else {}
        return {"consumed_samples": self.consumed_samples, "global_step": self.step} | self.identity() | files

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base = saved_base(state_dict)
        # Only rank 0 compares, because this may read the data.
        resumes = self.trainer is not None and self.trainer.state.fn == "fit" and self.trainer.is_global_zero
        if resumes and (changed := self._changes(state_dict)):
            rank_zero_warn(
                "The data differ from those of the checkpoint, so the run continues with different batches: "
                f"{'; '.join(changed)}."
            )

    def changes_since(self, checkpoint: dict[str, Any]) -> list[str]:
        """One sentence for each setting that affects the next batches and differs from its value in a checkpoint.

        If the checkpoint was trained with another data module, one sentence says so. The tokens are compared only after
        `setup`, which opens the data.
        """
        name = type(self).__qualname__
        if name not in checkpoint:
            return [
                f"the checkpoint was not trained with {name}, so the position in the data is unknown "
                "(--data, or --accept_changes true to start with the first sample)"
            ]
        if not isinstance(saved := checkpoint[name], dict):
            raise UserError(f"the checkpoint's {name} is no dict: restore it, or use another one (--resume)")
        return [f"{change} (--accept_changes true continues with it)" for change in self._changes(saved)]

    def _changes(self, saved: dict[str, Any]) -> list[str]:
        files = saved.get("files", {})
        return setting_changes(self.identity(), saved, lambda name: self.opened.change_since(name, files, self.source_files))
