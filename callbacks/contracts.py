"""Attributes of a LightningModule, a data module, a strategy or a callback that callbacks use where they exist.

Each Protocol is optional. `offered` tests whether an object has all attributes and methods of a Protocol, none of them None.
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
    """Return `thing` if it has all attributes and methods of the protocol, and none of them is None; otherwise None."""
    named = [*getattr(protocol, "__annotations__", {}), *vars(protocol)]
    names = [name for name in named if not name.startswith("_")]
    return thing if all(getattr(thing, name, None) is not None for name in names) else None  # type: ignore[return-value]


def offered_by_data(trainer: Trainer, protocol: type[P]) -> P | None:
    """Return the trainer's data module if it has all attributes of the protocol, as `offered` does; otherwise None."""
    return offered(getattr(trainer, "datamodule", None), protocol)


def fact_of_data(trainer: Trainer, name: str) -> int | None:
    """The attribute `name` of the trainer's data module; None if there is no data module or no such attribute."""
    return getattr(getattr(trainer, "datamodule", None), name, None)


# -- of a LightningModule -----------------------------------------------------------------------------------------------


class SaysStepLoss(Protocol):
    """A module that knows the loss of an optimizer step, for callbacks that use this loss: `SpikeGuard`, `TrainingProgress`.

    That loss differs from the mean of the micro-batches' losses if their numbers of counted targets differ. Both
    attributes are 0-d tensors, the same on all ranks, and set before callbacks' `on_before_optimizer_step`.
    """

    step_loss: Tensor
    """The mean loss over the counted targets of the global batch; NaN if no target counts."""
    step_count: Tensor
    """The number of counted targets in the global batch."""


class SaysWhetherTargetsCount(Protocol):
    """A module that says whether micro-batches weigh equally in a step's loss. `HealthSignals` assumes it of any other."""

    every_target_counts: bool
    """Whether no target is ignored, so that the loss of a step is the mean of its micro-batches' losses."""


class ScalesFirstGradient(Protocol):
    """A module that weights micro-batches by their numbers of counted targets. For `GradientNoise`."""

    def first_gradient_scale(self) -> Tensor | float:
        """The factor that makes the gradient of a step's first micro-batch that of the mean loss over its counted targets.

        Called after that micro-batch. Infinite or NaN if it has no counted target.
        """


class HoldsAllLogits(Protocol):
    """A module that says how many logits training holds. Unless it holds all, `HealthSignals` limits those of its probe."""

    holds_all_logits: bool
    """Whether training has the logits of a whole micro-batch in memory."""


class SaysFlops(Protocol):
    """A module that knows its FLOPs. For any other, `Throughput` assumes six FLOPs per parameter and token."""

    flops_per_token: float
    """Training FLOPs per token."""


class WritesText(Protocol):
    """A module that can continue a text, as `TextSamples` needs."""

    def generate_text(
        self, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
    ) -> str:
        """Return the prompt and its continuation, or the continuation alone, without use of the global random generators.

        Args:
            top_k, top_p: as usual in sampling; None: no such limit.
        """


class ScoresText(Protocol):
    """A module that `TaskScores` can score. Its `forward` takes ids (B, T) and returns logits (B, T, V)."""

    tokenizer: Any
    """Has `encode` and `decode`. May have `bos_id`, `eos_id`, `prefix_token_ids` (begin every text), `stop_ids` (end an answer)
    and `special_ids` (left out of an answer). If the module also has `exported_tokenizer`, that is used instead."""
    context_length: int
    """Largest number of tokens that the model reads at once."""


class ContinuesText(Protocol):
    """A module that can generate text, as those tasks of lm_eval need whose answers are generated."""

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """Yield at most `max_new_tokens` ids after `ids`: each is the likeliest one after all ids before it."""


class HasMicroBatches(Protocol):
    """A data module, or else a LightningModule, that knows the size of its micro-batches, as `BatchRamp` needs."""

    micro_batch_tokens: int | Callable[[int], int]
    """Tokens of one micro-batch on one rank, or a function from the number of optimizer steps before it to this number."""


