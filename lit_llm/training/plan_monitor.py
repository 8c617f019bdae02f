"""Compares the plan of a run with measurements during `fit`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_llm._lightning import ddp_option
from lit_llm.callbacks._lightning import accumulates
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.errors import UserError
from lit_llm.plan.custom_config import custom_config
from lit_llm.plan.memory import Layout, memory_per_rank
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.plan import ASSUMED_MFU
from lit_llm.plan.settings import canonical_precision
from lit_llm.training.language_model import LanguageModel


class PlanMonitor(Callback):
    """Predicts peak memory when training starts, logs it, and reports once how the measurement differs.

    The measurement is the peak of CUDA's allocator on this rank. On a CPU, only the process's resident memory is known
    (`memory/peak_gb`). It includes libraries, buffers and freed pages, and was 0.98 to 1.94 times the tensors' peak in six
    runs, so it is not compared. Runs that the planner does not support (torch.compile, float8, other strategies) get no
    prediction.

    Logs at logged steps from the second step on: `plan/peak_gb` (predicted); on CUDA `plan/memory_ratio` (measured /
    predicted); `plan/mfu_ratio` (`throughput/mfu` / planned MFU), if `throughput/mfu` is logged. Warns if the first ratio is
    beyond `tolerance`.

    Contract:
        on_train_start: predicts.
        on_train_batch_end: writes the row, without a device synchronisation.
        State: none.

    Args:
        mfu: the planned MFU (`plan --mfu`). None: 0.4, an assumption.
        tolerance: relative difference that causes a warning.

    Raises:
        UserError: if an argument is out of range.
    """

    def __init__(self, mfu: float | None = None, tolerance: float = 0.1) -> None:
        if mfu is not None and not 0 < mfu <= 1:
            raise UserError(f"mfu is {mfu}, but must be in (0, 1] (--plan.mfu).")
        if not tolerance > 0:
            raise UserError(f"tolerance is {tolerance}, but must be above 0 (--plan.tolerance).")
        self.mfu, self.tolerance = mfu, tolerance
        self.predicted_bytes: int | None = None
        self._reported: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predicted_bytes, self._reported = None, set()
        try:
            self.predicted_bytes = predicted_bytes(trainer, pl_module)
        except UserError as reason:
            rank_zero_info(f"plan: peak memory is not predicted for this run ({reason}).")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.predicted_bytes is None or step < 2 or step % every or accumulates(trainer):
            return
        row = {"plan/peak_gb": self.predicted_bytes / 1e9}
        device = trainer.strategy.root_device
        if device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(device)
            row["plan/memory_ratio"] = measured / self.predicted_bytes
            self._compare("peak memory", "GB", self.predicted_bytes / 1e9, measured / 1e9, "")
        mfu = trainer.callback_metrics.get("throughput/mfu")
        if mfu is not None:
            planned = self.mfu or ASSUMED_MFU
            row["plan/mfu_ratio"] = float(mfu) / planned
            self._compare("MFU", "", planned, float(mfu), " (assumed: set --plan.mfu)" if self.mfu is None else "")
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)

    def _compare(self, what: str, unit: str, predicted: float, measured: float, origin: str) -> None:
        """Report once how a measurement differs from the plan, as a warning beyond `tolerance`."""
        if what in self._reported:
            return
        self._reported.add(what)
        off = measured / predicted - 1
        text = f"plan: {what} {measured:.3g}{unit and ' ' + unit} measured, {predicted:.3g} planned{origin}: {off:+.1%}"
        if abs(off) > self.tolerance:
            rank_zero_warn(f"{text}, beyond {self.tolerance:.0%}.")
        else:
            rank_zero_info(text)


def predicted_bytes(trainer: Trainer, module: LightningModule) -> int:
    """The planner's peak memory of this rank, for the run that is about to start.

    Raises:
        UserError: if the planner does not support the module, the data or the strategy.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    for part, supported in ((module, LanguageModel), (data, TokenDataModule)):
        if not isinstance(part, supported):
            raise UserError(f"the planner supports {supported.__name__}, not {type(part).__name__}")
    assert isinstance(module, LanguageModel)
    compute = module.compute_config
    if compute.compile or compute.float8:
        raise UserError("the planner does not support compute.compile or compute.float8")
    layout = layout_of_trainer(trainer)
    group = trainer.optimizers[0].param_groups
    fused = all(g.get("fused") for g in group)
    sequences = data.micro_batch_size or data.global_batch_size // layout.data_parallel
    memory = memory_per_rank(
        custom_config(module.config, module.architecture),
        sequences=sequences,
        length=data.block_size,
        accumulation=trainer.accumulate_grad_batches,
        precision=canonical_precision(trainer.precision),
        optimizer=Optimizer(
            type(trainer.optimizers[0]).__name__,
            momentum=bool(group[0].get("momentum")),
            fused=fused,
            ns_dtype=next((g["ns_dtype"] for g in group if "ns_dtype" in g), "auto"),
        ),
        layout=layout,
        chunk_size=module.loss_config.chunk_size,
        z_loss=bool(module.loss_config.z_loss),
        checkpointing=str(compute.activation_checkpointing),
        cuda=trainer.strategy.root_device.type == "cuda",
        lora=module.lora,
    )
    if not memory.is_known:
        raise UserError("; ".join(memory.notes))
    return memory.total


def layout_of_trainer(trainer: Trainer) -> Layout:
    """The parallel layout of a Trainer.

    Raises:
        UserError: if the planner does not support the strategy.
    """
    strategy, world_size = trainer.strategy, trainer.world_size
    if isinstance(strategy, MeshStrategy):
        sizes = strategy.sizes(world_size)
        return Layout(
            "mesh",
            sizes.replicate,
            sizes.shard,
            sizes.tensor_parallel,
            shards="parameters" if sizes.shard * sizes.context > 1 else "nothing",
            reshard=not strategy.kept.weights,
            reduce_once=strategy.kept.gradients,
            prefetch=strategy.prefetch,
            cpu_offload=strategy.cpu_offload,
            context=sizes.context,
            context_attention=strategy.context_attention,
            pipeline=strategy.pipeline_layout,
        )
    if isinstance(strategy, DDPStrategy):
        view = ddp_option(strategy, "gradient_as_bucket_view")
        return Layout("ddp", replicate=world_size, bucket_copies=not view)
    if isinstance(strategy, SingleDeviceStrategy):
        return Layout()
    raise UserError(f"the planner does not support {type(strategy).__name__}")
