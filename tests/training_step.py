"""A recipe's optimizer step on one device, and its planned size: parameters, peak memory, FLOPs by torch's counter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lit_llm.callbacks.gradient_norm_and_clipping import scale_, total_norm
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.lora import LoRAConfig, apply_lora
from lit_llm.models.loss import LossConfig, LossSums, chunked_cross_entropy, cross_entropy, cross_entropy_of_logits
from lit_llm.models.own_flops import FLOPS
from lit_llm.optim import optimizer_of
from lit_llm.plan.memory import peak_memory
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.optimizer import MuonWork
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.weights import OwnModel, PlannedModel, total_parameters, weights_of


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
                loss = self.sums(ids, targets).loss / (targets.numel() * self.accumulation)
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

    def sums(self, ids: torch.Tensor, targets: torch.Tensor) -> LossSums:
        return self.model(ids, targets, loss=self.loss)

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


def predict(settings: PlannedRun, *, cuda: bool) -> tuple[int, int, float]:
    """Parameters, peak bytes and executed FLOPs of a step on one device."""
    memory = peak_memory(settings, cuda=cuda)
    flops = float(one_micro_batch(settings, cuda=cuda).flops * settings.accumulation)
    if settings.optimizer.is_muon:
        work = MuonWork.of(weights_of(settings.model, settings.lora))
        flops += work.flops(settings.optimizer.newton_schulz_bytes(cuda=cuda))
    return total_parameters(settings.model, settings.lora), memory.total, flops
