"""Reports the weights of every rank after one step at learning rate 0 with `init_from`. argv[1]: a JSON dict of layouts."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from launch import report
from layouts import train
from lightning.pytorch import Trainer

from lit_llm.checkpoint.compatibility import saved_model_config
from lit_llm.checkpoint.disk_format import read
from lit_llm.data import Bytes, TextFiles
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.training.language_model import LanguageModel


def held(start: Path, strategy: str | dict[str, Any], ranks: int) -> dict[str, Any]:
    """The whole parameters, and the number of their values on this rank."""
    config = saved_model_config(read(start), start, "--init_from")
    data = TextFiles(paths="text.txt", tokenizer=Bytes(), global_batch_size=4, micro_batch_size=1, block_size=16)
    module = LanguageModel(config, lambda groups: torch.optim.SGD(groups, lr=0.0), init_from=start)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=MeshStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=data)
    assert module.model is not None
    own = dict(module.model.named_parameters())
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in own.items()}  # type: ignore[operator]
    local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in own.values())  # type: ignore[operator]
    return {"whole": whole, "local": local}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = int(os.environ["WORLD_SIZE"])
    layouts: dict[str, Any] = json.loads(sys.argv[1])
    results = {name: held(Path("start.ckpt"), layout, world) for name, layout in layouts.items()}
    # From parts written by two shards, to matrices split over two tensor-parallel ranks.
    trained = train(Path.cwd(), strategy={"shard": 2}, ranks=world, steps=1, to="saved", sharded=True, parameters=True)
    (saved,) = (path for path in Path("saved").glob("step-*.ckpt"))
    assert len(list(saved.glob("shard-*.pt"))) == 2
    again = {name: held(saved, layout, world) for name, layout in layouts.items() if layout != "ddp"}
    report(results=results, trained=trained["parameters"], again=again)
