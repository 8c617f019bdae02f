"""Two ranks save distributed tensors with torch.distributed.checkpoint, and one process reads them."""

import pytest
import torch
from launch import run_ranks

from lit_llm.checkpoint.dcp_folder import DcpFolder

RANKS = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from launch import report

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
wholes = {"rows": torch.arange(35.0).view(7, 5), "columns": torch.arange(15.0).view(3, 5)}
wholes |= {"few": torch.ones(1, 4), "same": torch.ones(3)}
places = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "same": Replicate()}
dcp.save({"model": {name: distribute_tensor(wholes[name], mesh, [places[name]]) for name in wholes}}, checkpoint_id="dcp")
report(**wholes)
"""


@pytest.mark.slow
def test_tensors_that_two_ranks_have_saved_are_put_together(tmp_path):
    wholes, _ = run_ranks(RANKS, 2, tmp_path)
    read = DcpFolder(tmp_path / "dcp")
    assert read.files.keys() == {f"model.{name}" for name in wholes}
    assert all(torch.equal(read[f"model.{name}"], whole) for name, whole in wholes.items())
