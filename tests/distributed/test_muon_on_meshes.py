"""MuonAdamW on meshes of all or some ranks: each mesh divides its matrices, and steps equal those of one process."""

import pytest
import torch
from launch import run_ranks
from torch import nn

from lit_llm.optim import MuonAdamW

SHAPE = (6, 10)
STEPS = 3

SCRIPT = """
import torch, torch.distributed as dist
from launch import report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from lit_llm.optim import MuonAdamW, muon
from test_muon_on_meshes import SHAPE, STEPS, gradient, start

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
computed = []
newton_schulz = muon.newton_schulz

def counting(x, **options):
    computed.append(x.size(0))
    return newton_schulz(x, **options)

muon.newton_schulz = counting
cases = {
    "replicas of shards": (mesh, [Replicate(), Shard(0)], 5, 0),
    # Ranks 0 and 1 train other parameters, and more of them, than ranks 2 and 3.
    "shards of half of the ranks": (mesh["shard"], [Shard(0)], 3 + 2 * mesh.get_local_rank("replicate"), dist.get_rank() // 2),
}
found = {}
for name, (devices, placements, count, seed) in cases.items():
    computed.clear()
    parameters = [nn.Parameter(distribute_tensor(start(i, seed), devices, placements)) for i in range(count)]
    optimizer = MuonAdamW(parameters, ns_dtype="float32")
    for step in range(STEPS):
        for i, p in enumerate(parameters):
            p.grad = distribute_tensor(gradient(i, seed, step), devices, placements)
        optimizer.step()
    found[name] = {"computed": sum(computed), "parameters": [p.detach().full_tensor() for p in parameters]}
report(**found)
"""


def start(i: int, seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * seed + i))


def gradient(i: int, seed: int, step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1000 * (step + 1) + 100 * seed + i))


def on_one_process(count: int, seed: int) -> list[torch.Tensor]:
    parameters = [nn.Parameter(start(i, seed)) for i in range(count)]
    optimizer = MuonAdamW(parameters, ns_dtype="float32")
    for step in range(STEPS):
        for i, p in enumerate(parameters):
            p.grad = gradient(i, seed, step)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon-on-meshes")
    return run_ranks(SCRIPT, 4, folder)


@pytest.mark.parametrize(
    ("case", "counts", "matrices_of_rank"),
    [
        ("replicas of shards", [5, 5, 5, 5], [2, 2, 1, 0]),  # 5 matrices in shares of 2
        ("shards of half of the ranks", [3, 3, 5, 5], [2, 1, 3, 2]),  # 3 in shares of 2; 5 in shares of 3
    ],
)
def test_each_rank_of_a_mesh_orthogonalises_its_share_and_steps_equal_one_process(reports, case, counts, matrices_of_rank):
    assert [each[case]["computed"] for each in reports] == [STEPS * n for n in matrices_of_rank]
    for rank, (report, count) in enumerate(zip(reports, counts, strict=True)):
        seed = 0 if case == "replicas of shards" else rank // 2
        for found, expected in zip(report[case]["parameters"], on_one_process(count, seed), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
