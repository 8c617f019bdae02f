"""Callbacks that measure a training: memory and traffic, compiled graphs, host synchronisations, speed against a plain loop."""

from __future__ import annotations

import bisect
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lit_llm.callbacks._lightning import is_logged
from lit_llm.callbacks._torch import gathered
from lit_llm.core.hardware import this_machine
from lit_llm.core.measured_speed import matmul_tflops
from lit_llm.distributed.block_kernels import compile_blocks
from lit_llm.distributed.traffic import Traffic
from lit_llm.models.gpt import GPT
from lit_llm.models.loss import cross_entropy
from lit_llm.models.router import Router
from lit_llm.optim import parameter_groups
from lit_llm.plan import peak_memory
from lit_llm.plan.collectives import communicated_bytes
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.measured_run import settings_values
from lit_llm.plan.plan_monitor import settings_of_trainer
from lit_llm.training.language_model import LanguageModel

STEP = "a step that is measured"
FEW = 2
"""Number of steps before the first measured step, in which the optimizer's state is created and the model is compiled."""


class Watch(Callback):
    """Base class of callbacks that measure the training within their `with` block, and store the results in `figures`."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def __enter__(self) -> None: ...

    def __exit__(self, error: object, *_: object) -> None: ...


def _in_turn(k: int, scores: Tensor) -> Tensor:
    """Return the numbers of `k` experts for each token, (N, k), in ascending order. Experts take turns; of `scores`, (N, E),
    only the shape is used."""
    tokens, experts = scores.shape
    places = torch.arange(tokens * k, device=scores.device).view(tokens, k)
    return (places % experts).sort(dim=1).values


class PlanWatch(Watch):
    """Watch of the largest peak memory and the most sent bytes of any rank. It compares both with the plan's figures.

    Sent bytes are counted in the first measured step, memory in the steps after it. On a GPU, torch's allocator counts memory.
    On a CPU, memory is computed from the tensors at the start of a step and the profiler's log of allocations, and the lowest
    peak of all steps counts, because gloo's threads may free sent tensors late.

    The plan assumes that each expert gets equally many tokens, so this class makes routers assign experts to tokens in turn.
    """

    def __enter__(self) -> None:
        log = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._log: Any = nullcontext() if torch.cuda.is_available() else log
        gc.collect()
        self._old = _storages()  # references keep earlier storages alive, so that no new storage gets the same address
        self._log.__enter__()  # the log has no releases of earlier allocations
        self._live: list[dict[int, int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, Router):
                module.choose = partial(_in_turn, module.config.top_k)  # type: ignore[method-assign]
        settings, cuda = settings_of_trainer(trainer, pl_module), pl_module.device.type == "cuda"
        sent = sum(communicated_bytes(settings, cuda=cuda).values())
        self._planned = {"memory": peak_memory(settings, cuda=cuda).total, "traffic": sent}
        mesh = getattr(trainer.strategy, "device_mesh", None)
        self._traffic, self._begun = Traffic(*[] if mesh is None else [mesh]), -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step, is_first = trainer.global_step, trainer.global_step != self._begun  # is_first: the step's first micro-batch
        self._begun = step
        if is_first and step == FEW:
            self._traffic.__enter__()
        elif is_first and step > FEW:
            if pl_module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            # DDP's buckets and all gradients are included: arguments under a dispatch mode are Python objects.
            live = {address: storage.nbytes() for address, storage in _storages().items() if address not in self._old}
            self._live.append(live)
            with record_function(STEP):
                pass

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._begun == FEW and trainer.global_step == FEW + 1:
            self._traffic.__exit__(None, None, None)

    def __exit__(self, error: object, *_: object) -> None:
        self._log.__exit__(None, None, None)
        if error is not None:
            return
        on_gpu = not isinstance(self._log, profile)
        peak = torch.cuda.max_memory_allocated() if on_gpu else min(peaks_of_steps(self._log, self._live), default=0)
        mine = {"memory": peak, "traffic": self._traffic.sent(), "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0}
        every = gathered(mine)
        most = {key: max(each[key] for each in every) for key in mine}
        self.figures = {what: {"planned": self._planned[what], "measured": most[what]} for what in self._planned}
        self.figures["memory"]["reserved"] = most["reserved"]
        self.figures["traffic"] |= {f"{row.dimension}/{row.kind}": row.sent for row in self._traffic.rows()}


def _storages() -> dict[int, torch.UntypedStorage]:
    """Return {address: storage} of all CPU tensors that Python's garbage collector knows."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]  # also a DTensor's part
    return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each.device.type == "cpu"}


