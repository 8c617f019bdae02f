"""Measures what `plan` predicts: parameters, peak memory, FLOPs by torch's counter, and seconds per step on this machine.

The predicted time uses speeds fitted to four smaller versions of the recipe (`smaller_versions`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lit_llm.callbacks.gradient_norm_and_clipping import scale_, total_norm
from lit_llm.core.errors import UserError
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.lora import LoRAConfig, apply_lora, reset_adapters
from lit_llm.models.loss import LossConfig, LossSums, chunked_cross_entropy, cross_entropy, cross_entropy_of_logits
from lit_llm.optim import optimizer_of
from lit_llm.plan.built_model import with_layers
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.layout import Layout
from lit_llm.plan.memory import peak_memory
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.optimizer import matrix_shapes, muon_flops
from lit_llm.plan.recorder import FLOPS
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.speed import fit_speeds, work_of
from lit_llm.plan.weights import OwnModel, PlannedModel, total_parameters, weights_of


@dataclass(frozen=True)
class Measured:
    """Measurements of one optimizer step on one device.

    Attributes:
        peak_bytes: peak allocated memory, with weights and optimizer state. On CUDA `max_memory_allocated`. On a CPU from the
            log of torch's allocator, which contains tensors and kernel workspaces, but not buffers of other libraries.
        flops: counted by torch's FlopCounterMode.
        seconds: of each timed step.
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
    """The optimizer step of a recipe on one device and random tokens: forward, backward, clipping, update.

    Like Lightning, it frees the old gradients after the forward pass of the first micro-batch.
    """

    def __init__(
        self,
        model: PlannedModel,
        optimizer: Callable[[Any], Optimizer],
        *,
        sequences: int,
        length: int | None = None,
        accumulation: int = 1,
        precision: str = "32-true",
        loss: LossConfig | None = None,
        compute: ComputeConfig | None = None,
        device: torch.device | None = None,
        lora: LoRAConfig | None = None,
    ) -> None:
        loss = loss or LossConfig()
        self.device = device or torch.device("cpu")
        self.accumulation = accumulation
        self.model: GPT | CustomModel
        if isinstance(model, OwnModel):
            self.model = CustomModel(GPTConfig(vocab_size=model.vocab_size), model.architecture).to(self.device)
            parallelize(self.model, compute or ComputeConfig(), self.device)
        else:
            with torch.device("meta"):
                self.model = GPT(model)
                if lora is not None:
                    apply_lora(self.model, lora)
            parallelize(self.model, compute or ComputeConfig(), self.device)
            self.model.to_empty(device=self.device)
            self.model.init_weights()
            reset_adapters(self.model)
        if precision.endswith("-true") and precision != "32-true":
            self.model.to(torch.bfloat16 if precision == "bf16-true" else torch.float16)
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        if precision.endswith("-mixed"):
            dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
            self.autocast = partial(torch.autocast, self.device.type, dtype=dtype, cache_enabled=False)  # as in Lightning
        self.optimizer = optimizer_of(self.model, optimizer)
        whole = cross_entropy_of_logits if isinstance(model, OwnModel) else cross_entropy
        self.loss: Callable[..., LossSums] = partial(whole, z_loss=loss.z_loss)
        if loss.chunk_size is not None:
            self.loss = partial(chunked_cross_entropy, z_loss=loss.z_loss, chunk_size=loss.chunk_size)
        assert model.vocab_size is not None
        shape = (accumulation, 2, sequences, length or model.block_size)
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
        """Seconds of each step."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self()
            seconds.append(time.perf_counter() - start)
        return seconds

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def flops(self) -> int:
        """FLOPs of one step by torch's counter, with formulas for operators that it does not know."""
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
            self()
        return int(counter.get_total_flops())

    def peak_bytes(self) -> int:
        """Peak memory of a step. A step before it creates the optimizer state."""
        self()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self()
            return torch.cuda.max_memory_allocated(self.device)
        self.optimizer.zero_grad()  # so that the log contains the gradients' allocations
        stays = sum(t.numel() * t.element_size() for t in self.model.parameters())
        if isinstance(self.model, CustomModel):
            stays += sum(t.numel() * t.element_size() for t in self.model.buffers())
        stays += sum(
            t.numel() * t.element_size()
            for state in self.optimizer.state.values()
            for t in state.values()
            if torch.is_tensor(t)
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            self()
            self()
        return stays + highest(log)


def highest(log: profile) -> int:
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
    """Measure parameters, peak memory and FLOPs, then time `steps` more steps."""
    peak, flops = step.peak_bytes(), step.flops()
    return Measured(step.parameters(), peak, flops, step.timed(steps))


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured values in the order of LABELS. `mfu` is measured; None if the peak is unknown."""

    predicted: tuple[float, float, float, float]
    measured: tuple[float, float, float, float]
    mfu: float | None
    seconds: list[float]

    LABELS: ClassVar[tuple[str, ...]] = ("parameters", "peak_bytes", "flops_per_step", "step_seconds")


def single_device(settings: RunSettings) -> RunSettings:
    """The run's share of one device, at most two micro-batches a step."""
    accumulation = min(settings.accumulation, 2)
    return replace(
        settings,
        layout=Layout(),
        micro_batch=settings.sequences,
        global_batch=settings.sequences * accumulation,
        ramp=(),
    )


def predict(settings: RunSettings, *, cuda: bool) -> tuple[int, int, float]:
    """Parameters, peak bytes and executed FLOPs of a step on one device."""
    memory = peak_memory(settings, cuda=cuda)
    flops = float(one_micro_batch(settings, cuda=cuda).flops * settings.accumulation)
    if settings.optimizer.is_muon:
        flops += muon_flops(matrix_shapes(weights_of(settings.model, settings.lora)))
    return total_parameters(settings.model, settings.lora), memory.total, flops


def compare(
    settings: RunSettings,
    optimizer: Callable[[Any], Optimizer],
    loss: LossConfig,
    compute: ComputeConfig,
    hardware: Hardware,
    *,
    steps: int = 5,
) -> Comparison:
    """Measure a step of the recipe on this machine. Its predicted time comes from measuring four smaller versions.

    Raises:
        UserError: The step does not fit into this machine's memory.
    """
    settings = single_device(settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    torch.set_float32_matmul_precision(compute.matmul_precision)
    parameters, peak_bytes, flops = predict(settings, cuda=cuda)
    if hardware.memory_gb is not None and peak_bytes > hardware.memory_gb * 1e9:
        raise UserError(
            f"a step of this recipe needs {peak_bytes / 1e9:.1f} GB, but this machine has {hardware.memory_gb:.1f} GB "
            "(--data.micro_batch_size, --compute.activation_checkpointing)"
        )

    def step(of: RunSettings) -> TrainingStep:
        return TrainingStep(
            of.model,
            optimizer,
            sequences=of.sequences,
            length=of.length,
            accumulation=of.accumulation,
            precision=of.precision,
            loss=loss,
            compute=compute,
            device=device,
            lora=of.lora,
        )

    works, seconds = [], []
    for smaller in smaller_versions(settings):
        probe = step(smaller)
        probe()
        works.append(work_of(smaller, cuda=cuda))
        seconds.append(statistics.median(probe.timed(steps)))
        del probe
    expected = fit_speeds(works, seconds).seconds(work_of(settings, cuda=cuda))
    result = measure(step(settings), steps)
    peak = hardware.peak_for(settings.precision, settings.compute.matmul_precision)
    useful = flops_per_token(settings.model, settings.lora, settings.length).total * settings.tokens_per_step
    return Comparison(
        (parameters, peak_bytes, flops, expected),
        (result.parameters, result.peak_bytes, result.flops, result.step_seconds),
        useful / result.step_seconds / (peak * 1e12) if peak else None,
        result.seconds,
    )


def smaller_versions(settings: RunSettings) -> list[RunSettings]:
    """Four versions: half the layers, half the sequences, half the context, all three halved. One micro-batch each.

    Of a custom model: half the sequences, half the context, both, and a quarter of the context.
    """
    sequences = max(1, settings.sequences // 2)
    length, short = settings.sequence_length, max(1, settings.sequence_length // 2)

    def smaller(n_layer: int, length: int, size: int) -> RunSettings:
        model = with_layers(settings.gpt, range(n_layer))
        return replace(settings, model=model, length=length, micro_batch=size, global_batch=size)

    if isinstance(settings.model, OwnModel):
        kinds = ((length, sequences), (short, settings.sequences), (short, sequences), (max(1, short // 2), settings.sequences))
        return [replace(settings, length=tokens, micro_batch=size, global_batch=size) for tokens, size in kinds]
    n_layer, size = settings.gpt.n_layer, settings.sequences
    layers = max(1, n_layer // 2)
    changes = (
        (layers, length, size),
        (n_layer, length, sequences),
        (n_layer, short, size),
        (layers, short, sequences),
    )
    return [smaller(*change) for change in changes]
