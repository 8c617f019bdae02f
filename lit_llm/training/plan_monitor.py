"""What was planned against what happens, while `fit` runs."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_llm._lightning import ddp_option
from lit_llm.callbacks._lightning import accumulates
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.errors import UserError
from lit_llm.plan.memory import Layout, memory_per_rank
from lit_llm.plan.optimizer import Optimizer
from lit_llm.plan.parameters import ModelShape
from lit_llm.plan.plan import ASSUMED_MFU
from lit_llm.plan.settings import canonical_precision


class PlanMonitor(Callback):
    """Predicts peak memory when training starts, and says once, and in every row, how what is measured compares with it.

    Measured is what CUDA's allocator had out at most on this rank. On a CPU there is only the process's resident memory
    (`memory/peak_gb`), which holds libraries, buffers and freed pages beside tensors (0.98 to 1.94 times the tensors' peak in
    six runs): it is shown beside the prediction and not judged. A run that cannot be planned (torch.compile, float8, strategies
    the planner does not know) is left alone.

    Logs at logged steps from the second step on: `plan/peak_gb` (predicted); on CUDA `plan/memory_ratio`, measured over
    predicted; `plan/mfu_ratio`, `throughput/mfu` over the planned one, where the former exists. Both ratios are warned of
    once, beyond `tolerance`.

    Contract:
        on_train_start: predicts.
        on_train_batch_end: writes the row; nothing is read from the device.
        State: none.

    Args:
        mfu: what the run was planned with (`plan --mfu`); null: 0.4, which is an assumption.
        tolerance: relative difference beyond which is warned.

    Raises:
        UserError: an argument out of range.
    """

    def __init__(self, mfu: float | None = None, tolerance: float = 0.1) -> None:
        if mfu is not None and not 0 < mfu <= 1:
            raise UserError(f"mfu is {mfu}, a share of the peak lies in (0, 1] (--plan.mfu).")
        if not tolerance > 0:
            raise UserError(f"tolerance is {tolerance}, it must be above 0 (--plan.tolerance).")
        self.mfu, self.tolerance = mfu, tolerance
        self.predicted_bytes: int | None = None
        self._told: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predicted_bytes, self._told = None, set()
        try:
            self.predicted_bytes = predicted_bytes(trainer, pl_module)
        except (UserError, AttributeError) as reason:  # a module, data or strategy that the planner does not know
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
            self._judge("peak memory", "GB", self.predicted_bytes / 1e9, measured / 1e9, "")
        mfu = trainer.callback_metrics.get("throughput/mfu")
        if mfu is not None:
            planned = self.mfu or ASSUMED_MFU
            row["plan/mfu_ratio"] = float(mfu) / planned
            self._judge("MFU", "", planned, float(mfu), " (assumed: --plan.mfu says better)" if self.mfu is None else "")
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)

    def _judge(self, what: str, unit: str, predicted: float, measured: float, origin: str) -> None:
        """Say once how a measurement compares with the plan; a warning where they are further apart than `tolerance`."""
        if what in self._told:
            return
        self._told.add(what)
        off = measured / predicted - 1
        text = f"plan: {what} {measured:.3g}{unit and ' ' + unit} measured, {predicted:.3g} planned{origin}: {off:+.1%}"
        if abs(off) > self.tolerance:
            rank_zero_warn(f"{text}, beyond {self.tolerance:.0%}.")
        else:
            rank_zero_info(text)


def predicted_bytes(trainer: Trainer, module: Any) -> int:
    """Peak memory of this rank by the planner, from what is about to train.

    Raises:
        UserError: something the planner does not know.
        AttributeError: a module or data module of another kind than `lit_llm`'s.
    """
    compute: ComputeConfig = module.compute_config
    if compute.compile or compute.float8:
        raise UserError("compiled and float8 blocks keep other tensors")
    if module.architecture is not None:
        raise UserError(f"{module.architecture.class_path} is not known to the planner")
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    layout = layout_of(trainer)
    group = trainer.optimizers[0].param_groups
    fused = all(g.get("fused") for g in group)
    sequences = data.micro_batch_size or data.global_batch_size // layout.data_parallel
    return memory_per_rank(
        ModelShape.of(module.config, block_size=data.block_size),
        sequences=sequences,
        accumulation=trainer.accumulate_grad_batches,
        precision=canonical_precision(trainer.precision),
        optimizer=Optimizer(
            type(trainer.optimizers[0]).__name__,
            momentum=bool(group[0].get("momentum")),
            fused=fused,
            ns_dtype=next((g["ns_dtype"] for g in group if "ns_dtype" in g), "auto"),
        ),
        layout=layout,
        chunk_size=module.loss_function.keywords.get("chunk_size"),
        z_loss=bool(module.loss_function.keywords.get("z_loss")),
        checkpointing=str(compute.activation_checkpointing),
        cuda=trainer.strategy.root_device.type == "cuda",
    ).total


def layout_of(trainer: Trainer) -> Layout:
    """How a live Trainer's ranks share the work.

    Raises:
        UserError: a strategy the planner does not know.
    """
    strategy, world_size = trainer.strategy, trainer.world_size
    if isinstance(strategy, MeshStrategy):
        replicate, shard, tensor_parallel = strategy.sizes(world_size)
        return Layout(
            "mesh",
            replicate,
            shard,
            tensor_parallel,
            shards="parameters" if shard > 1 else "nothing",
            reshard=strategy.reshard_after_forward,
            prefetch=strategy.prefetch,
            cpu_offload=strategy.cpu_offload,
        )
    if isinstance(strategy, DDPStrategy):
        view = ddp_option(strategy, "gradient_as_bucket_view")
        return Layout("ddp", replicate=world_size, bucket_copies=not view)
    if isinstance(strategy, SingleDeviceStrategy):
        return Layout()
    raise UserError(f"{type(strategy).__name__} is not known to the planner")
