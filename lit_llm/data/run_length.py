"""The length of a run: set the Trainer's limits, from a data module that counts sequences, and describe the length in words."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_llm.core._lightning import set_max_steps
from lit_llm.core.batch_sizes import steps_for
from lit_llm.core.errors import UserError, report
from lit_llm.data.batches import ENDLESS


def set_accumulation(trainer: Trainer, data: Any) -> None:
    """Set the Trainer's ``accumulate_grad_batches`` to a step's number of micro-batches. Does nothing with a `BatchRamp`.

    Raises:
        UserError: the user gave the Trainer a number other than 1 and the micro-batches of a step.
    """
    if data.ramp is not None:
        return
    accumulate = data.samples.micro_batches(0)
    if trainer.accumulate_grad_batches not in (1, accumulate):
        raise UserError(
            f"accumulate_grad_batches {trainer.accumulate_grad_batches} contradicts the batch sizes, which give "
            f"{accumulate}: remove --trainer.accumulate_grad_batches, or change --data.global_batch_size."
        )
    trainer.accumulate_grad_batches = accumulate


def set_end(trainer: Trainer, data: Any) -> None:
    """Set the end of training: after `max_steps` optimizer steps or `max_epochs` passes over the data, whichever is first.

    `limit_train_batches` and `val_check_interval` are rounded up to whole optimizer steps. If `limit_train_batches` shortens
    Lightning's epochs, the run also ends after `max_epochs` shortened epochs.

    Raises:
        UserError: the user set `overfit_batches`; or `limit_train_batches` or `val_check_interval` together with a batch ramp.
    """
    if trainer.overfit_batches:  # type: ignore[attr-defined]  # set in Trainer.__init__ through a connector
        raise UserError(
            "overfit_batches has no effect on this data: remove --trainer.overfit_batches. "
            "To overfit on purpose, train on a small file."
        )
    set_max_steps(trainer, steps_of_run(data, trainer.max_steps, trainer.max_epochs))
    run = ENDLESS if trainer.max_steps == -1 else data.samples.micro_batches_before(trainer.max_steps)
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # its max_steps is the number of batches
        trainer.limit_train_batches = 1.0
    epoch = min(run, _whole_steps(trainer, data, "limit_train_batches", run))
    if epoch < run:
        trainer.limit_train_batches = epoch
        if trainer.max_epochs not in (None, -1):
            set_max_steps(trainer, min(trainer.max_steps, epoch // data.samples.micro_batches(0) * trainer.max_epochs))
    interval = _whole_steps(trainer, data, "val_check_interval", epoch)
    if interval != epoch:
        trainer.val_check_interval = interval if trainer.check_val_every_n_epoch is None else min(interval, epoch)


def _whole_steps(trainer: Trainer, data: Any, key: str, epoch: int) -> int:
    """One of the Trainer's limits as a number of micro-batches, rounded up to whole optimizer steps. Prints a note if rounded.

    Args:
        key: the name of the limit, such as "limit_train_batches". Its value is a number of micro-batches or a share of `epoch`.
        epoch: the number of micro-batches in an epoch, which is the result if the Trainer has no limit.

    Raises:
        UserError: there is a limit, but a batch ramp changes the micro-batches of a step.
    """
    given, accumulate = getattr(trainer, key, 1.0), data.samples.micro_batches(0)  # Lightning does not set a time interval
    if isinstance(given, float) and given == 1:
        return epoch
    if data.ramp is not None:
        raise UserError(f"trainer.{key} is {given}, but a batch ramp changes a step's micro-batches (--trainer.{key} null)")
    number = max(1, int(given * epoch)) if isinstance(given, float) else given
    rounded = -(-number // accumulate) * accumulate
    if rounded != number:
        said = f"trainer.{key} is {number} micro-batches, but an optimizer step reads {accumulate}"
        report(f"{said}: {rounded} are used (--trainer.{key} {rounded})", "note")
    return rounded


def at_least_one(trainer: Trainer | None, key: str, loader: DataLoader) -> DataLoader:
    """Return ``loader`` unchanged. If the Trainer's limit ``key``, a share of its batches, comes to less than one batch, set
    the limit to 1 batch and print a note, because Lightning would raise an error."""
    limit = 0 if trainer is None else getattr(trainer, key)
    if 0 < limit * len(loader) < 1:
        report(f"trainer.{key} is {limit}, less than one of {len(loader)} batches: one is used (--trainer.{key} 1)", "note")
        setattr(trainer, key, 1)
    return loader


def steps_of_run(data: Any, max_steps: int, max_epochs: int | None) -> int:
    """Optimizer steps of a run: the smaller of `max_steps` and the steps of `max_epochs` passes over the data, which must be
    open. -1 (for `max_epochs` also None) means no limit, in the arguments and in the result."""
    if max_epochs is None or max_epochs == -1:
        return max_steps
    steps = steps_of_passes(data, max_epochs)
    return steps if max_steps == -1 else min(steps, max_steps)


def steps_of_passes(data: Any, passes: int) -> int:
    """The fewest optimizer steps that read the training data ``passes`` times. The data must be open."""
    return steps_for(data.samples.stages, passes * len(data.blocks("train")))


def run_length(data: Any, max_steps: int) -> str:
    """The length of a run in words: "60 steps = 9,600 tokens = 1.20 epochs". The data must be open."""
    tokens = data.samples.before(max_steps) * data.block_size
    read = data.epochs_by_source(max_steps)
    epochs = ", ".join(f"{_epochs(number)} epochs{f' of {name}' if name else ''}" for name, number in read.items())
    return f"{max_steps:,} steps = {tokens:,} tokens = {epochs}"


def _epochs(number: float) -> str:
    """A number as text with two decimals (12.345 -> "12.35") or, below 0.1, two significant digits (0.00123 -> "0.0012")."""
    return f"{number:.2f}" if number >= 0.1 or number == 0 else f"{number:.2g}"
