"""Forward passes of a few sequences without gradients, in which activations and logits are measured.

Shape letters: R probed sequences, L positions, V vocabulary, H query heads, K key/value heads, h width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from ._lightning import data_parallel, evaluation_mode, without_traces
from ._torch import local_part, tensors_in
from .contracts import HoldsAllLogits, offered
from .health_readings import Readings

MOST_TOKENS = 2**13
"""Largest number of tokens in one of the probe's forward passes."""
MOST_LOGITS = 2**23
"""Largest number of logits in one of the probe's passes (32 MB), unless training holds all logits of a micro-batch at once."""
DEAD = 1e-6
"""A hidden unit of an MLP is dead if its absolute value never exceeds this share of the largest value of its layer."""
_ELEMENTS = 2**21  # of temporary tensors: 8 MB
_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU)


class Probe:
    """Runs `pl_module(ids)` on a few sequences, twice: with their own ids, and with other ids in a part of each sequence.

    Both passes have the same random state. `forward` is not told where documents end, so the documents of a sequence see each
    other, unless the model finds their ends itself. The probe is off where `forward` is Lightning's own, or fails, or does not
    give logits (B, T, V).

    Args:
        blocks: the blocks of the model, by their names in the tags.
    """

    def __init__(self, pl_module: LightningModule, blocks: dict[str, nn.Module]) -> None:
        self.blocks = blocks
        self.on = type(pl_module).forward is not LightningModule.forward
        self.vocabulary: int | None = None
        """V, the number of logits per position; None before the first probe."""

    def run(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        ids: Tensor,
        rows: int,
        number: int,
        readings: Readings,
    ) -> None:
        """Add to `readings` what forward passes of some sequences of a micro-batch (B, T) show. Training is not affected.

        Args:
            rows: number of rows of the embedding; 0 if unknown.
            number: the row's number, from 1 (`health.row_number`). If it is odd, the second pass has other ids at later
                positions, if it is even, at earlier positions.
        """
        kept = self._chosen(trainer, pl_module, ids, rows)  # (R, L)
        if kept is None:
            return
        count, length = kept.shape
        places, seeks_leak = torch.arange(length, device=kept.device), bool(number % 2)
        if seeks_leak:
            before = places < cuts(count, length, number).to(kept.device)[:, None]  # (R, L)
            changed, judged = ~before, before
        else:
            changed, judged = (places < length - length // 4)[None], (places >= length - max(1, length // 16))[None]
        inner = Readings(readings.device)
        with evaluation_mode(trainer, pl_module):
            with watched(self.blocks, inner):
                logits = self._logits(trainer, pl_module, kept)
            others = None if logits is None else torch.where(changed, (kept + 1) % (kept.max() + 1), kept)
            other_logits = None if others is None else self._logits(trainer, pl_module, others)
        if logits is None or other_logits is None:
            return
        self.vocabulary = logits.size(-1)
        readings.take(inner)
        with torch.no_grad():
            _measure_logits(logits, readings)
            for name, measured in (("future_leak", seeks_leak), ("context_use", not seeks_leak)):
                if measured:
                    _measure_change(name, logits, other_logits, judged.expand(count, length), readings)

    def validate(self, trainer: Trainer, pl_module: LightningModule, ids: Tensor | None, rows: int, readings: Readings) -> None:
        """Add to `readings` the largest difference between two evaluations of the same sequences, divided by the largest logit.

        The modules stay in their present modes. If a rank has no batch, or the probe is off, nothing is added on any rank.

        Args:
            ids: input ids (B, T) of a validation batch. None: this rank has no batch.
            rows: number of rows of the embedding; 0 if unknown.
        """
        kept = self._chosen(trainer, pl_module, ids, rows)
        if kept is None:
            return
        with without_traces(trainer, pl_module):
            logits = self._logits(trainer, pl_module, torch.cat([kept, kept]))
        if not _all_agree(trainer, logits is not None) or logits is None:
            return
        first, again = logits.float().chunk(2)
        size = _largest(first).clamp(min=torch.finfo(torch.float32).tiny)
        readings.largest("health/validation_noise", _largest(again - first).amax() / size)

    def _chosen(self, trainer: Trainer, pl_module: LightningModule, ids: Tensor | None, rows: int) -> Tensor | None:
        """The ids (R, L) to probe; None on all ranks if one rank has none to probe, because `forward` may need every rank."""
        chosen = self._size(trainer, pl_module, ids, rows) if self.on and ids is not None else None
        if not _all_agree(trainer, chosen is not None) or chosen is None or ids is None:
            return None
        return ids[: chosen[0], : chosen[1]]

    def _logits(self, trainer: Trainer, pl_module: LightningModule, ids: Tensor) -> Tensor | None:
        """The logits (R, L, V). None if `forward` fails or gives no logits; the probe is then off. Restores random state."""
        try:
            with torch.compiler.set_stance("force_eager"), isolate_rng():
                logits: Any = pl_module(ids)
        except Exception as error:  # whatever a forward that expects other arguments raises
            if isinstance(error, torch.OutOfMemoryError) and trainer.world_size > 1:
                raise  # of this rank alone: the others would wait for it
            self._turn_off(f"{type(error).__name__}: {error}")
            return None
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
            self._turn_off("it does not return logits of shape (batch, positions, vocabulary)")
            return None
        return local_part(logits)

    def _turn_off(self, reason: str) -> None:
        self.on = False
        rank_zero_info(f"HealthSignals: activations and logits are not measured, because forward(input_ids) failed: {reason}")

    def _size(self, trainer: Trainer, pl_module: LightningModule, ids: Tensor, rows: int) -> tuple[int, int] | None:
        """(R sequences, L positions) of a pass: about a quarter of the micro-batch. None if limits allow under 4 positions."""
        sharing = trainer.world_size // data_parallel(trainer)[1]  # ranks that share a batch: each holds parts in training
        most = min(max(ids.size(1), ids.numel() // 4) // sharing, MOST_TOKENS)
        own = offered(pl_module, HoldsAllLogits)
        if own is None or not own.holds_all_logits:
            most = min(most, MOST_LOGITS // max(rows, 1))
        length = min(ids.size(1), most)
        return (max(1, min(most // length, ids.size(0))), length) if length >= 4 else None


def cuts(count: int, length: int, number: int) -> Tensor:
    """Return for each of `count` sequences the position from which on the probe changes ids, (R,), from 1 to `length` - 1.

    Over sequences and rows (`number`), these positions are spread evenly: they follow the multiples
    of the golden ratio, whose fractions leave no large gap (Weyl 1916).
    """
    fractions = (torch.arange(1, count + 1) + count * (number // 2)) * 0.6180339887498949 % 1
    return (1 + fractions * (length - 1)).long()


def _all_agree(trainer: Trainer, here: bool) -> bool:
    """Whether `here` is true on every rank. A collective."""
    if trainer.world_size == 1:
        return here
    agreed = torch.tensor(float(here), device=trainer.strategy.root_device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed.item())


@contextmanager
def watched(blocks: dict[str, nn.Module], readings: Readings) -> Iterator[None]:
    """Context manager in which forward passes of the blocks add measurements to `readings`, by hooks removed at its end."""
    handles = []
    with_probes: list[tuple[nn.Module, str]] = []
    for name, block in blocks.items():
        handles.append(block.register_forward_hook(partial(_of_block, name, readings)))
        probed = {
            "score_probe": partial(_of_scores, name, readings),
            "unit_probe": partial(_of_units, name, readings),
        }
        pairs = [(each, attribute) for each in block.modules() for attribute in probed if hasattr(each, attribute)]
        for each, attribute in pairs:
            setattr(each, attribute, probed[attribute])
        with_probes += pairs
        if not any(attribute == "unit_probe" for _, attribute in pairs):
            for each in block.modules():
                if isinstance(each, _ACTIVATIONS):
                    units = probed["unit_probe"]
                    handles.append(each.register_forward_hook(lambda _module, _args, output, units=units: units(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each, attribute in with_probes:
            setattr(each, attribute, None)


def _of_block(name: str, readings: Readings, module: nn.Module, args: Any, output: Any) -> None:
    """Add to `readings` root mean square and largest absolute value of `output` (R, L, d), or of its first tensor."""
    if (x := next(tensors_in(output), None)) is None:
        return
    x = local_part(x)
    readings.root_mean(f"health/activation_rms/{name}", torch.linalg.vector_norm(x, dtype=torch.float32).square(), x.numel())
    readings.largest(f"health/activation_max/{name}", _largest(x).amax())


def _of_units(name: str, readings: Readings, hidden: Tensor) -> None:
    """Add to `readings` the share of dead units among the f hidden units of an MLP, whose activations are (R, L, f)."""
    hidden = local_part(hidden)
    peaks = _largest(hidden.flatten(0, -2), dim=0)  # (f,)
    readings.mean(f"health/dead_units/{name}", (peaks <= DEAD * peaks.max()).sum(), peaks.numel())


def _of_scores(
    name: str, readings: Readings, q: Tensor, k: Tensor, *, scale: float | None = None, window: int | None = None
) -> None:
    """Add to `readings` the first sequence's largest attention logit, from queries (R, H, L, h) and keys (R, K, L, h).

    The logits are computed for some queries at a time, to limit memory.
    """
    q, k = local_part(q)[0], local_part(k)[0]
    scale = q.size(-1) ** -0.5 if scale is None else scale
    heads, length = q.size(0), q.size(1)
    q = q.unflatten(0, (k.size(0), -1))  # (K, H / K, L, h)
    places = torch.arange(length, device=q.device)
    chunk = max(1, _ELEMENTS // (heads * length))
    with torch.autocast(q.device.type, enabled=False):
        for first in range(0, length, chunk):
            queries, last = places[first : first + chunk, None], min(first + chunk, length)
            scores = q[:, :, first:last].float() @ k[:, None, :last].float().mT  # (K, H / K, queries, keys)
            hidden = queries < places[:last]
            if window is not None:
                hidden = hidden | (queries - places[:last] >= window)
            readings.largest(f"health/attention_logit_max/{name}", scores.masked_fill_(hidden, -math.inf).amax() * scale)


def _largest(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest absolute value, of all elements or along a dimension. Makes no copy of `x`."""
    low, high = torch.aminmax(x) if dim is None else torch.aminmax(x, dim=dim)
    return torch.maximum(low.abs(), high.abs())


def _chunks(logits: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield all logits (R, L, V) in chunks: number of the sequence, slice of n positions, their logits in fp32 (n, V)."""
    step = max(1, _ELEMENTS // logits.size(-1))
    for row in range(logits.size(0)):
        for first in range(0, logits.size(1), step):
            places = slice(first, min(first + step, logits.size(1)))
            yield row, places, logits[row, places].float()


def _measure_logits(logits: Tensor, readings: Readings) -> None:
    for _, _, z in _chunks(logits):
        readings.root_mean("health/logit_rms", torch.linalg.vector_norm(z).square(), z.numel())
        readings.largest("health/logit_max", _largest(z))
        readings.mean("health/output_entropy", torch.special.entr(z.softmax(dim=-1)).sum(), z.size(0))


def _measure_change(name: str, logits: Tensor, others: Tensor, judged: Tensor, readings: Readings) -> None:
    """Add to `readings` the largest change from `logits` to `others` (R, L, V) at positions where `judged` (R, L) is true,
    divided by the largest absolute logit."""
    size = _largest(logits).clamp(min=torch.finfo(torch.float32).tiny)
    for row, places, z in _chunks(logits):
        change = (z - others[row, places]).abs().amax(dim=-1)  # (n,)
        readings.largest(f"health/{name}", change.where(judged[row, places], 0).amax() / size)