class CountsExperts(Protocol):
    """A module with L mixtures of E experts, as `ExpertBalance` needs.

    It may also have `router_means`: a dict from the name of a further metric, such as "entropy", to its values (L,).
    """

    expert_counts: Tensor
    """(L, E), the same on all ranks: the tokens of the step's global batch that each expert has computed. Known before
    callbacks' `on_before_optimizer_step`, and unchanged if activations are computed again."""
    expert_biases: Sequence[Tensor | None]
    """One buffer (E,) per layer, which is added to the scores by which experts are chosen; None for a layer of another rank."""


# -- of a data module ---------------------------------------------------------------------------------------------------


class NumbersSamples(Protocol):
    """A data module that numbers its samples, so that `SpikeGuard` can name the samples of a skipped step."""

    step_samples: range
    """Global numbers of the samples in the next optimizer step."""


class TellsOfText(Protocol):
    """A data module that knows facts about its text. `HealthSignals` uses each of these attributes if it exists."""

    vocab_size: int
    """Number of ids that can occur. An embedding may be padded, and then has more rows."""
    unknown_id: int
    """The id for characters that the tokenizer does not have, and for nothing else."""
    bos_id: int
    """The id that opens every document."""
    train_tokens: int
    """Length of the training text, in tokens."""


# -- of a strategy or its plugins -----------------------------------------------------------------------------------------


class SplitsLayers(Protocol):
    """A strategy with pipeline stages: its ranks hold different parameters."""

    pipeline_mesh: DeviceMesh
    """Mesh of the ranks whose stages together are one model."""
    repeated_parameters: Collection[Tensor]
    """Those parameters of this rank of which an earlier rank of the pipeline also has a copy."""


class ScalesLoss(Protocol):
    """A precision plugin with fp16 loss scaling."""

    scaler: Any
    """torch's GradScaler."""


class SavesInBackground(Protocol):
    """A CheckpointIO plugin that tells `StepCheckpoint` how a save ended. For any other plugin, the file is examined."""

    def finished(self, path: Path, *, wait: bool = False) -> bool | None:
        """Whether the last save to `path` has succeeded. None: it is in progress. With `wait`, first wait for its end."""


# -- of another callback ------------------------------------------------------------------------------------------------


class KnowsNorm(Protocol):
    """A callback that knows the gradient norm (`GradientNorm`), for callbacks that come after it."""

    latest_norm: Tensor | None
    """Gradient norm of the current step before clipping. None: not computed."""


class KnowsSkip(Protocol):
    """A callback that knows whether a step is skipped (`SpikeGuard`), for callbacks that come after it."""

    latest_skip: Tensor | None
    """0-d: 1 if the current step is skipped, 0 if it is made. None: not judged."""


class AsksToSave(Protocol):
    """A callback that asks for a checkpoint (`StopOnSignal`), for callbacks that save."""

    save_now: bool
    """True: save a checkpoint at this step, at once. Set before the saving callback reads it in `on_train_batch_end`."""


class KnowsStableStep(Protocol):
    """A learning-rate schedule that ends with a decay, for `StepCheckpoint`."""

    stable_until: int
    """The last step before the decay, whose checkpoint is kept."""


class KnowsScores(Protocol):
    """A callback that logs scores (`TaskScores`), perhaps less often than validation, for callbacks that monitor a score."""

    score_names: Collection[str]
    """Names of the metrics that the callback logs, known when training starts."""


def is_score(trainer: Trainer, name: str | None) -> bool:
    """Whether a callback of the trainer has `name` among its `score_names`."""
    known = (offered(callback, KnowsScores) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return any(name in callback.score_names for callback in known if callback)


class HearsOfInterruption(Protocol):
    """A callback that must know when `StopOnSignal` interrupts a validation, for which it has begun something."""

    def on_validation_interrupted(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called instead of `on_validation_end` if the validation was interrupted."""


# -- where nothing is offered ---------------------------------------------------------------------------------------------


class MeanOfMicroBatches:
    """Averages the losses of a step's micro-batches on this rank, as `on_before_backward` gets them."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a micro-batch. Lightning has divided this loss by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        if (scaling := offered(trainer.precision_plugin, ScalesLoss)) is not None:
            loss = loss / scaling.scaler.scale(torch.ones((), device=loss.device))
        self._sum, self._number = loss if self._sum is None else self._sum + loss, self._number + 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """Return the mean of the losses added since the last call; None if there are none.

        The number of losses is counted, because an epoch may end before the step has all its micro-batches.
        """
        total, number, self._sum, self._number = self._sum, self._number, None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)
