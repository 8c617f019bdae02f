"""What callbacks ask of a LightningModule, a data module, a strategy or each other: attributes that they use where they exist.

What belongs together is a Protocol below. Each is optional: `offered` says whether a thing has all of its attributes, and none
of them is None. `attribute` reads what stands alone:

of a LightningModule
    every_target_counts: bool. No target is ignored, so that all micro-batches have equal weight. Without it, `HealthSignals`
        takes the mean of the micro-batches' losses for the loss of a step.
    first_gradient_scale() → 0-d tensor or float. After the first micro-batch of a step: what makes its gradient that of the
        mean over its targets. For `GradientNoise`, of a module that weights micro-batches by their targets.
    holds_all_logits: bool. Training has the logits of a whole micro-batch in memory. Without it, the probe of `HealthSignals`
        bounds the logits that it computes.
    flops_per_token: float. Training FLOPs per token, for `Throughput`, instead of six per parameter.
    generate_text(prompt, *, max_new_tokens, temperature, top_k, top_p, seed) → str. Needed by `TextSamples`: the prompt and its
        continuation, or the latter. top_k and top_p may be None. It does not use the global random generators.
    greedy_ids(ids, *, max_new_tokens) → iterator. The likeliest ids after `ids`, one by one: needed by tasks of lm_eval that
        generate.
of a data module
    micro_batch_tokens: int, or a function of the optimizer steps before it. Tokens of one micro-batch on one rank. Needed by
        `BatchRamp`, of the data module or else of the LightningModule.
    step_samples: range. Global numbers of the samples in the next optimizer step, for the reports of `SpikeGuard`.
    vocab_size: int. For `HealthSignals`, of a model without an embedding.
    train_tokens: int. Length of the training text, for `HealthSignals`.
    source_names: sequence of str. Sources of a mixture, which have losses of their own: for the charts of `TensorBoardPage`.
of a strategy's plugins
    scaler: torch's GradScaler, of a precision plugin with fp16 loss scaling.
    finished(path, *, wait=False) → bool or None, of a checkpoint plugin for `StepCheckpoint`. Whether a save has succeeded,
        None while it is in progress. Any other plugin has saved a file when it returns.
of another callback
    latest_norm: 0-d tensor or None, of `GradientNorm` for callbacks after it. Gradient norm of this step, before clipping.
    latest_skip: 0-d tensor or None, of `SpikeGuard` for callbacks after it. 1 if the current step is skipped, 0 if it is made.
    save_now: bool, of `StopOnSignal` for callbacks that save. Set in `on_train_batch_end`: save at this step.
    stable_until: int, of a schedule with a decay. The last step before it, whose checkpoint `StepCheckpoint` keeps.
    on_validation_interrupted(trainer, pl_module), of one that begins something at a validation, which `StopOnSignal` may
        interrupt. Called instead of `on_validation_end`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

P = TypeVar("P")


def attribute(thing: object, name: str, otherwise: Any = None) -> Any:
    """An attribute of the list above; `otherwise` if the thing does not have it, or it is None."""
    value = getattr(thing, name, None)
    return otherwise if value is None else value


def attribute_of_data(trainer: Trainer, name: str) -> Any:
    """The same of the trainer's data module."""
    return attribute(getattr(trainer, "datamodule", None), name)


def offered(thing: object, protocol: type[P]) -> P | None:
    """`thing` if it offers what the protocol names, otherwise None."""
    named = [*getattr(protocol, "__annotations__", {}), *vars(protocol)]
    names = [name for name in named if not name.startswith("_")]
    return thing if all(getattr(thing, name, None) is not None for name in names) else None  # type: ignore[return-value]


def offered_step_loss(module: LightningModule) -> SaysStepLoss | None:
    """`offered`, of the loss of a step. Warns once if a module has `step_loss` alone, which is then not used."""
    says = offered(module, SaysStepLoss)
    if says is None and getattr(module, "step_loss", None) is not None:
        _say_half(type(module).__name__)
    return says


@cache
def _say_half(name: str) -> None:
    rank_zero_warn(
        f"{name}.step_loss is not used, because {name} has no step_count, the number of counted targets of the step: set both."
    )


class SaysStepLoss(Protocol):
    """Says the loss of an optimizer step, for callbacks that judge it: `SpikeGuard`, `TrainingProgress`.

    The mean of the micro-batches' means is not the loss of the step where they have different numbers of counted targets. Both
    are 0-d tensors, the same on all ranks, and known before callbacks' `on_before_optimizer_step`.
    """

    step_loss: Tensor
    """The mean over the counted targets of the global batch; NaN without any."""
    step_count: Tensor
    """Their number."""


class ScoresText(Protocol):
    """Needed by `TaskScores`; `forward` gives the logits (B, T, V) of ids (B, T)."""

    tokenizer: Any
    """Has `encode` and `decode`, and may have `bos_id`, `eos_id` and `prefix_token_ids`."""
    context_length: int
    """Most tokens of a text that the model reads at once."""


class CountsExperts(Protocol):
    """Needed by `ExpertBalance`, of a module with L mixtures of E experts.

    It may also have `router_means`, dict of (L,) tensors: what to log as well, by name, such as the entropy.
    """

    expert_counts: Tensor
    """(L, E), the same on all ranks: the tokens of the step's global batch that each expert has computed. Known before
    callbacks' `on_before_optimizer_step`, and counted once if activations are computed again."""
    expert_biases: Sequence[Tensor | None]
    """Buffers, (E,) each, that are added to the scores by which experts are chosen; None for a layer of another rank."""


class SplitsLayers(Protocol):
    """A strategy with pipeline stages: its ranks hold different parameters."""

    pipeline_mesh: DeviceMesh
    """The ranks that hold one model together."""
    repeated_parameters: Collection[Tensor]
    """This rank's parameters that an earlier rank has, too."""


class MeanOfMicroBatches:
    """The mean loss of a step's micro-batches on this rank, from `on_before_backward`: of a module that does not say it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a backward pass, as Lightning gives it: divided by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        if (scaler := attribute(trainer.precision_plugin, "scaler")) is not None:
            loss = loss / scaler.scale(torch.ones((), device=loss.device))
        self._sum, self._number = loss if self._sum is None else self._sum + loss, self._number + 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """The mean; None without a backward pass. Starts over. An epoch may end before the step has all its micro-batches."""
        total, number, self._sum, self._number = self._sum, self._number, None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)
