"""Signals of a run's health: norms, activations, logits, and checks of batches."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

from ._lightning import is_logged, write_row
from ._torch import gathered, process_count
from .contracts import (
    HasOpeningToken,
    HasUnknownToken,
    HasVocabulary,
    MeanOfMicroBatches,
    SaysWhetherTargetsCount,
    SplitsLayers,
    offered,
    offered_by_data,
)
from .health_batch import SeenSequences, SeenTokens, check_targets, compare_targets, ids_of, targets_of
from .health_counts import CountedText
from .health_layers import UpdateSample, find_blocks, layers_of, share_of_square, trained_parameters
from .health_probe import Probe
from .health_readings import Readings
from .health_setup import SETUP_DESCRIPTIONS, setup_facts
from .health_spans import RepeatedSpans, ValidationOverlap
from .ranges import STEPS, check_ranges, whole

DESCRIPTIONS = {
    "health/gradient_norm/LAYER": "L2 norm of a layer's gradient, before clipping",
    "health/weight_norm/LAYER": "L2 norm of a layer's trained weights, before the update",
    "health/update_norm/LAYER": "L2 norm of what the optimizer added to them; an estimate from about 16,384 weights of a rank",
    "health/update_ratio/LAYER": "update norm / weight norm",
    "health/descent/LAYER": "cosine of the update and the negative gradient, before clipping; below 0 the loss is increased",
    "health/activation_rms/BLOCK": "root mean square of a block's output",
    "health/norm_epsilon": "largest epsilon of a norm in a block / mean square of its input; well below 1 where it normalises",
    "health/activation_max/BLOCK": "largest absolute value of a block's output",
    "health/attention_logit_max/BLOCK": "largest attention score of visible keys, before softmax and soft cap",
    "health/dead_units/BLOCK": "share of the MLP's hidden units that are zero on every probed token",
    "health/logit_rms": "root mean square of the logits",
    "health/logit_max": "largest absolute logit",
    "health/unigram_loss": "loss of a model that only knows how often each target has occurred in this launch, on one rank",
    "health/bigram_loss": "loss of a model that only knows how often each target has followed each input",
    "health/validation_unigram_loss": "the same of a validation batch",
    "health/validation_bigram_loss": "the same of a validation batch",
    "health/validation_unseen": "share of the counted targets of a validation batch that were none in this launch's training",
    "health/rank_text_difference": "DDP: largest distance of the shares of targets on a rank from those on all, 0 to 1",
    "health/counted_pairs": "targets counted in this launch before, on one rank",
    "health/unlearned_inputs": "share of the inputs at counted targets whose token never was such a target in this launch, on "
    "one rank; without what opens documents",
    "health/unknown_tokens": "share of the tokenizer's unknown token among the inputs at counted targets, on one rank",
    "health/commonest_target": "share of the commonest target in this launch, on one rank",
    "health/output_entropy": "mean entropy of the predicted distribution, in nats; ln(vocabulary) = uniform",
    "health/loss_by_position/1..4": "loss on each quarter of the probed sequence",
    "health/loss_by_frequency/common|middle|rare": "loss on the commonest, middle and rarest third of the targets",
    "health/untouched_embeddings": "share of the vocabulary that no input of this launch has contained",
    "health/largest_id": "largest id that an input of this launch has contained",
    "health/repeated_samples": "share of the sequences since the last row that occurred before on the same rank in this launch",
    "health/repeated_spans": "share of spans of 48 tokens that occurred before, anywhere, on the same rank in this launch",
    "health/validation_overlap": "share of the validation text's spans that training had since this launch's first validation",
    "health/shifted_targets": "share of the counted targets that equal the next input; 1 where each target is the next token",
    "health/copied_targets": "share of the counted targets that equal the input at their own position",
    "health/twice_shifted_targets": "share of the counted targets that equal the input two positions on",
    "health/consecutive_sequences": "share of the sequences that continue the one before them in their batch",
    "health/equal_columns": "share of the positions at which all sequences of a micro-batch, four or more, have the same token",
    "health/opening_targets": "share of the sequences whose first target counts",
    "health/answer_ends": "of the counted targets before an ignored one, as at the end of an answer: share of the commonest",
    "health/shared_samples": "DDP: share of the ranks whose micro-batches begin with the sequence of another rank",
    "health/ignored_targets": "share of the targets that are -100",
    "health/future_leak": "largest relative change of the logits before a place if all inputs from there on change; 0 or "
    "rounding in a causal model",
    "health/context_use": "largest relative change of the last logits if all inputs but the last quarter change",
    "health/zero_gradients": "share of the gradients of matrices in blocks that are exactly 0",
    "health/backward_loss_ratio": "loss of a step's backward passes / logged train/loss; 1 if gradients are those of that loss "
    "alone",
    "health/validation_noise": "largest relative difference between the logits of two evaluations of a validation batch; 0 or "
    "rounding",
    "health/validation_length": "tokens of a validation sequence / tokens of a training sequence",
    "health/validation_ignored_targets": "share of the targets of a validation batch that are ignored",
    "health/validation_shifted_targets": "share of its counted targets that are the next input",
    "health/rank_difference": "DDP: largest relative difference of a layer's weight norm between ranks; 0 if they agree",
    **SETUP_DESCRIPTIONS,
}
"""Every tag and its meaning. LAYER is like `embedding`, `blocks.0.attention`, `head`; BLOCK like `blocks.0`."""
OF_LAYERS = tuple(tag.rpartition("/")[0] for tag in DESCRIPTIONS if tag.endswith(("/LAYER", "/BLOCK")))
"""Groups with a tag for each layer, such as `health/update_ratio`."""
EARLY = 20
"""Rows up to step `every_n_steps`, about: a run of a few hundred steps is judged by them."""


@cache
def _early_steps(every_n_steps: int) -> list[int]:
    return sorted({round(every_n_steps ** (i / EARLY)) for i in range(EARLY)} - {every_n_steps})


def row_number(step: int, every_n_steps: int) -> int:
    """The number of the row that a step has, from 1; 0 if it has none.

    Each `every_n_steps`-th step has a row, and before the first of these about 20, spread geometrically. It depends on the step
    alone, so that a resumed or extended run has the rows of one that was not.
    """
    early = _early_steps(every_n_steps)
    if step % every_n_steps == 0:
        return len(early) + step // every_n_steps
    return early.index(step) + 1 if step in early else 0


class HealthSignals(Callback):
    """Logs signals from which trouble can be diagnosed, at the steps that `row_number` names.

    Logs `DESCRIPTIONS`, in five parts:
        Set-up, in the first row of a launch: what the optimizer decays and trains, sizes, and initial weights.
        Norms, of the parameters that the optimizer has, by layer. The blocks are the largest list of modules with numbers as
            names; a layer is a submodule of a block, or a module beside the list. Absent with several optimizers, and under
            FSDP1, which flattens parameters.
        Batches, if they are dicts with `input_ids` and `targets`, (B, T) each. Targets: of all micro-batches of the step.
            Untouched embeddings, repeated samples and spans, and overlap: of all steps of this launch. A table of 65,536
            hashes on each rank remembers sequences, another one spans. Padding rows of an embedding do not count if the
            probe, or the data module's `vocab_size`, tells the vocabulary.
        Probe: before the step's first micro-batch, two forward passes without gradients of a quarter of its sequences, at least
            one, in eval mode, with the same random state and without compiled code: `forward(input_ids)` → logits (B, T, V).
            Documents in a sequence see each other. In rows 1, 3, 5, … the second pass has other ids from a place on, which is
            another one in each sequence and row; in the others, up to the last quarter. Sequences are whole, up to 8,192 tokens
            and 2²³ / V unless the module `holds_all_logits`; where N ranks share a batch, a micro-batch of less than 4 N has
            parts of them. Absent in a pipeline, and where `forward` cannot do this.
        Backward loss ratio, where the step has a row of `train/loss`. Absent in a pipeline, and where a module scales its
            gradients by the step's tokens afterwards: `every_target_counts` is false (both: `contracts.py`).
        Rank difference and shared samples, with DDP on several processes.

    In the probe, modules of a block report what hooks cannot see, if they have these attributes. They are None otherwise:
        score_probe(q, k, scale=None, window=None): queries (B, H, T, h) and keys (B, K, T, h) of causal attention.
        unit_probe(hidden): (B, T, f), the MLP's activations. Without it, outputs of nn.ReLU, nn.GELU and nn.SiLU are used.
    A unit is dead if no probed value exceeds 10⁻⁶ of its layer's largest one.

    List this callback before `GradientNorm`: it then sees gradients before clipping.

    TensorBoard gets three tags in place of those of single layers, such as `health/update_ratio/lowest`, `…/median` and
    `…/highest`. Every other logger gets the layers.

    Contract:
        on_fit_start: finds blocks and layers.
        on_validation_batch_start, on_validation_batch_end: remember spans of the first validation, and the first batch.
        on_validation_end: evaluates a part of that batch twice. Collectives: on every rank.
        on_train_batch_start: hashes the sequences and counts the ids; at a sampled step, checks targets and runs the probe.
            Before the first step of a launch, notes the facts about the set-up.
        on_before_backward: at a sampled step, adds up the loss.
        on_before_optimizer_step: at a sampled step, computes norms and copies some weights.
        on_train_batch_end: after a sampled step, compares these weights, reduces all values over the ranks, and writes the row.
            The host synchronises then, and with several ranks before the probe, which needs all of them.
        State: none. After a resume, what is counted over a launch starts anew.
    Cost: 0.34 % of a CPU's time at one step in 100 (benchmarks/health_cost.py); not measured on a GPU.

    Args:
        every_n_steps: optimizer steps between two rows, from the first multiple on.
        layers: TensorBoard, too, gets single layers: about 30 tags for each block.

    Raises:
        UserError: every_n_steps < 1.
    """

    def __init__(self, every_n_steps: Annotated[int, whole(1, STEPS)] = 100, layers: bool = False) -> None:
        check_ranges(HealthSignals, locals())
        self.every_n_steps, self.layers = every_n_steps, layers
        self._layers: dict[str, list[Tensor]] = {}  # of this rank
        self._names: list[str] = []  # of the layers of all ranks
        self._ranks = 1  # that hold a parameter or parts of it
        self._probe: Probe | None = None
        self._rows = 0  # of the embedding
        self._sequences: SeenSequences | None = None  # from the first batch on
        self._tokens: SeenTokens | None = None  # likewise, where there is an embedding
        self._spans = RepeatedSpans()
        self._overlap = ValidationOverlap()
        self._losses = MeanOfMicroBatches()  # of the backward passes of a sampled step
        self._facts: dict[str, float] | None = None  # about the set-up, until the first row; None before the first batch
        self._counted: CountedText | None = None  # from the first batch on, where the vocabulary is known
        self._length = 0  # tokens of a training sequence
        self._validated: tuple[Tensor | None, Tensor | None] = (None, None)  # ids and targets of the first validation batch
        self._step = 0  # under way: on_train_batch_start runs once per micro-batch
        self._readings: Readings | None = None  # of the step under way, if it is sampled
        self._update: UpdateSample | None = None
        self._compares_ranks = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not later: FSDP2 may have gathered weights by then, and named_parameters would give those.
        self._step, self._readings, self._update = 0, None, None
        pipeline = offered(trainer.strategy, SplitsLayers)
        path, blocks = find_blocks(pl_module)
        base = path.rpartition(".")[2]
        named = {f"{base}.{number}": block for number, block in blocks.items()}
        self._probe = Probe(pl_module, named) if pipeline is None else None
        self._layers = {}
        if len(trainer.optimizers) == 1 and not isinstance(trainer.strategy, FSDPStrategy):  # FSDP1 flattens parameters
            trained, self._ranks = trained_parameters(trainer, pl_module)
            self._layers = layers_of(trained, path)
        self._names = list(self._layers)
        sizes = [m.num_embeddings for m in pl_module.modules() if isinstance(m, nn.Embedding)]
        self._rows = max(sizes, default=0)  # not a table of positions
        if pipeline is not None:
            held = gathered((self._names, self._rows))
            self._names = list(dict.fromkeys(name for names, _ in held for name in names))
            self._rows = max(rows for _, rows in held)
        self._sequences = self._tokens = self._counted = self._facts = None
        self._spans, self._overlap = RepeatedSpans(), ValidationOverlap()
        self._compares_ranks = trainer.world_size > 1 and isinstance(trainer.strategy, DDPStrategy)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        if (ids := ids_of(batch)) is not None and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._overlap.remember(ids)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == dataloader_idx == 0 and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._validated = ids_of(batch), targets_of(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._overlap.compare_from_now(trainer.strategy.root_device)
        (ids, targets), self._validated = self._validated, (None, None)  # a rank may have had no batch
        readings = Readings(trainer.strategy.root_device)
        readings.mean(
            "health/validation_length", 0 if ids is None else ids.size(1), 0.0 if ids is None else float(self._length)
        )
        for name in ("ignored_targets", "shifted_targets"):
            readings.mean(f"health/validation_{name}", 0.0, 0.0)
        if ids is not None and targets is not None:
            compare_targets(ids, targets, readings, "validation_")
        if self._counted is not None:
            for name in ("unigram_loss", "bigram_loss", "unseen"):
                readings.mean(f"health/validation_{name}", 0.0, 0.0)
            self._counted.add_to(readings, *_special_ids(trainer))
            if ids is not None and targets is not None:
                self._counted.judge(ids, targets, readings, "validation_")
        if self._probe is not None:
            self._probe.validate(trainer, pl_module, ids, self._rows, readings)
        write_row(trainer, readings.read(), trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        begins, self._step = step != self._step, step
        number = row_number(step, self.every_n_steps)
        if begins:
            self._readings, self._losses = Readings(trainer.strategy.root_device) if number else None, MeanOfMicroBatches()
            if self._facts is None:  # not in on_train_start: the module's own comes after it
                self._facts = setup_facts(trainer, pl_module, self._rows)
        ids, targets = ids_of(batch), targets_of(batch)
        if ids is None:
            return
        self._length = ids.size(1)
        if self._sequences is None:
            self._sequences = SeenSequences(ids.device)
            self._tokens = SeenTokens(self._rows, ids.device) if self._rows else None
            self._counted = CountedText(self._rows, ids.device) if self._rows else None
        for seen in (self._sequences, self._spans, self._overlap, self._tokens):
            if seen is not None:
                seen.add(ids)
        if self._readings is not None:
            if self._compares_ranks:
                self._sequences.add_shared_to(self._readings)
            if targets is not None:
                check_targets(ids, targets, self._readings)
            if targets is not None and self._counted is not None:
                self._counted.judge(ids, targets, self._readings)
            if begins and self._probe is not None:
                self._probe.run(trainer, pl_module, ids, targets, self._rows, number, self._readings)
        if targets is not None and self._counted is not None:
            self._counted.add(ids, targets)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._readings is None or offered(trainer.strategy, SplitsLayers) is not None:
            return
        if _weights_alike(pl_module):
            self._losses.add(trainer, loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        if self._readings is None or not self._names:
            return
        zero = torch.zeros((), device=self._readings.device)
        for name in self._names:
            parameters = self._layers.get(name, [])
            gradients = [p.grad for p in parameters if p.grad is not None]
            weight, gradient = (
                sum((share_of_square(each, self._ranks).to(zero.device) for each in tensors), zero)
                for tensors in (parameters, gradients)
            )
            self._readings.root_mean(f"health/weight_norm/{name}", weight, 1 / process_count())
            self._readings.root_mean(f"health/gradient_norm/{name}", gradient, 1 / process_count())
            if self._compares_ranks:
                self._readings.largest(f"highest/{name}", weight)
                self._readings.largest(f"lowest/{name}", -weight)
        self._update = UpdateSample(self._layers)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._readings is None or trainer.global_step < self._step:
            return
        readings, update, self._readings, self._update = self._readings, self._update, None, None
        if update is not None:
            readings.mean("health/zero_gradients", 0.0, 0.0)  # stages have different layers
            for name in self._names:
                readings.root_mean(f"health/update_norm/{name}", 0.0, 1 / process_count())
                readings.mean(f"descent/{name}", 0.0, 1 / process_count())
                update.add_to(readings, name, self._ranks)
        if self._sequences is not None:
            self._sequences.add_to(readings)
        if self._tokens is not None:
            probed = None if self._probe is None else self._probe.vocabulary
            data = offered_by_data(trainer, HasVocabulary)
            self._tokens.add_to(readings, probed or (None if data is None else data.vocab_size))
        if self._counted is not None:
            self._counted.add_to(readings, *_special_ids(trainer))
            if self._compares_ranks:
                self._counted.add_rank_difference_to(readings)
        self._spans.add_to(readings)
        self._overlap.add_to(readings)
        if (loss := self._losses.take(trainer)) is not None:
            readings.mean("backward_loss", loss, 1.0)
        values = readings.read()
        row = _row(values)
        logged = trainer.callback_metrics.get("train/loss") if is_logged(trainer, self._step) else None
        if logged is not None and "backward_loss" in values and float(logged) > 0:  # a tensor on the CPU
            row["health/backward_loss_ratio"] = values["backward_loss"] / float(logged)
        row = (self._facts or {}) | row
        write_row(trainer, row, self._step, row if self.layers else _layers_summed_up(row))
        self._facts = {}


def _weights_alike(pl_module: LightningModule) -> bool:
    """Whether the loss of a step is the mean of its micro-batches' losses, as far as the module says."""
    says = offered(pl_module, SaysWhetherTargetsCount)
    return says is None or says.every_target_counts


