"""Optimizer state, and the temporary memory of an optimizer step. Sizes in bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lit_llm.buffer_sizes import MUON_BATCH_NUMEL
from lit_llm.plan.parameters import ModelShape, parameters_by_group

STATE_COPIES = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Lion": 1, "Muon": 1, "RMSprop": 1, "Adagrad": 1}
"""Number of state tensors of the parameter's size. SGD with momentum has one more; MuonAdamW is counted by group."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: its class name and the options that affect memory."""

    name: str
    momentum: bool = False
    fused: bool = False
    ns_dtype: str = "auto"

    @property
    def is_known(self) -> bool:
        return self.name in STATE_COPIES or self.name in ("MuonAdamW", "Adafactor", "AdamW8bit")

    def newton_schulz_bytes(self, *, cuda: bool) -> int:
        """Bytes of an element in MuonAdamW's iteration, by its option `ns_dtype`."""
        dtype = ("bfloat16" if cuda else "float32") if self.ns_dtype == "auto" else self.ns_dtype
        return {"float32": 4, "bfloat16": 2}[dtype]


def state_bytes(optimizer: Optimizer, model: ModelShape, parameter_bytes: int) -> float:
    """Bytes of optimizer state for the whole model: 8 per fp32 parameter for AdamW. Unknown optimizers count as AdamW.

    State has the dtype of the parameters. Exceptions: AdamW8bit keeps two one-byte states, each with an fp32 scale per
    block of 256 values; Adafactor keeps one number per row and one per column.
    """
    groups = parameters_by_group(model)
    total = sum(groups.values())
    if optimizer.name == "MuonAdamW":
        return parameter_bytes * (groups["matrix"] + 2 * (total - groups["matrix"]))
    if optimizer.name == "AdamW8bit":
        return total * 2 * (1 + 4 / 256)
    if optimizer.name == "Adafactor":
        rows_and_columns = sum(count * (rows + columns) for (rows, columns), count in matrix_shapes(model).items())
        rows_and_columns += model.padded_vocab_size + model.n_embd
        return parameter_bytes * (rows_and_columns + groups["vector"])
    copies = STATE_COPIES.get(optimizer.name, 2) + (1 if optimizer.name == "SGD" and optimizer.momentum else 0)
    return total * copies * parameter_bytes


def matrix_shapes(model: ModelShape) -> Counter[tuple[int, int]]:
    """Number of hidden matrices of each shape (shorter side first)."""
    d, found = model.n_embd, Counter[tuple[int, int]]()
    for width, count in ((model.query_width, 2), (model.kv_width, 2), (model.hidden_width, 3 if model.gated else 2)):
        found[min(d, width), max(d, width)] += count * model.n_layer
    return found


def work_bytes(optimizer: Optimizer, model: ModelShape, parameter_bytes: int, *, cuda: bool) -> int:
    """Peak temporary memory of an optimizer step, without parameters, gradients and state.

    Args:
        cuda: on a GPU, torch's unfused optimizers process all tensors at once, and Muon and Lion keep copies until
            `found_inf` is applied.
    """
    groups = parameters_by_group(model)
    widest = max(model.query_width, model.hidden_width)
    largest = max(model.padded_vocab_size, widest) * model.n_embd
    if optimizer.name == "MuonAdamW":
        peak = 0
        for (rows, columns), count in matrix_shapes(model).items():
            at_once = min(count, max(1, MUON_BATCH_NUMEL // (rows * columns)))
            batch = at_once * rows * columns
            iterate = optimizer.newton_schulz_bytes(cuda=cuda)
            # The stack divided by its norms, and its copy in the iteration's dtype; then two iterates and two Gram matrices.
            normalising = batch * (parameter_bytes + (iterate if iterate != parameter_bytes else 0))
            iterating = (2 * batch + 2 * at_once * rows * rows) * iterate
            size = 2 * batch * parameter_bytes + max(normalising, iterating)  # beside the updates and their stack
            peak = max(peak, size + (2 * batch * parameter_bytes if cuda else 0))
        return peak
    if optimizer.name == "Lion":
        if not cuda:
            return max(groups.values()) * parameter_bytes
        return 3 * max(MUON_BATCH_NUMEL, largest) * parameter_bytes
    if optimizer.fused or optimizer.name == "SGD":
        return 0
    if cuda:
        return sum(groups.values()) * parameter_bytes
    # One tensor at a time: its square root and quotient, while the previous tensor's quotient is still alive.
    table = model.padded_vocab_size * model.n_embd * (2 if model.tie_embeddings else 3)
    return max(table, 3 * model.n_embd * widest) * parameter_bytes
