"""Segments of a micro-batch: the events that a trace records in each, what these add up to, and their replay in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("activations", "loss head", "gradients", "weight copies", "communication buffers")
ACTIVATIONS, LOSS_HEAD, GRADIENTS, WEIGHT_COPIES, BUFFERS, MATMUL, ATTENTION = range(7)
"""Kinds of events: bytes of `KINDS`, and FLOPs. GRADIENTS are those that a parameter receives. BUFFERS are not traced."""

Event = tuple[int, int]
"""(kind, amount). Allocations are positive, releases negative."""
Segment = list[Event]


def extended(first: Sequence[Segment], second: Sequence[Segment], times: float) -> list[Segment] | None:
    """`first` plus `times` the difference to `second`, event by event; None if the two have different events."""
    if [[kind for kind, _ in segment] for segment in first] != [[kind for kind, _ in segment] for segment in second]:
        return None
    return [
        [(kind, round(a + times * (b - a))) for (kind, a), (_, b) in zip(one, two, strict=True)]
        for one, two in zip(first, second, strict=True)
    ]


@dataclass(frozen=True)
class Change:
    """What a segment does: live bytes by kind at its end and at its peak, relative to its begin; bytes written; FLOPs."""

    end: tuple[int, ...]
    peak: tuple[int, ...]
    written: int
    flops: tuple[int, int]

    @classmethod
    def of(cls, segment: Segment, split_gradient: Callable[[int], tuple[int, int]], *, narrow_weights: bool = False) -> Change:
        """What the events add up to.

        Args:
            split_gradient: of a gradient's bytes, those that are left at the end, and those that are freed when it has been
                reduced.
            narrow_weights: no copies of weights are made.
        """
        live, total, most, written, flops = [0] * len(KINDS), 0, 0, 0, [0, 0]
        peak = tuple(live)
        for kind, amount in segment:
            if kind >= len(KINDS):
                flops[kind - len(KINDS)] += amount
                continue
            if narrow_weights and kind == WEIGHT_COPIES:
                continue
            if kind == GRADIENTS:
                amount, passing = split_gradient(amount)
                live[BUFFERS] += passing
                total += passing
            elif amount > 0:
                written += amount
            live[kind] += amount
            total += amount
            if total > most:
                most, peak = total, tuple(live)
        return cls(tuple(live), peak, written, (flops[0], flops[1]))


def combined(*terms: tuple[float, Change]) -> Change:
    """The sum of changes, each times a factor."""
    rows = [[factor * number for number in (*c.end, *c.peak, c.written, *c.flops)] for factor, c in terms]
    n, (*sizes, written, matmul, attention) = len(KINDS), [round(sum(column)) for column in zip(*rows, strict=True)]
    return Change(tuple(sizes[:n]), tuple(sizes[n:]), written, (matmul, attention))


class Bytes(NamedTuple):
    """What FSDP2 holds beside the traced bytes: on a GPU's stream that computes, and on those that gather and reduce."""

    own: int
    sent: int = 0


class Operation(NamedTuple):
    """Forward or backward of a block, the embedding, the last norm or the loss: its phase, bytes by kind at its peak, FLOPs."""

    phase: str
    live: dict[str, int]
    flops: int


@dataclass
class MicroBatch:
    """Forward and backward of one micro-batch, without weights and optimizer state. `play` adds changes one after the other.

    Earlier gradients are included: those being accumulated, or those of the previous step, which Lightning frees only after
    the forward pass.

    Attributes:
        peaks: live bytes by kind at the peak of each phase: "forward"; "loss head", forward and backward, with the
            backward of the last norm; "backward".
        on_other_streams: part of each peak that a GPU allocates on streams that gather and reduce.
        live: bytes by kind, now.
        written: all bytes that operations allocate, which is the write traffic to memory.
        matmul_flops, attention_flops: that kernels execute, as torch's FlopCounterMode counts them.
        timeline: of each change.
        notes: what is unknown or assumed, one sentence each.
        is_known: False: a user's module cannot be traced, so there are only gradients.
        kernels: that write new memory, in a user's module; 0 for a GPT.
    """

    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    on_other_streams: dict[str, int] = field(default_factory=dict)
    live: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    written: int = 0
    matmul_flops: int = 0
    attention_flops: int = 0
    timeline: list[Operation] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    is_known: bool = True
    kernels: int = 0

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops

    def play(self, phase: str, changes: Sequence[Change], held: Bytes) -> None:
        """One after the other, beside what FSDP2 has `held`."""
        for change in changes:
            self.compare(phase, _sum(self.live, change.peak), held, sum(change.flops))
            self.live = _sum(self.live, change.end)
            self.written += change.written
            self.matmul_flops += change.flops[0]
            self.attention_flops += change.flops[1]

    def compare(self, phase: str, live: Sequence[int], held: Bytes, flops: int = 0) -> None:
        """Note a moment, and keep it if it is the phase's peak."""
        found = dict(zip(KINDS, live, strict=True))
        found[KINDS[BUFFERS]] += sum(held)
        self.timeline.append(Operation(phase, found, flops))
        if phase not in self.peaks or sum(found.values()) > sum(self.peaks[phase].values()):
            self.peaks[phase], self.on_other_streams[phase] = found, held.sent


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]
