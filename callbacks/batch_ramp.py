"""A batch that grows with the tokens seen: a pure function of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from ._lightning import data_parallel, micro_batches_begun, set_accumulation_window
from .errors import ConfigurationError


class Stage(NamedTuple):
    """Optimizer steps of one size."""

    step: int  # steps made before its first
    tokens: int  # tokens consumed before its first
    size: int  # tokens in each of its batches


def stages(tokens_per_batch: Sequence[Sequence[int]]) -> list[Stage]:
    """The ramp by steps. A size holds from the first step that begins with at least as many tokens consumed as it asks for."""
    found: list[Stage] = []
    for threshold, size in tokens_per_batch:
        step = tokens = 0
        if found:
            last = found[-1]
            steps = max(0, -(-(threshold - last.tokens) // last.size))
            step, tokens = last.step + steps, last.tokens + steps * last.size
            if steps == 0:  # the batch before jumped over all of the last stage
                found.pop()
        found.append(Stage(step, tokens, size))
    return found


class BatchRamp(Callback):
    """Grows (or shrinks) the batch of an optimizer step during training, by accumulating more (or fewer) micro-batches.

    A step's size is that of the last pair whose tokens have been consumed when the step begins. It follows from the number
    of the step alone, so nothing is saved, and a resumed run makes the steps that a straight one makes, on any number of
    ranks and with any micro-batch that divides all sizes. `Trainer(max_steps)` counts steps, as always.

    The tokens of one micro-batch on one rank are the attribute `micro_batch_tokens` of the data module, or else of the
    LightningModule. The train_dataloader yields micro-batches of that size. To go on exactly after a resume it begins with
    micro-batch number `tokens_before(trainer.global_step) // (micro_batch_tokens * ranks)` of each rank; if it has an end, a
    run of n steps needs that number for n. Where an epoch ends within a step, Lightning makes that step with what it has.

    Logs: nothing.

    Contract:
        on_fit_start: refuses settings that cannot be a ramp.
        on_train_start: replaces the two methods by which Lightning finds when to step and when to zero gradients: they assume
            one fixed accumulation.
        on_train_batch_start: with the first micro-batch of a step, sets `trainer.accumulate_grad_batches` to the step's number
            of micro-batches, by which the loss is divided.
        teardown, on_exception: restores the methods.
        State: none.

    Args:
        tokens_per_batch: pairs of (tokens consumed from which it holds, tokens per batch over all ranks), the first from 0
            on: [[0, 65536], [10000000, 131072]].

    Raises:
        ConfigurationError: pairs out of order or not above 0; a size that the micro-batches of all ranks do not divide;
            `micro_batch_tokens` is nowhere; `Trainer(accumulate_grad_batches)` is set, or the strategy accumulates by itself;
            manual optimization.
    """

    def __init__(self, tokens_per_batch: list[tuple[int, int]]) -> None:
        flag = "(--batch_ramp.tokens_per_batch)"
        if not tokens_per_batch or tokens_per_batch[0][0] != 0:
            raise ConfigurationError(
                f"tokens_per_batch is {tokens_per_batch} but must begin with a size from 0 tokens on {flag}."
            )
        for (before, _), (after, _) in pairwise(tokens_per_batch):
            if after <= before:
                raise ConfigurationError(f"tokens_per_batch names {after} after {before} but its tokens must increase {flag}.")
        for _, size in tokens_per_batch:
            if size < 1:
                raise ConfigurationError(f"tokens_per_batch has batches of {size} tokens but they must have at least 1 {flag}.")
        self.tokens_per_batch = [(threshold, size) for threshold, size in tokens_per_batch]
        self.stages = stages(tokens_per_batch)
        self._micro_step_tokens = 0  # of one micro-batch on every rank
        self._seen = 0  # micro-batches when last asked; all epochs of this process and of those it was resumed from
        self._begin = 0  # micro-batches before the window now open
        self._step = -1  # optimizer steps before it
        self._size = 0  # its micro-batches
        self._restore: Callable[[], None] | None = None

    def batch_tokens(self, step: int) -> int:
        """Tokens in the batch of the step that is made after `step` steps."""
        return self._stage(step).size

    def tokens_before(self, step: int) -> int:
        """Tokens in the first `step` batches."""
        stage = self._stage(step)
        return stage.tokens + (step - stage.step) * stage.size

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that consume `tokens` tokens."""
        stage = next(stage for stage in reversed(self.stages) if stage.tokens <= tokens)
        return stage.step - (stage.tokens - tokens) // stage.size

    def _stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.step <= step)

    def size_problems(self, micro_batch_tokens: int, ranks: int) -> list[str]:
        """One sentence for each size that is not a multiple of the ranks' micro-batches."""
        unit = micro_batch_tokens * ranks
        found = []
        for size in dict.fromkeys(size for _, size in self.tokens_per_batch):
            below = size // unit * unit
            if below != size:
                nearest = f"{below} and {below + unit}" if below else f"{unit}"
                found.append(
                    f"batch_ramp: {size} tokens per batch is not a multiple of {micro_batch_tokens} tokens per micro-batch x"
                    f" {ranks} data-parallel rank{'s' if ranks > 1 else ''} = {unit}: the nearest that divide are {nearest}"
                    " (--batch_ramp.tokens_per_batch)."
                )
        return found

    @staticmethod
    def trainer_problems(trainer: Trainer) -> list[str]:
        """One sentence for each setting of the trainer that also says how to accumulate."""
        found = []
        if trainer.accumulate_grad_batches != 1:
            found.append(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and BatchRamp both say how many"
                " micro-batches make a step: remove --trainer.accumulate_grad_batches."
            )
        if trainer.strategy.handles_gradient_accumulation:
            found.append(
                f"{type(trainer.strategy).__name__} accumulates gradients by itself, always as many: remove --batch_ramp or"
                " use another --trainer.strategy."
            )
        return found

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        problems = self.trainer_problems(trainer)
        if not pl_module.automatic_optimization:
            problems.append(
                f"{type(pl_module).__name__} optimizes by hand. BatchRamp needs automatic optimization: remove --batch_ramp."
            )
        sources: tuple[Any, ...] = (getattr(trainer, "datamodule", None), pl_module)
        micro_batch_tokens = next((s.micro_batch_tokens for s in sources if hasattr(s, "micro_batch_tokens")), None)
        ranks = data_parallel(trainer)[1]
        if micro_batch_tokens is None:
            problems.append(
                "BatchRamp needs an attribute micro_batch_tokens, the tokens of one micro-batch on one rank, of the data"
                f" module or of {type(pl_module).__name__}."
            )
        else:
            problems += self.size_problems(micro_batch_tokens, ranks)
            self._micro_step_tokens = micro_batch_tokens * ranks
        if problems:
            raise ConfigurationError("\n".join(problems))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._undo()
        # Between two steps now: the window before is full, and the next micro-batch opens one.
        self._seen, self._size, self._step = micro_batches_begun(trainer), 0, -1

        def is_full() -> bool:
            self._update_window(trainer)
            return self._seen - self._begin >= self._size

        def position() -> int:
            self._update_window(trainer)
            return self._seen - self._begin - 1

        undo_window = set_accumulation_window(trainer, is_full, position)

        def restore() -> None:
            undo_window()
            trainer.accumulate_grad_batches = 1

        self._restore = restore

    def _update_window(self, trainer: Trainer) -> None:
        """Open a window if this is the first micro-batch after an optimizer step. Called several times a micro-batch."""
        seen = micro_batches_begun(trainer)
        if seen == self._seen:
            return
        self._seen = seen
        step = trainer.global_step
        if step != self._step:
            self._step, self._begin = step, seen - 1
            self._size = self.batch_tokens(step) // self._micro_step_tokens
            trainer.accumulate_grad_batches = self._size

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._update_window(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._undo()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo()

    def _undo(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None
