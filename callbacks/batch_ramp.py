"""Batch-size ramp: the batch size is a function of the tokens consumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from ._lightning import _PutsBack, data_parallel, micro_batches_begun, set_accumulation_window
from .contracts import HasMicroBatches, offered, offered_by_data
from .errors import UserError, setting, without
from .ranges import check_ranges, whole


class Stage(NamedTuple):
    """Record of a stage of a batch ramp: consecutive optimizer steps with one batch size."""

    step: int  # optimizer steps before the stage
    tokens: int  # tokens consumed before the stage
    size: int  # tokens per batch


def stages(tokens_per_batch: Sequence[Sequence[int]]) -> list[Stage]:
    """Convert pairs (tokens consumed, tokens per batch) to stages. A pair's batch size holds from the first step at whose
    beginning at least the pair's number of tokens has been consumed.
    """
    ramp: list[Stage] = []
    for threshold, size in tokens_per_batch:
        step = tokens = 0
        if ramp:
            last = ramp[-1]
            steps = max(0, -(-(threshold - last.tokens) // last.size))
            step, tokens = last.step + steps, last.tokens + steps * last.size
            if steps == 0:  # one batch of the stage before crosses both thresholds
                ramp.pop()
        ramp.append(Stage(step, tokens, size))
    return ramp


def _whole(number: float) -> Any:
    """Convert a whole number that is written as a float, as 1e7, to an int. Return any other number unchanged."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class BatchRamp(_PutsBack):
    """Changes the batch size during training by changing the number of accumulated micro-batches.

    A step has the batch size of the last pair in `tokens_per_batch` whose tokens have been consumed when the step begins. This
    size depends only on the step number, so no state is saved: a resumed run has the same batch sizes, on any number of ranks
    and with any micro-batch size that divides all batch sizes.

    The data module, or else the LightningModule, must have `micro_batch_tokens`, the tokens of one micro-batch on one rank
    (`contracts.py`). For an exact resume, the train_dataloader must begin on each rank after the micro-batches of
    `trainer.global_step` steps. If all micro-batches have one size, the first n steps have
    `tokens_before(n) // (micro_batch_tokens * ranks)` micro-batches on each rank. If an epoch ends within a step, Lightning
    makes the step with the micro-batches so far.

    Logs: nothing.

    Contract:
        on_fit_start: refuses settings that cannot work.
        on_train_start: replaces the two Lightning methods that determine when to step and when to zero gradients, because
            they assume a fixed number of micro-batches.
        on_train_batch_start: at the first micro-batch of a step, sets `trainer.accumulate_grad_batches` to the step's number
            of micro-batches, by which Lightning divides the loss.
        teardown, on_exception: restore the methods.
        State: none.

    Args:
        tokens_per_batch: pairs of (tokens consumed, tokens per batch over all ranks from then on). The first pair begins at
            0 tokens: [[0, 65536], [10000000, 131072]].

    Raises:
        UserError: pairs out of order or not above 0; a size that is not a multiple of the tokens in one micro-batch
            of every rank; `micro_batch_tokens` is missing; `Trainer(accumulate_grad_batches)` is set; the strategy handles
            accumulation itself; manual optimization.
    """

    def __init__(self, tokens_per_batch: Annotated[list[tuple[int, int]], whole(0)]) -> None:
        tokens_per_batch = [(_whole(threshold), _whole(size)) for threshold, size in tokens_per_batch]
        check_ranges(BatchRamp, locals())
        flag = f"({setting(BatchRamp, 'tokens_per_batch')})"
        if not tokens_per_batch or tokens_per_batch[0][0] != 0:
            raise UserError(f"tokens_per_batch is {tokens_per_batch} but its first pair must begin at 0 tokens {flag}.")
        for (before, _), (after, _) in pairwise(tokens_per_batch):
            if after <= before:
                raise UserError(f"tokens_per_batch has threshold {after} after {before} but thresholds must increase {flag}.")
        for _, size in tokens_per_batch:
            if size < 1:
                raise UserError(f"tokens_per_batch has a batch of {size} tokens but a batch must have at least 1 {flag}.")
        self.tokens_per_batch = tokens_per_batch
        self.stages = stages(tokens_per_batch)
        self._micro_step_tokens: Callable[[int], int]  # tokens of one micro-batch of all ranks together, n steps → in the next
        self._seen = 0  # micro-batches at the last call, over all epochs and resumes
        self._begin = 0  # micro-batches before the current window
        self._step = -1  # optimizer steps before the current window
        self._size = 0  # micro-batches in the current window

    def batch_tokens(self, step: int) -> int:
        """Tokens in the batch that follows `step` optimizer steps."""
        return self._stage(step).size

    def tokens_before(self, step: int) -> int:
        """Tokens in the first `step` batches."""
        stage = self._stage(step)
        return stage.tokens + (step - stage.step) * stage.size

    def steps_for(self, tokens: int) -> int:
        """The smallest number of steps that consumes at least `tokens` tokens."""
        stage = next(stage for stage in reversed(self.stages) if stage.tokens <= tokens)
        return stage.step - (stage.tokens - tokens) // stage.size

    def sequences(self, length: int) -> tuple[tuple[int, int], ...]:
        """For each stage, (optimizer steps before the stage, sequences per step), with sequences of `length` tokens."""
        return tuple((stage.step, stage.size // length) for stage in self.stages)

    def _stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.step <= step)

    def size_problems(self, micro_batch_tokens: Callable[[int], int], ranks: int) -> list[str]:
        """One sentence for each batch size that is not a multiple of the tokens in one micro-batch of all ranks together.

        Args:
            micro_batch_tokens: number of optimizer steps made → tokens of the next micro-batch on one rank.
            ranks: number of data-parallel ranks.
        """
        problems = []
        for size, step in {stage.size: stage.step for stage in self.stages}.items():
            unit = micro_batch_tokens(step) * ranks
            below = size // unit * unit
            if below != size:
                nearest = f"{below} or {below + unit}" if below else f"{unit}"
                problems.append(
                    f"batch_ramp: {size} tokens per batch is not a multiple of {unit // ranks} tokens per micro-batch x"
                    f" {ranks} data-parallel rank{'s' if ranks > 1 else ''} = {unit}: use {nearest} tokens"
                    f" ({setting(BatchRamp, 'tokens_per_batch')})."
                )
        return problems

    @staticmethod
    def trainer_problems(trainer: Trainer) -> list[str]:
        """One sentence for each setting of the trainer that conflicts with this callback."""
        problems = []
        if trainer.accumulate_grad_batches != 1:
            problems.append(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) conflicts with BatchRamp:"
                f" remove {setting(Trainer, 'accumulate_grad_batches')}."
            )
        if trainer.strategy.handles_gradient_accumulation:
            problems.append(
                f"{type(trainer.strategy).__name__} handles gradient accumulation itself, with a fixed number of"
                f" micro-batches: {without(BatchRamp)}, or use another {setting(Trainer, 'strategy')}."
            )
        return problems

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        problems = self.trainer_problems(trainer)
        if not pl_module.automatic_optimization:
            problems.append(
                f"{type(pl_module).__name__} uses manual optimization, which BatchRamp does not support: {without(BatchRamp)}."
            )
        source = offered_by_data(trainer, HasMicroBatches) or offered(pl_module, HasMicroBatches)
        ranks = data_parallel(trainer)[1]
        if source is None:
            problems.append(
                "BatchRamp needs an attribute micro_batch_tokens (tokens of one micro-batch on one rank): add it to the"
                f" data module or to {type(pl_module).__name__}."
            )
        else:
            given = source.micro_batch_tokens
            tokens = given if callable(given) else lambda step: given
            problems += self.size_problems(tokens, ranks)
            self._micro_step_tokens = lambda step: tokens(step) * ranks
        if problems:
            raise UserError("\n".join(problems))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back()
        # Training starts between two steps, so the next micro-batch begins a window.
        self._seen, self._size, self._step = micro_batches_begun(trainer), 0, -1

        def is_full() -> bool:
            self._update_window(trainer)
            return self._seen - self._begin >= self._size

        def position() -> int:
            self._update_window(trainer)
            return self._seen - self._begin - 1

        def one_micro_batch() -> None:
            trainer.accumulate_grad_batches = 1

        self._undo = (set_accumulation_window(trainer, is_full, position), one_micro_batch)

    def _update_window(self, trainer: Trainer) -> None:
        """At a step's first micro-batch, set the step's number of micro-batches. A second call in one step changes nothing."""
        seen = micro_batches_begun(trainer)
        if seen == self._seen:
            return
        self._seen = seen
        step = trainer.global_step
        if step != self._step:
            self._step, self._begin = step, seen - 1
            self._size = self.batch_tokens(step) // self._micro_step_tokens(step)
            trainer.accumulate_grad_batches = self._size

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._update_window(trainer)
