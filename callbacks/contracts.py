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
    """Protocol of a module that knows the loss of an optimizer step, which `SpikeGuard` and `TrainingProgress` use.

    The step's loss is not the mean of its micro-batches' losses if micro-batches have different numbers of counted targets.
    Both attributes are 0-d tensors, the same on all ranks, and set before callbacks' `on_before_optimizer_step`.
    """

    step_loss: Tensor
    """The mean loss over the counted (not ignored) targets of the global batch; NaN if no target counts."""
    step_count: Tensor
    """The number of counted (not ignored) targets in the global batch."""


class SaysWhetherTargetsCount(Protocol):
    """Protocol of a module that says if micro-batches weigh equally in a step's loss. `HealthSignals` otherwise assumes so."""

    every_target_counts: bool
    """Whether no target is ignored, so that the loss of a step is the mean of its micro-batches' losses."""


class ScalesFirstGradient(Protocol):
    """Protocol of a module that weights micro-batches by their counted targets. `GradientNoise` calls its method."""

    def first_gradient_scale(self) -> Tensor | float:
        """The factor that turns the gradient of a step's first micro-batch into the gradient of this micro-batch's mean loss.

        Called after this micro-batch's backward pass. Infinite or NaN if the micro-batch has no counted (not ignored) target.
        """


class HoldsAllLogits(Protocol):
    """Protocol of a module that says whether training holds all logits at once. If not, `HealthSignals` probes fewer logits."""

    holds_all_logits: bool
    """Whether training has the logits of a whole micro-batch in memory."""


class SaysFlops(Protocol):
    """Protocol of a module that knows its FLOPs. For other modules, `Throughput` assumes six FLOPs per parameter and token."""

    flops_per_token: float
    """FLOPs of training, forward and backward, per token."""


class WritesText(Protocol):
    """Protocol of a module that can continue a text, as `TextSamples` needs."""

    def generate_text(
        self, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
    ) -> str:
        """Return the prompt and its continuation, or the continuation alone, without use of the global random generators.

        Args:
            top_k, top_p: limits of top-k and nucleus sampling; None: no such limit.
        """


class ScoresText(Protocol):
    """Protocol of a module that `TaskScores` can score. Its `forward` takes ids (B, T) and returns logits (B, T, V)."""

    tokenizer: Any
    """Has `encode` and `decode`. May have `bos_id`, `eos_id`, `prefix_token_ids` (begin every text), `stop_ids` (end an answer)
    and `special_ids` (left out of an answer). `TaskScores` uses `exported_tokenizer` instead, if the module has it."""
    context_length: int
    """Largest number of tokens that the model reads at once."""


class ContinuesText(Protocol):
    """Protocol of a module that can generate ids, for tasks of lm_eval in which the model generates the answers."""

    def greedy_ids(self, ids: list[int], *, max_new_tokens: int) -> Iterator[int]:
        """Yield at most `max_new_tokens` token ids that continue `ids`: each is the most likely next id (greedy decoding)."""


class HasMicroBatches(Protocol):
    """Protocol of a data module, or else a LightningModule, that knows its micro-batches' size, as `BatchRamp` needs."""

    micro_batch_tokens: int | Callable[[int], int]
    """Tokens of one micro-batch on one rank; or a function: number of optimizer steps made → tokens of the next micro-batch."""


class CountsExperts(Protocol):
    """Protocol of a module with L mixtures of E experts, as `ExpertBalance` needs.

    The module may also have `router_means`: a dict from a metric's name, such as "entropy", to the metric's values (L,).
    """

    expert_counts: Tensor
    """(L, E), the same on all ranks: the number of tokens of the step's global batch that each expert has computed. Known
    before callbacks' `on_before_optimizer_step`. Recomputation of activations (checkpointing) is not counted."""
    expert_biases: Sequence[Tensor | None]
    """One buffer (E,) per mixture, added to the router's scores when experts are chosen; None for a layer of another rank."""


# -- of a data module ---------------------------------------------------------------------------------------------------


class NumbersSamples(Protocol):
    """Protocol of a data module that numbers its samples, so that `SpikeGuard` can name the samples of a skipped step."""

    step_samples: range
    """Global numbers of the samples in the next optimizer step."""


