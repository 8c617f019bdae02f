"""Signals of a run's health: norms, activations, logits, and checks of batches."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

from ._lightning import is_logged, metric_step, write_row
from ._torch import gathered, process_count
from .contracts import (
    MeanOfMicroBatches,
    SaysWhetherTargetsCount,
    SplitsLayers,
    fact_of_data,
    offered,
)
from .health_batch import check_targets, compare_targets, ids_of, targets_of
from .health_counts import CountedText
from .health_layers import UpdateSample, add_zero_gradients, find_blocks, layers_of, share_of_square, trained_parameters
from .health_probe import Probe
from .health_readings import Readings
from .health_setup import setup_facts
from .health_spans import RepeatedText, ValidationOverlap, add_shared_to
from .ranges import STEPS, check_ranges, whole

_KINDS = ("gradient_norm", "weight_norm", "update_norm", "update_ratio", "activation_rms", "activation_max")
OF_LAYERS = tuple(f"health/{kind}" for kind in (*_KINDS, "attention_logit_max", "dead_units"))
"""Groups of metrics with one tag per layer or block, such as `health/update_ratio/blocks.0.mlp`."""
EARLY = 20
"""About how many rows `HealthSignals` logs before step `every_n_steps`, so that runs of a few hundred steps can be judged."""


@cache
def _early_steps(every_n_steps: int) -> list[int]:
    return sorted({round(every_n_steps ** (i / EARLY)) for i in range(EARLY)} - {every_n_steps})


def row_number(step: int, every_n_steps: int) -> int:
    """The number, from 1, of the row that `HealthSignals` logs at an optimizer step; 0 if it logs no row at this step.

    A row is logged at each multiple of `every_n_steps`, and at about 20 steps before the first multiple, spread geometrically.
    The number depends on the step alone, so that a resumed or extended run has the rows of an uninterrupted run.
    """
    early = _early_steps(every_n_steps)
    if step % every_n_steps == 0:
        return len(early) + step // every_n_steps
    return early.index(step) + 1 if step in early else 0


class HealthSignals(Callback):
    """Logs signals from which trouble can be diagnosed, at the steps that `row_number` names.

    Logs the curves of docs/reference/health.md, in five parts:
        Set-up, in the first row of a launch: what the optimizer decays and trains, sizes, and initial weights.
        Norms, of the parameters that the optimizer has, by layer. The blocks are the largest list of modules with numbers as
            names; a layer is a submodule of a block, or a module beside the list. Absent with several optimizers, and under
            FSDP1, which flattens parameters.
        Batches, if they are dicts with `input_ids` and `targets`, (B, T) each. Values about targets are over all micro-batches
            of the step; untouched embeddings, repeated samples and spans, and overlap are over all steps of this launch.
            Padding rows of an embedding do not count if the probe, or the data module's `vocab_size`, gives the number of ids.
        Probe: before the step's first micro-batch, two forward passes without gradients of a quarter of its sequences, at least
            one, in eval mode, with the same random state and without compiled code: `forward(input_ids)` → logits (B, T, V).
            Documents in a sequence see each other. In rows 1, 3, 5, … the second pass has other ids from a position on, which
            differs between sequences and rows; in rows 2, 4, 6, … it has other ids up to the last quarter of a sequence. A pass
            has at most 8,192 tokens and, unless the module `holds_all_logits`, 2²³ logits; longer sequences are cut, and also
            the sequences of a micro-batch of less than 4 N sequences that N ranks share. Absent in a pipeline, and if
            `forward(input_ids)` fails.
        Backward loss ratio, at steps that log `train/loss`. Absent in a pipeline, and if the module's `every_target_counts` is
            false (`contracts.py`): such a module scales its gradients by the number of targets after the backward pass.
        Rank difference and shared samples, with DDP on several processes.

    A module of a block can report values that hooks cannot see, through two attributes. The module sets them to None; during
    the probe, an attribute is a function that the module must call:
        score_probe(q, k, scale=None, window=None): queries (B, H, T, h) and keys (B, K, T, h) of causal attention.
        unit_probe(hidden): (B, T, f), the MLP's activations. Without it, outputs of nn.ReLU, nn.GELU and nn.SiLU are used.
    A unit is dead if no probed value exceeds 10⁻⁶ of its layer's largest one.

    List this callback before `GradientNorm`, so that it measures gradients before clipping.

    TensorBoard gets three tags in place of one tag per layer, such as `health/update_ratio/lowest`, `…/median` and
    `…/highest`. Every other logger gets the values of all layers.

    Contract:
        on_fit_start: finds blocks and layers.
        on_validation_batch_start: remembers spans of the first validation; on_validation_batch_end: remembers the first batch.
        on_validation_end: evaluates a part of the first batch twice. Uses collectives, so it must run on every rank.
        on_train_batch_start: hashes the sequences and counts the ids; at a sampled step, checks targets and runs the probe.
            Before the first step of a launch, notes the facts about the set-up.
        on_before_backward: at a sampled step, adds up the loss.
        on_before_optimizer_step: at a sampled step, computes norms and copies some weights.
        on_train_batch_end: after a sampled step, compares these weights, reduces all values over the ranks, and writes the row.
            The host synchronises then, and with several ranks before the probe, which needs all of them.
        State: none. After a resume, counts over a launch start anew.
    Cost: 0.34 % of a CPU's time at one step in 100 (benchmarks/health_cost.py); not measured on a GPU.

    Args:
        every_n_steps: optimizer steps between two rows, from the first multiple on.
        layers: also write the values of single layers to TensorBoard, about 30 tags for each block.

    Raises:
        UserError: every_n_steps < 1.
    """

    def __init__(self, every_n_steps: Annotated[int, whole(1, STEPS)] = 100, layers: bool = False) -> None:
        check_ranges(HealthSignals, locals())
        self.every_n_steps, self.layers = every_n_steps, layers

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not later: FSDP2 may have gathered weights by then, and named_parameters would give those.
        self._step = 0  # under way: on_train_batch_start runs once per micro-batch
        self._readings: Readings | None = None  # of the step under way, if it is sampled
        self._update: UpdateSample | None = None
        pipeline = offered(trainer.strategy, SplitsLayers)
        path, blocks = find_blocks(pl_module)
        base = path.rpartition(".")[2]
        named = {f"{base}.{number}": block for number, block in blocks.items()}
        self._probe = Probe(pl_module, named) if pipeline is None else None
        self._layers: dict[str, list[Tensor]] = {}  # of this rank
        self._ranks = 1  # that hold a parameter or parts of it
        if len(trainer.optimizers) == 1 and not isinstance(trainer.strategy, FSDPStrategy):  # FSDP1 flattens parameters
            trained, self._ranks = trained_parameters(trainer, pl_module)
            self._layers = layers_of(trained, path)
        self._names = list(self._layers)  # of the layers of all ranks
        sizes = [m.num_embeddings for m in pl_module.modules() if isinstance(m, nn.Embedding)]
        self._rows = max(sizes, default=0)  # of the embedding, not of a table of positions
        if pipeline is not None:
            by_rank = gathered((self._names, self._rows))
            self._names = list(dict.fromkeys(name for names, _ in by_rank for name in names))
            self._rows = max(rows for _, rows in by_rank)
        self._repeated: RepeatedText | None = None  # from the first batch on
        self._counted: CountedText | None = None  # from the first batch on, where the vocabulary is known
        self._facts: dict[str, float] | None = None  # about the set-up, until the first row; None before the first batch
        self._overlap = ValidationOverlap()
        self._losses = MeanOfMicroBatches()  # of the backward passes of a sampled step
        self._length = 0  # tokens of a training sequence
        self._validated: tuple[Tensor | None, Tensor | None] = (None, None)  # ids and targets of the first validation batch
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
        readings.mean("health/validation_shifted_targets", 0.0, 0.0)
        if ids is not None and targets is not None:
            compare_targets(ids, targets, readings, "validation_")
        if self._counted is not None:
            for name in ("unigram_loss", "bigram_loss", "unseen"):
                readings.mean(f"health/validation_{name}", 0.0, 0.0)
            self._counted.add_to(readings, fact_of_data(trainer, "unknown_id"), fact_of_data(trainer, "bos_id"))
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
        if self._repeated is None:
            self._repeated = RepeatedText()
            self._counted = CountedText(self._rows, ids.device) if self._rows else None
        self._repeated.add(ids)
        self._overlap.add(ids)
        if self._readings is not None:
            if self._compares_ranks:
                add_shared_to(self._readings, ids)
            if targets is not None:
                check_targets(ids, targets, self._readings)
            if targets is not None and self._counted is not None:
                self._counted.judge(ids, targets, self._readings)
            if begins and self._probe is not None:
                self._probe.run(trainer, pl_module, ids, self._rows, number, self._readings)
        if targets is not None and self._counted is not None:
            self._counted.add(ids, targets)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._readings is None or offered(trainer.strategy, SplitsLayers) is not None:
            return
        says = offered(pl_module, SaysWhetherTargetsCount)
        if says is None or says.every_target_counts:  # the loss of a step is the mean of its micro-batches' losses
            self._losses.add(trainer, loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        if self._readings is None or not self._names:
            return
        zero = torch.zeros((), device=self._readings.device)
        self._readings.mean("health/zero_gradients", 0.0, 0.0)  # stages have different layers
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
            add_zero_gradients(self._readings, name, parameters, self._ranks)
        self._update = UpdateSample(self._layers)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._readings is None or trainer.global_step < self._step:
            return
        readings, update, self._readings, self._update = self._readings, self._update, None, None
        if update is not None:
            for name in self._names:
                readings.root_mean(f"health/update_norm/{name}", 0.0, 1 / process_count())
                update.add_to(readings, name, self._ranks)
        if self._repeated is not None:
            self._repeated.add_to(readings)
        if self._counted is not None:
            self._counted.add_to(readings, fact_of_data(trainer, "unknown_id"), fact_of_data(trainer, "bos_id"))
            probed = None if self._probe is None else self._probe.vocabulary
            self._counted.add_seen_to(readings, probed or fact_of_data(trainer, "vocab_size"))
        self._overlap.add_to(readings)
        if (loss := self._losses.take(trainer)) is not None:
            readings.mean("backward_loss", loss, 1.0)
        values = readings.read()
        row = _row(values)
        is_ours = is_logged(trainer, self._step) and metric_step(trainer, "train/loss") in (None, self._step)
        logged = trainer.callback_metrics.get("train/loss") if is_ours else None  # a step without a target has no row of it
        if logged is not None and "backward_loss" in values and float(logged) > 0:  # a tensor on the CPU
            row["health/backward_loss_ratio"] = values["backward_loss"] / float(logged)
        row = (self._facts or {}) | row
        write_row(trainer, row, self._step, row if self.layers else _layers_summed_up(row))
        self._facts = {}


def _row(values: dict[str, float]) -> dict[str, float]:
    """The row (metric → value) of a sampled step, from `values` that `Readings.read` returned: values of all ranks together."""
    row = {name: value for name, value in values.items() if name.startswith("health/")}
    for layer, norm in _by_layer(values, "health/update_norm/").items():
        if weight := values.get(f"health/weight_norm/{layer}"):
            row[f"health/update_ratio/{layer}"] = norm / weight
    if highest := _by_layer(values, "highest/"):
        spread = ((value + values[f"lowest/{layer}"]) / value for layer, value in highest.items() if value)
        row["health/rank_difference"] = max(spread, default=0.0) / 2  # of squares: twice the difference of norms
    return row


def _layers_summed_up(row: dict[str, float]) -> dict[str, float]:
    """`row` with each metric's lowest, median and highest layer in place of one value per layer. NaN counts as the highest."""
    shown = {tag: value for tag, value in row.items() if tag.rpartition("/")[0] not in OF_LAYERS}
    for group in OF_LAYERS:
        if values := sorted(_by_layer(row, f"{group}/").values(), key=lambda value: (math.isnan(value), value)):
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
            shown |= {f"{group}/lowest": values[0], f"{group}/median": middle, f"{group}/highest": values[-1]}
    return shown


def _by_layer(values: dict[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
