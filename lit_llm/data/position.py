"""Which samples each optimizer step reads, and how many a run has consumed: the only state of the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.callbacks import BatchRamp
from lit_llm.core.batch_sizes import batch_problem, micro_batch
from lit_llm.core.errors import UserError


class DataPosition(LightningDataModule, ABC):
    """The batch sizes of a run and its position in the data, from the trainer's step count.

    A ``BatchRamp`` among the trainer's callbacks sets the samples of each step, up to ``global_batch_size``.

    Args:
        micro_batch_size: the most sequences in one forward pass of one rank. None: no limit.
        global_batch_size: sequences per optimizer step over all ranks.
        block_size: tokens of a sequence. None: not known yet.
    """

    def __init__(self, micro_batch_size: int | None, global_batch_size: int, block_size: int | None) -> None:
        super().__init__()
        self.micro_batch_size, self.global_batch_size, self.block_size = micro_batch_size, global_batch_size, block_size
        self.ramp: BatchRamp | None = None  # set by `find_ramp`
        self.pipeline: Any = None  # the PipelineLayout that `find_pipeline` finds
        # The sample and step counts at which this process started: zero, or those of a checkpoint.
        self._base_samples, self._base_step = 0, 0

    # ---- The run ------------------------------------------------------------------------------------------------

    def find_ramp(self, callbacks: Iterable[Callback | None]) -> None:
        """Use the ``BatchRamp`` among a trainer's callbacks, if there is one."""
        self.ramp = next((callback for callback in callbacks if isinstance(callback, BatchRamp)), None)

    def find_pipeline(self, strategy: object) -> None:
        """Derive micro-batches that the pipeline of a strategy can run, if it has one."""
        self.pipeline = getattr(strategy, "pipeline_layout", None)

    def _data_parallel(self) -> tuple[int, int]:
        """(data-parallel rank, world size). Single-device strategies lack the property."""
        if self.trainer is None:
            return 0, 1
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    @property
    def max_steps(self) -> int:
        """The trainer's last step; -1: no end, or not known."""
        return -1 if self.trainer is None else self.trainer.max_steps

    @property
    def _block_size(self) -> int:
        assert self.block_size is not None, "setup() checks it"
        return self.block_size

    def _batch_problems(self, ranks: int) -> list[str]:
        whole, length, ramp = self.global_batch_size, self.block_size, self.ramp
        layout = self.micro_batch_size, ranks, self.pipeline
        if ramp is None or length is None:  # `setup` reports a missing block size
            problem = batch_problem(whole, *layout)
            return [] if problem is None else [problem]
        sizes = dict.fromkeys(size for _, size in ramp.tokens_per_batch)
        problems = [problem for size in sizes if (problem := batch_problem(size, *layout, length=length))]
        final = ramp.stages[-1].size
        if final % length == 0 and final != whole * length:
            problems.append(
                f"batch_ramp ends with {final} tokens per batch, but global_batch_size {whole} x block_size {length} = "
                f"{whole * length}: the two must be equal (--data.global_batch_size {final // length})."
            )
        return problems

    # ---- Position in the data -----------------------------------------------------------------------------------

    @property
    def consumed_samples(self) -> int:
        """Global samples trained on so far: the only state of the data, derived from the trainer's step count."""
        return self.samples_at(self.step)

    def samples_at(self, step: int) -> int:
        """Samples of the run after ``step`` steps. Steps before the checkpoint may have had other batch sizes."""
        return self._base_samples + self.samples_before(step) - self.samples_before(self._base_step)

    @property
    def step_samples(self) -> range:
        """Global numbers of the samples in the next optimizer step."""
        return range(self.consumed_samples, self.consumed_samples + self.batch_samples(self.step))

    @property
    def first_steps(self) -> list[int]:
        """The first step of each stage of the ramp, counted from 0; without a ramp, there is one stage."""
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

    # ---- State --------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """The settings that, with the position, determine the next batches, and once the data are open, their fingerprint."""
        return {
            "global_batch_size": self.global_batch_size,
            "batch_ramp": "none" if self.ramp is None else [list(pair) for pair in self.ramp.tokens_per_batch],
            "block_size": self._block_size,
        }

    @abstractmethod
    def changed_text(self, name: str, saved: dict[str, Any]) -> str:
        """One phrase about data whose fingerprint, the entry ``name`` of `identity`, differs from the saved state's."""

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples, "global_step": self.step} | self.identity()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("consumed_samples", "global_step"):
            count: Any = state_dict.get(name)
            if type(count) is not int or not 0 <= count < 2**63:
                raise UserError(f"the checkpoint has {name} {str(count)[:40]!r}: restore it, or use another one (--resume)")
        self._base_samples, self._base_step = state_dict["consumed_samples"], state_dict["global_step"]
        # Only rank 0 compares, because this may read the data.
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
        """One phrase for each setting that differs from a saved state. A setting that only one of the two has is ignored."""
        changes = []
        for name, now in self.identity().items():
            if (before := saved.get(name, now)) == now:
                continue
            key = {"batch_ramp": "batch_ramp.tokens_per_batch", "teacher": "the teacher"}.get(name, f"data.{name}")
            is_text = name.startswith("fingerprint")
            changes.append(self.changed_text(name, saved) if is_text else f"{key} was {before} in the checkpoint and is {now}")
        return changes
