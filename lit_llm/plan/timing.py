"""Predict the seconds of a step from its work, with speeds fitted to a few measured steps of the same machine.

    t = matmul FLOPs / r1 + attention FLOPs / r2 + bytes written / r3 + logits / r4 + optimizer bytes / r5 + operations · r6

The logits term covers the exponentials and logarithms of the loss, which cost far more than writing them. The speeds hold for
one device, precision and number of threads. They are fitted by non-negative least squares of the *relative* error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lit_llm.plan import muon
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.optimizer import matrix_shapes, state_bytes
from lit_llm.plan.parameters import weights_of
from lit_llm.plan.settings import BYTES, RunSettings
from lit_llm.plan.weights import stored_bytes

WORK = ("matmul FLOPs", "attention FLOPs", "bytes written", "logits", "optimizer bytes", "operations")
OPERATIONS_PER_BLOCK = 150
"""Rough number of kernels per block, forward and backward. Only its product with a fitted speed matters."""


def work_of(settings: RunSettings, *, cuda: bool) -> tuple[float, ...]:
    """The work of one device in one optimizer step, in the order of WORK."""
    model, accumulation = settings.model, settings.accumulation
    weight_bytes, _ = BYTES[settings.precision]
    tokens = settings.sequences * settings.sequence_length * accumulation
    made, weights = one_micro_batch(settings, cuda=cuda), weights_of(model, settings.lora)
    matmul = float(made.matmul_flops * accumulation)
    if settings.optimizer.is_muon:
        matmul += muon.flops(matrix_shapes(weights))
    # Clipping reads and writes gradients. The update reads gradients and reads and writes weights and state.
    updated = 5.0 * stored_bytes(weights, weight_bytes, trainable=True)
    updated += 2 * state_bytes(settings.optimizer, weights, weight_bytes)
    operations = (made.kernels or (model.n_layer + 1) * OPERATIONS_PER_BLOCK) * accumulation
    logits = tokens * model.padded_vocab_size
    return matmul, made.attention_flops * accumulation, made.written * accumulation, logits, updated, operations


@dataclass(frozen=True)
class Speeds:
    """Seconds per unit of each kind of WORK."""

    seconds_per_unit: tuple[float, ...]

    def seconds(self, work: Sequence[float]) -> float:
        """Seconds of a step with this work."""
        return sum(rate * amount for rate, amount in zip(self.seconds_per_unit, work, strict=True))


CPU = Speeds((1.06e-11, 7.4e-12, 2.27e-10, 6.8e-9, 5.2e-11, 0.0))
"""Of one core, fitted to the ten configurations that are timed in docs/plan.md. On another CPU, only ratios mean something."""


def fit_speeds(works: Sequence[Sequence[float]], seconds: Sequence[float]) -> Speeds:
    """Fit non-negative speeds by least squares of the relative error, trying every subset of non-zero speeds.

    Args:
        works: the work of each measured step, as returned by `work_of`.
        seconds: the measured time of each step.
    """
    import numpy as np

    rows = np.array(works) / np.array(seconds)[:, None]  # (n, 6): each row should sum to 1
    scale = rows.max(axis=0)
    done = [i for i in range(len(WORK)) if scale[i] > 0]
    best, best_error = np.zeros(len(WORK)), float("inf")
    for count in range(1, min(len(done), len(works)) + 1):
        for used in itertools.combinations(done, count):
            columns = list(used)
            found, *_ = np.linalg.lstsq(rows[:, columns] / scale[columns], np.ones(len(rows)), rcond=None)
            error = float(((rows[:, columns] / scale[columns] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error - 1e-9:
                best, best_error = np.zeros(len(WORK)), error
                best[columns] = found / scale[columns]
    return Speeds(tuple(float(value) for value in best))
