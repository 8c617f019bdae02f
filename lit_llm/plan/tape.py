"""A tape of sizes: the bytes that autograd holds during a step, computed without tensors.

Operations are replayed in program order. Each one allocates and frees bytes and records its backward operation; the backward
pass plays the records in reverse. The tape tracks live bytes by kind, and their composition at the peak of each phase.
"""

from __future__ import annotations

from collections.abc import Callable

KINDS = ("activations", "loss head", "gradients", "weight copies", "work")


class Tensor:
    """Bytes with a reference count. They are freed when neither a variable nor autograd references them."""

    __slots__ = ("kind", "references", "size")

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind, self.references = size, kind, 1


class Tape:
    """Live bytes by kind, their composition at the peak of each phase, and the records of the backward pass.

    `written` counts all allocated bytes. Each is written once, so it measures the write traffic to memory.
    """

    def __init__(self) -> None:
        self.live = dict.fromkeys(KINDS, 0)
        self.total = self.written = 0
        self.peaks: dict[str, dict[str, int]] = {}
        self.records: list[Callable[[Tensor], Tensor]] = []
        self.recording = True
        self.enter("forward")

    def enter(self, phase: str) -> None:
        """Begin `phase`."""
        self.phase = phase
        self.phase_peak = sum(self.peaks.get(phase, {"": 0}).values())

    def new(self, size: int, kind: str = "activations") -> Tensor:
        self.live[kind] += size
        self.total += size
        self.written += size
        if self.total > self.phase_peak:
            self.phase_peak, self.peaks[self.phase] = self.total, dict(self.live)
        return Tensor(size, kind)

    def free(self, *tensors: Tensor | None) -> None:
        """Drop one reference to each tensor."""
        for tensor in tensors:
            if tensor is None:
                continue
            assert tensor.references > 0, "freed twice"
            tensor.references -= 1
            if tensor.references == 0:
                self.live[tensor.kind] -= tensor.size
                self.total -= tensor.size

    def save(self, tensor: Tensor) -> Tensor:
        """Save a tensor for the backward pass, unless recording is off (inside a checkpointed region)."""
        tensor.references += self.recording
        return tensor

    def release(self, *tensors: Tensor | None) -> None:
        """Release tensors that `save` kept, once the backward pass has used them."""
        self.free(*tensors)

    def touch(self, size: int) -> None:
        """Allocate temporary bytes of an operation and free them again."""
        self.free(self.new(size, "work"))

    def record(self, backward: Callable[[Tensor], Tensor]) -> None:
        """Record `backward`, which turns the gradient of an operation's output into that of its input and frees the former."""
        if self.recording:
            self.records.append(backward)

    def play_back(self, gradient: Tensor, down_to: int = 0) -> Tensor:
        """Run the backward pass from the last record down to number `down_to`."""
        while len(self.records) > down_to:
            gradient = self.records.pop()(gradient)
        return gradient
