"""Attributes of a LightningModule, a data module, a strategy or a callback that callbacks use where they exist.

Each Protocol is optional. `offered` says whether a thing has all of its attributes, and none of them is None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

P = TypeVar("P")


def offered(thing: object, protocol: type[P]) -> P | None:
    """`thing` if it offers what the protocol names, otherwise None."""
    named = [*getattr(protocol, "__annotations__", {}), *vars(protocol)]
    names = [name for name in named if not name.startswith("_")]
    return thing if all(getattr(thing, name, None) is not None for name in names) else None  # type: ignore[return-value]


def offered_by_data(trainer: Trainer, protocol: type[P]) -> P | None:
    """`offered`, by the trainer's data module."""
    return offered(getattr(trainer, "datamodule", None), protocol)


def fact_of_data(trainer: Trainer, name: str) -> int | None:
    """An attribute of the trainer's data module; None without."""
    return getattr(getattr(trainer, "datamodule", None), name, None)


# -- of a LightningModule -----------------------------------------------------------------------------------------------


class SaysStepLoss(Protocol):
    """Says the loss of an optimizer step, for callbacks that judge it: `SpikeGuard`, `TrainingProgress`.

    The mean of the micro-batches' means is not the loss of the step where they have different numbers of counted targets. Both
    are 0-d tensors, the same on all ranks, and known before callbacks' `on_before_optimizer_step`.
    """

    step_loss: Tensor
    """The mean over the counted targets of the global batch; NaN without any."""
    step_count: Tensor
    """Their number."""


class SaysWhetherTargetsCount(Protocol):
    """Without it, `HealthSignals` takes the mean of the micro-batches' losses for the loss of a step."""

    every_target_counts: bool
    """Whether no target is ignored, so that all micro-batches have equal weight."""


class ScalesFirstGradient(Protocol):
    """For `GradientNoise`, of a module that weights micro-batches by their targets."""

    def first_gradient_scale(self) -> Tensor | float:
        """After the first micro-batch of a step: what makes its gradient that of the mean over its targets."""


class HoldsAllLogits(Protocol):
    """Without it, the probe of `HealthSignals` bounds the logits that it computes."""

    holds_all_logits: bool
    """Whether training has the logits of a whole micro-batch in memory."""


class SaysFlops(Protocol):
    """For `Throughput`, instead of six FLOPs per parameter."""

    flops_per_token: float
    """Training FLOPs per token."""


class WritesText(Protocol):
    """Needed by `TextSamples`."""

    def generate_text(
        self, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
    ) -> str:
        """The prompt and its continuation, or the latter. It does not use the global random generators."""


class ScoresText(Protocol):
    """Needed by `TaskScores`; `forward` gives the logits (B, T, V) of ids (B, T)."""

    tokenizer: Any
    """Has `encode` and `decode`, and may have `bos_id`, `eos_id`, `prefix_token_ids`, `stop_ids` and `special_ids`, which no
    answer has. A module may have `exported_tokenizer` instead."""
    context_length: int
    """Most tokens of a text that the model reads at once."""


class ContinuesText(Protocol):
    """Needed by tasks of lm_eval that generate."""

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """The likeliest ids after `ids`, one by one."""


class HasMicroBatches(Protocol):
    """Needed by `BatchRamp`, of the data module or else of the LightningModule."""

    micro_batch_tokens: int | Callable[[int], int]
    """Tokens of one micro-batch on one rank, or a function of the optimizer steps before it."""


class CountsExperts(Protocol):
    """Needed by `ExpertBalance`, of a module with L mixtures of E experts.

    It may also have `router_means`, dict of (L,) tensors: what to log as well, by name, such as the entropy.
    """

    expert_counts: Tensor
    """(L, E), the same on all ranks: the tokens of the step's global batch that each expert has computed. Known before
    callbacks' `on_before_optimizer_step`, and counted once if activations are computed again."""
    expert_biases: Sequence[Tensor | None]
    """Buffers, (E,) each, that are added to the scores by which experts are chosen; None for a layer of another rank."""


# -- of a data module ---------------------------------------------------------------------------------------------------


class NumbersSamples(Protocol):
    """For the reports of `SpikeGuard`."""

    step_samples: range
    """Global numbers of the samples in the next optimizer step."""


class TellsOfText(Protocol):
    """For `HealthSignals`, which takes those of these attributes that exist (`fact_of_data`)."""

    vocab_size: int
    """Number of ids that occur, which a padded embedding does not tell."""
    unknown_id: int
    """Stands for characters that the tokenizer does not have, and for nothing else."""
    bos_id: int
    """Opens every document."""
    train_tokens: int
    """Length of the training text."""


# -- of a strategy or its plugins -----------------------------------------------------------------------------------------


class SplitsLayers(Protocol):
    """A strategy with pipeline stages: its ranks hold different parameters."""

    pipeline_mesh: DeviceMesh
    """The ranks that hold one model together."""
    repeated_parameters: Collection[Tensor]
    """This rank's parameters that an earlier rank has, too."""


class ScalesLoss(Protocol):
    """A precision plugin with fp16 loss scaling."""

    scaler: Any
    """torch's GradScaler."""


class SavesInBackground(Protocol):
    """A checkpoint plugin for `StepCheckpoint`. Any other has saved a file when it returns."""

    def finished(self, path: Path, *, wait: bool = False) -> bool | None:
        """Whether a save has succeeded. None: it is in progress."""


# -- of another callback ------------------------------------------------------------------------------------------------


class KnowsNorm(Protocol):
    """`GradientNorm`, for callbacks after it."""

    latest_norm: Tensor | None
    """Gradient norm of the current step before clipping. None: not computed."""


class KnowsSkip(Protocol):
    """`SpikeGuard`, for callbacks after it."""

    latest_skip: Tensor | None
    """0-d: 1 if the current step is skipped, 0 if it is made. None: not judged."""


class AsksToSave(Protocol):
    """`StopOnSignal`, for callbacks that save."""

    save_now: bool
    """Set in `on_train_batch_end`: save at this step."""


class KnowsStableStep(Protocol):
    """A schedule with a decay, for `StepCheckpoint`."""

    stable_until: int
    """The last step before the decay, whose checkpoint is kept."""


class KnowsScores(Protocol):
    """`TaskScores`, for callbacks that watch a score, which may come less often than validation."""

    score_names: Collection[str]
    """Metrics that it logs, known when training starts."""


def is_score(trainer: Trainer, name: str | None) -> bool:
    """Whether a callback of the trainer knows a score of this name."""
    known = (offered(callback, KnowsScores) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return any(name in callback.score_names for callback in known if callback)


class HearsOfInterruption(Protocol):
    """A callback that begins something at a validation, which `StopOnSignal` may interrupt."""

    def on_validation_interrupted(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called instead of `on_validation_end`."""


# -- where nothing is offered ---------------------------------------------------------------------------------------------


class MeanOfMicroBatches:
    """The mean loss of a step's micro-batches on this rank, from `on_before_backward`: of a module that does not say it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a backward pass, as Lightning gives it: divided by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        if (scaling := offered(trainer.precision_plugin, ScalesLoss)) is not None:
            loss = loss / scaling.scaler.scale(torch.ones((), device=loss.device))
        self._sum, self._number = loss if self._sum is None else self._sum + loss, self._number + 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """The mean; None without a backward pass. Starts over. An epoch may end before the step has all its micro-batches."""
        total, number, self._sum, self._number = self._sum, self._number, None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)
