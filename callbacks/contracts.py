"""What callbacks ask of a module, its data, a strategy or each other: attributes that they use where they exist."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

ASKED = {
    # of a LightningModule
    "step_loss": "0-d Tensor: loss of an optimizer step, a mean over the counted targets of the global batch, NaN without any; "
    "for SpikeGuard and TrainingProgress. The mean of the micro-batches' means is another number where their counts differ",
    "step_count": "0-d Tensor: number of these targets. Both are the same on all ranks, and known in on_before_optimizer_step",
    "every_target_counts": "bool: no target is ignored, so micro-batches have equal weight: HealthSignals asks",
    "first_gradient_scale": "() -> Tensor | float, after the first micro-batch of a step: what makes its gradient that of the "
    "mean over its targets; for GradientNoise, of a module that weights micro-batches by their targets",
    "holds_all_logits": "bool: training has the logits of a whole micro-batch in memory, so HealthSignals' probe may have them",
    "flops_per_token": "float: training FLOPs per token, for Throughput, instead of six per parameter",
    "generate_text": "(prompt, *, max_new_tokens, temperature, top_k, top_p, seed) -> str: the prompt and its continuation, or "
    "the latter, without the global random generators; needed by TextSamples",
    "tokenizer": "has encode and decode, and may have bos_id, eos_id and prefix_token_ids; needed by TaskScores, to which "
    "`forward` gives the logits (B, T, V) of ids (B, T)",
    "context_length": "int: most tokens of a text that the model reads at once; needed by TaskScores",
    "greedy_ids": "(ids, *, max_new_tokens) -> Iterator[int]: the likeliest ids after `ids`; for tasks that generate",
    "micro_batch_tokens": "int, or a function of the optimizer steps before it: tokens of one micro-batch on one rank; needed "
    "by BatchRamp, of the data module or else of the LightningModule",
    "expert_counts": "(L, E) Tensor, of L mixtures of E experts: tokens of the step's global batch that each has computed, the "
    "same on all ranks and known in on_before_optimizer_step, counted once also under recomputation; for ExpertBalance",
    "expert_biases": "Sequence[Tensor]: L buffers (E,), added to the scores by which a token's experts are chosen. There may "
    "also be expert_entropy, (L,): the mean entropy of the router's probabilities, in nats",
    # of a data module
    "step_samples": "range: global numbers of the samples in the next optimizer step, for SpikeGuard's reports",
    "vocab_size": "int: for HealthSignals, of a model without an embedding",
    "train_tokens": "int: length of the training text, for HealthSignals",
    "source_names": "Sequence[str]: sources of a mixture, which have losses of their own, for TensorBoardPage",
    # of a strategy or its plugins
    "pipeline_mesh": "DeviceMesh: the ranks that hold one model together, each with other parameters",
    "repeated_parameters": "Collection[Tensor]: this rank's parameters that an earlier rank of that mesh has, too",
    "scaler": "torch's GradScaler, of a precision plugin with fp16 loss scaling",
    "finished": "(path, *, wait=False) -> bool | None: whether a save has succeeded, None while it is in progress; of a "
    "checkpoint plugin, for StepCheckpoint. Any other plugin has saved a file when it returns",
    # of another callback
    "latest_norm": "Tensor | None: gradient norm of the step before clipping, None: not computed; GradientNorm has it",
    "latest_skip": "0-d Tensor: 1 if the step is skipped, 0 if it is made; None: not judged; SpikeGuard has it",
    "save_now": "bool: save at this step, set in on_train_batch_end; StopOnSignal has it",
    "stable_until": "int: the last step before a schedule's decay, whose checkpoint StepCheckpoint keeps",
    "on_validation_interrupted": "(trainer, pl_module): called instead of on_validation_end where StopOnSignal interrupts",
}
"""Each attribute, what it is, and who uses it."""


def offered(thing: object, *names: str) -> Any:
    """`thing` if it has these attributes of `ASKED` and none of them is None, otherwise None."""
    return thing if all(getattr(thing, name, None) is not None for name in names) else None


def offered_step_loss(module: LightningModule) -> Any:
    """`offered`, of the loss of a step. Warns once if a module has `step_loss` alone, which is then not used."""
    if getattr(module, "step_loss", None) is not None and getattr(module, "step_count", None) is None:
        _say_half(type(module).__name__)
    return offered(module, "step_loss", "step_count")


@cache
def _say_half(name: str) -> None:
    rank_zero_warn(
        f"{name}.step_loss is not used, because {name} has no step_count, the number of counted targets of the step: set both."
    )


class MeanOfMicroBatches:
    """The mean loss of a step's micro-batches on this rank, from `on_before_backward`: of a module that does not say it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._number = 0

    def add(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a backward pass, as Lightning gives it: divided by the number of micro-batches of a whole step."""
        loss = loss.detach().float().reshape(())
        if scaling := offered(trainer.precision_plugin, "scaler"):
            loss = loss / scaling.scaler.scale(torch.ones((), device=loss.device))
        self._sum, self._number = loss if self._sum is None else self._sum + loss, self._number + 1

    def take(self, trainer: Trainer) -> Tensor | None:
        """The mean; None without a backward pass. Starts over. An epoch may end before the step has all its micro-batches."""
        total, number, self._sum, self._number = self._sum, self._number, None, 0
        return None if total is None else total * max(1.0, trainer.accumulate_grad_batches / number)
