"""Messages of callbacks are printed, Lightning's own are not."""

import logging
import subprocess
import sys
import warnings

import fork_server
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lit_llm.training.filter_warnings import filter_warnings


def test_callbacks_are_heard_and_lightning_is_not():
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        filter_warnings()
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)  # "GPU available: False, used: False"
        rank_zero_info("plan: peak memory 1.02 GB measured, 1 GB planned")
    finally:
        logger.removeHandler(handler)
    assert said == ["plan: peak memory 1.02 GB measured, 1 GB planned"]


def test_torchs_advice_about_buffers_is_not_printed_by_every_rank():
    """strategy/ddp sets broadcast_buffers; what torch offers instead does another thing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            filter_warnings()
            DistributedDataParallel(torch.nn.Linear(1, 1), broadcast_buffers=False)
    finally:
        dist.destroy_process_group()
    assert [str(warning.message) for warning in caught if "broadcast_buffers" in str(warning.message)] == []


PROJECT = """
import warnings
from lightning.pytorch import Callback

class Warns(Callback):
    def on_train_start(self, *_):
        warnings.warn("of a project", stacklevel=1)
"""


def test_a_command_prints_a_warning_of_lit_llm_as_one_line_and_others_as_python_does(folder):
    (folder / "project.py").write_text(PROJECT)
    (folder / "warns.yaml").write_text("trainer:\n  callbacks+:\n  - class_path: project.Warns\n")
    words = [sys.executable, "-m", "lit_llm", "fit", "--config", "tiny.yaml", "--config", "warns.yaml"]
    words += ["--sharded_checkpoints", "true", "--trainer.max_steps", "2", "--trainer.limit_val_batches", "0"]
    done = fork_server.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "warning: sharded_checkpoints changes nothing here: only MeshStrategy can write shards (strategy/fsdp2).",
        f"{folder / 'project.py'}:7: UserWarning: of a project",
        '  warnings.warn("of a project", stacklevel=1)',
    ]