def peaks_of_steps(log: profile, lives: list[dict[int, int]]) -> list[int]:
    """Return the peak bytes of each step that STEP marks in `log`.

    `lives`: for each step, {address: bytes} of the storages that live at its start. The function changes these dicts.

    Memory that gloo allocates inside a collective is not counted, because only gloo uses it. The log has no releases by gloo's
    threads: memory that they free counts until its address is used again, or the step ends.
    """
    changes: list[tuple[int, int, int]] = []
    begins, todo = list[int](), list(log.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while todo:
        event = todo.pop()
        if event.name.startswith(("c10d::", "gloo:")):
            continue
        if event.name == STEP:
            begins.append(event.start_time_ns)
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        todo.extend(event.children)
    begins.sort()
    totals = [sum(live.values()) for live in lives]
    peaks = list(totals)
    for at, address, change in sorted(changes):
        if (step := bisect.bisect(begins, at) - 1) < 0:
            continue
        totals[step] -= lives[step].pop(address, 0)
        if change > 0:
            lives[step][address] = change
            totals[step] += change
        peaks[step] = max(peaks[step], totals[step])
    return peaks


class GraphsWatch(Watch):
    """Watch that generates text after each validation, so that compiled code runs with many lengths, some above block size."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        pl_module.generate_text("line 1", max_new_tokens=40)


class WaitsWatch(Watch):
    """Watch that collects the lines of code that make the host wait for a GPU, in steps after step FEW that are not logged."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings(record=True)
        self._said = self._caught.__enter__()
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        torch.cuda.set_sync_debug_mode(0 if step <= FEW or is_logged(trainer, step) else 1)

    def __exit__(self, error: object, *_: object) -> None:
        torch.cuda.set_sync_debug_mode(0)
        self._caught.__exit__(None, None, None)
        self.figures = {"waits": [f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in self._said]}


class SpeedWatch(Watch):
    """Watch that, after each Trainer step, times one step of a plain PyTorch loop with a second model of the same settings.

    Steps of Trainer and plain loop alternate, so that other load on the machine affects both equally.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settings = settings_of_trainer(trainer, pl_module)
        torch.manual_seed(0)
        self._model = GPT(self._settings.gpt).to(pl_module.device)
        if self._settings.compute.compile:
            compile_blocks(self._model, pl_module.device)
        self._optimizer = torch.optim.AdamW(parameter_groups(self._model), lr=1e-4, fused=True)
        half = partial(torch.autocast, pl_module.device.type, dtype=torch.bfloat16, cache_enabled=False)
        self._autocast: Callable[[], Any] = half if self._settings.precision == "bf16-mixed" else nullcontext
        self._times: list[tuple[float, float]] = []
        batches, begin = iter(trainer.datamodule.train_dataloader()), time.perf_counter()  # type: ignore[attr-defined]
        for _ in range(self._settings.accumulation):
            next(batches)
        self._loading = time.perf_counter() - begin
        self._from = self._now(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        ours = self._now(pl_module) - self._from
        begin = time.perf_counter()
        self._plain(batch)
        self._times.append((ours, self._now(pl_module) - begin))
        self._from = time.perf_counter()

    def _plain(self, batch: dict[str, torch.Tensor]) -> None:
        with self._autocast():
            sums = self._model(batch["input_ids"], batch["targets"], loss=cross_entropy)
            loss = sums.loss / batch["targets"].numel()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    @staticmethod
    def _now(module: LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        times = self._times[len(self._times) // 3 :]
        seconds, plain = (statistics.median(each) for each in zip(*times, strict=True))
        settings, hardware = self._settings, this_machine(measure=False, device=pl_module.device)
        peak = hardware.peak_for(settings.precision, settings.compute.matmul_precision)
        peak = peak or matmul_tflops(pl_module.device, torch.float32)  # nobody publishes a CPU's peak
        flops = flops_per_token(settings.model, settings.lora, settings.block_size).total
        tokens = settings.tokens_per_step / seconds
        measured = {"step_seconds": seconds, "rows": len(times)}
        speed = {"settings": settings_values(settings), "hardware": vars(hardware), "measured": measured}
        speeds = {"plain_seconds": plain, "tokens_per_second": tokens, "mfu": tokens * flops / (peak * 1e12), "speed": speed}
        ratio = statistics.median(ours / other for ours, other in times)
        self.figures = {"step_by_plain_step": ratio, "loading_by_step": self._loading / seconds, "speeds": speeds}


WATCHES: dict[str, type[Watch]] = {"plan": PlanWatch, "graphs": GraphsWatch, "waits": WaitsWatch, "speed": SpeedWatch}