class TellsOfText(Protocol):
    """Protocol of a data module that knows facts about its text. `HealthSignals` uses each of the attributes that exists."""

    vocab_size: int
    """Number of token ids that can occur. A padded embedding has more rows than this."""
    unknown_id: int
    """The token id that stands for characters unknown to the tokenizer, and for nothing else."""
    bos_id: int
    """The token id at the beginning of every document."""
    train_tokens: int
    """Length of the training text, in tokens."""


# -- of a strategy or its plugins -----------------------------------------------------------------------------------------


class SplitsLayers(Protocol):
    """Protocol of a strategy with pipeline stages: its ranks hold different parameters."""

    pipeline_mesh: DeviceMesh
    """Mesh of the ranks whose stages together are one model."""
    repeated_parameters: Collection[Tensor]
    """The parameters of this rank of which an earlier rank of the pipeline also has a copy, such as tied embeddings."""


class ScalesLoss(Protocol):
    """Protocol of a precision plugin with fp16 loss scaling."""

    scaler: Any
    """torch's GradScaler."""


class SavesInBackground(Protocol):
    """Protocol of a CheckpointIO that tells `StepCheckpoint` how a save ended. Otherwise, it tests the file."""

    def finished(self, path: Path, *, wait: bool = False) -> bool | None:
        """Whether the last save to `path` has succeeded. None: the save is in progress. `wait`: first wait for the save."""


# -- of another callback ------------------------------------------------------------------------------------------------


class KnowsNorm(Protocol):
    """Protocol of a callback that knows the gradient norm (`GradientNorm`). Later callbacks of the Trainer read the norm."""

    latest_norm: Tensor | None
    """Gradient norm of the current step before clipping, 0-d. None: not computed."""


class KnowsSkip(Protocol):
    """Protocol of a callback that knows whether a step is skipped (`SpikeGuard`). Later callbacks of the Trainer read this."""

    latest_skip: Tensor | None
    """0-d: 1 if the current step is skipped, 0 if the step is made. None: the callback has not judged the step."""


class AsksToSave(Protocol):
    """Protocol of a callback that asks for a checkpoint (`StopOnSignal`). Callbacks that save read the attribute."""

    save_now: bool
    """True: save a checkpoint at this step, at once. Set before the saving callback reads it in `on_train_batch_end`."""


class KnowsStableStep(Protocol):
    """Protocol of a learning-rate schedule that ends with a decay. `StepCheckpoint` reads the attribute."""

    stable_until: int
    """The last optimizer step before the decay. `StepCheckpoint` never deletes this step's checkpoint."""


class KnowsScores(Protocol):
    """Protocol of a callback that logs scores (`TaskScores`), perhaps in fewer steps than validation logs its metrics."""

    score_names: Collection[str]
    """Names of the metrics that the callback logs, known when training starts."""


def is_score(trainer: Trainer, name: str | None) -> bool:
    """Whether a callback of the trainer has `name` among its `score_names`."""
    known = (offered(callback, KnowsScores) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return any(name in callback.score_names for callback in known if callback)


class HearsOfInterruption(Protocol):
    """Protocol of a callback that `StopOnSignal` tells of an interrupted validation, for example to undo a hook's changes."""

    def on_validation_interrupted(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called in place of `on_validation_epoch_end` and `on_validation_end` if the validation was interrupted."""


# -- where nothing is offered ---------------------------------------------------------------------------------------------


class MeanOfMicroBatches:
    """Averages the losses of a step's micro-batches on this rank. `add` takes the loss that `on_before_backward` gets."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add a micro-batch's loss to the sum. Lightning has divided `loss` by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        if (scaling := offered(trainer.precision_plugin, ScalesLoss)) is not None:
            loss = loss / scaling.scaler.scale(torch.ones((), device=loss.device))
        self._sum, self._number = loss if self._sum is None else self._sum + loss, self._number + 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """Return the mean (0-d) of the losses added so far, and forget these losses; None if no loss was added.

        The mean is over the losses added, because an epoch may end before the step has all its micro-batches.
        """
        total, number, self._sum, self._number = self._sum, self._number, None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)