def _special_ids(trainer: Trainer) -> tuple[int | None, int | None]:
    """Ids of unknown characters, and of what opens documents."""
    unknown, opening = offered_by_data(trainer, HasUnknownToken), offered_by_data(trainer, HasOpeningToken)
    return (None if unknown is None else unknown.unknown_id), (None if opening is None else opening.bos_id)


def _row(values: dict[str, float]) -> dict[str, float]:
    """The row of a sampled step, from what all ranks have measured."""
    row = {name: value for name, value in values.items() if name.startswith("health/")}
    for layer, norm in _by_layer(values, "health/update_norm/").items():
        if weight := values.get(f"health/weight_norm/{layer}"):
            row[f"health/update_ratio/{layer}"] = norm / weight
        if size := norm * values.get(f"health/gradient_norm/{layer}", 0.0):
            row[f"health/descent/{layer}"] = values[f"descent/{layer}"] / size
    if highest := _by_layer(values, "highest/"):
        spread = ((value + values[f"lowest/{layer}"]) / value for layer, value in highest.items() if value)
        row["health/rank_difference"] = max(spread, default=0.0) / 2  # of squares: twice the difference of norms
    return row


def _layers_summed_up(row: dict[str, float]) -> dict[str, float]:
    """The row with the lowest, median and highest value in place of a value for each layer. NaN is the highest."""
    shown = {tag: value for tag, value in row.items() if tag.rpartition("/")[0] not in OF_LAYERS}
    for group in OF_LAYERS:
        if values := sorted(_by_layer(row, f"{group}/").values(), key=lambda value: (math.isnan(value), value)):
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
            shown |= {f"{group}/lowest": values[0], f"{group}/median": middle, f"{group}/highest": values[-1]}
    return shown


def _by_layer(values: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
