"""Real steps on this machine: what `plan` predicts, measured. Parameters, peak memory, FLOPs as torch counts them, seconds a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from callbacks.gradient_norm import scale_, total_norm
from lit_llm.compute import ComputeConfig
from lit_llm.loss import chunked_cross_entropy, cross_entropy
from lit_llm.model import GPT, GPTConfig
from lit_llm.module import LossConfig
from lit_llm.optimizers import parameter_groups
from lit_llm.parallel import parallelize

_UNKNOWN_TO_TORCH: dict[Any, Any] = {  # takes shapes, as torch's own formulas do
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad, q, k, v
    ),
    torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1],
}


@dataclass(frozen=True)
class Measured:
    """Of one optimizer step on one device.

    Attributes:
        peak_bytes: most that was allocated at a time, weights and optimizer state included: by the log of torch's allocator on a CPU,
            which knows every tensor and kernel workspace but not libraries' own buffers; `max_memory_allocated` on CUDA.
        flops: by torch's FlopCounterMode.
        seconds: of each step that was timed.
    """

    parameters: int
    peak_bytes: int
    flops: int
    seconds: list[float]

    @property
    def step_seconds(self) -> float:
        """Median."""
        return statistics.median(self.seconds)


class TrainingStep:
    """The optimizer step of a recipe on one device, by hand: forward, backward, clipping, update; random tokens.

    Like Lightning it lets the old gradients go after the forward pass of the first micro-batch.
    """

    def __init__(
        self,
        model: GPTConfig,
        optimizer: Callable[[Any], Optimizer],
        *,
        sequences: int,
        accumulation: int = 1,
        precision: str = "32-true",
        loss: LossConfig | None = None,
        compute: ComputeConfig | None = None,
        device: torch.device | None = None,
    ) -> None:
        loss = loss or LossConfig()
        self.device = device or torch.device("cpu")
        self.accumulation = accumulation
        with torch.device("meta"):
            self.model = GPT(model)
        parallelize(self.model, compute or ComputeConfig(), self.device)
        self.model.to_empty(device=self.device)
        self.model.init_weights()
        if precision.endswith("-true") and precision != "32-true":
            self.model.to(torch.bfloat16 if precision == "bf16-true" else torch.float16)
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        if precision.endswith("-mixed"):
            dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
            self.autocast = partial(torch.autocast, self.device.type, dtype=dtype)
        self.optimizer = optimizer(parameter_groups(self.model))
        self.loss = partial(cross_entropy, z_loss=loss.z_loss)
        if loss.chunk_size is not None:
            self.loss = partial(chunked_cross_entropy, z_loss=loss.z_loss, chunk_size=loss.chunk_size)
        assert model.vocab_size is not None
        shape = (accumulation, 2, sequences, model.block_size)
        self.tokens = torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def __call__(self) -> None:
        for i in range(self.accumulation):
            ids, targets = self.tokens[i].to(self.device, copy=True).unbind()  # (B, T) each
            with self.autocast():
                loss = self.model(ids, targets, loss=self.loss).loss / (targets.numel() * self.accumulation)
            if i == 0:
                self.optimizer.zero_grad()
            loss.backward()
            del loss
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(gradients)
        scale_(gradients, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        del gradients
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self()
            seconds.append(time.perf_counter() - start)
        return seconds

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def flops(self) -> int:
        """Of one step, by torch's counter, which is told by its own formulas of operators it does not know."""
        with FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_TORCH) as counter:
            self()
        return int(counter.get_total_flops())

    def peak_bytes(self) -> int:
        """Peak of one step after a first one, which makes the optimizer's state."""
        self()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self()
            return torch.cuda.max_memory_allocated(self.device)
        self.optimizer.zero_grad()  # what was taken before the log begins is missing when it is freed
        stays = sum(t.numel() * t.element_size() for t in self.model.parameters())
        stays += sum(
            t.numel() * t.element_size() for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t)
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            self()
            self()
        return stays + _highest(log)


def _highest(log: profile) -> int:
    """Largest running sum of the allocations and releases in a profile, bytes."""
    changes: list[tuple[int, int]] = []
    todo = list(log.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while todo:
        event = todo.pop()
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        todo.extend(event.children)
    live = highest = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        live += change
        highest = max(highest, live)
    return highest


def measure(step: TrainingStep, steps: int = 5) -> Measured:
    """Parameters, peak memory, FLOPs, and seconds of `steps` steps after these."""
    peak, flops = step.peak_bytes(), step.flops()
    return Measured(step.parameters(), peak, flops, step.timed(steps))
