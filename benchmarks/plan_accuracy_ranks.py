"""Planned peak memory of one rank against the allocator's log, on two gloo processes of a CPU.

    for layout in ddp ddp-views fsdp2 fsdp2-kept tp pp pp-gpipe pp-interleaved pp-zbv cp; do
        OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 benchmarks/plan_accuracy_ranks.py $layout 32-true
    done

DDP allocates its buckets before the log starts, so their size is added to the measured peak.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.profiler import ProfilerActivity, profile

from lit_llm.data import TextFiles
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.calibration import highest
from lit_llm.training.language_model import LanguageModel
from lit_llm.training.plan_monitor import PlanMonitor

LAYOUTS: dict[str, Any] = {
    "ddp": DDPStrategy,
    "ddp-views": partial(DDPStrategy, gradient_as_bucket_view=True),
    "fsdp2": MeshStrategy,
    "fsdp2-kept": partial(MeshStrategy, reshard_after_forward=False),
    "tp": partial(MeshStrategy, shard=1, tensor_parallel=2),
    "pp": partial(MeshStrategy, shard=1, pipeline=2),
    "pp-gpipe": partial(MeshStrategy, shard=1, pipeline=2, schedule="gpipe"),
    "pp-interleaved": partial(MeshStrategy, shard=1, pipeline=2, schedule="interleaved1f1b"),
    "pp-zbv": partial(MeshStrategy, shard=1, pipeline=2, schedule="zbv"),
    "cp": partial(MeshStrategy, shard=1, context=2),
}


class Log(Callback):
    """The allocator's log of optimizer steps 3 and 4. Step 3 starts without old gradients, step 4 with them."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * trainer.accumulate_grad_batches:  # type: ignore[attr-defined]
            optimizer = trainer.optimizers[0]
            optimizer.zero_grad()
            state = [t for values in optimizer.state.values() for t in values.values() if torch.is_tensor(t)]
            self.stays = sum(_bytes(t) for t in [*pl_module.parameters(), *state])
            if isinstance(trainer.strategy, DDPStrategy):
                self.stays += sum(_bytes(p) for p in pl_module.parameters())
            self.log_ = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.log_.__enter__()
        elif batch_idx == 4 * trainer.accumulate_grad_batches:  # type: ignore[attr-defined]
            self.log_.__exit__(None, None, None)
            self.peak = self.stays + highest(self.log_)


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def main(layout: str, precision: str) -> None:
    watch, log = PlanMonitor(), Log()
    text = Path(tempfile.gettempdir()) / "plan-accuracy.txt"
    text.write_text("a line of text, and another one\n" * 3000)
    ranks = 1 if layout in ("tp", "cp") or layout.startswith("pp") else 2
    micro_batches = 4 if layout.startswith("pp") else 1
    data = TextFiles(paths=str(text), micro_batch_size=2, global_batch_size=2 * ranks * micro_batches, block_size=128)
    config = GPTConfig(n_layer=6, n_head=4, n_embd=256, block_size=128, vocab_size=2048)
    trainer = Trainer(
        max_steps=6,
        callbacks=[watch, log],
        accelerator="cpu",
        devices=2,
        strategy=LAYOUTS[layout](),
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(LanguageModel(config, partial(torch.optim.AdamW, fused=True)), datamodule=data)
    planned, peaks = watch.predicted_bytes or 0, [0] * 2
    dist.all_gather_object(peaks, log.peak)
    if trainer.is_global_zero:
        most = max(peaks)
        print(
            f"{layout}, {precision}: {planned / 1e6:.1f} MB planned, {most / 1e6:.1f} measured: {planned / most:.4f}, {peaks}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:3])
