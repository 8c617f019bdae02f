"""MuonAdamW on meshes of 4 ranks: every matrix has one owner, and steps have the bits of one process."""

import math
from collections import Counter

import pytest
import torch
from launch import run_ranks
from torch import nn

from lit_llm.optim import MuonAdamW
from lit_llm.optim.torch_muon import TorchMuon

# Tall, wide, square, smaller than the ranks, and odd, so that parts are uneven and some ranks have none.
SHAPES = [(6, 10), (10, 6), (8, 8), (3, 9), (9, 3), (1, 5), (33, 77), (6, 10)]
EVEN = [(8, 16), (16, 8), (8, 8), (16, 16), (8, 8)]  # all parts are equal on up to 4 x 4 ranks
STEPS = 3
SKIPPED = 1
OPTIONS = {
    "float32": (torch.float32, {"ns_dtype": "float32"}),
    "bfloat16": (torch.bfloat16, {"ns_dtype": "bfloat16", "nesterov": False}),
    "normuon": (torch.float32, {"ns_dtype": "float32", "normuon_beta2": 0.9, "ns_method": "polar_express"}),
    "normuon in bf16": (torch.bfloat16, {"ns_dtype": "bfloat16", "normuon_beta2": 0.9}),
    "torch": (torch.float32, {}),
    "float64, iterating in bf16": (torch.float64, {"ns_dtype": "bfloat16", "adjust_lr": "match_rms_adamw"}),
}

SCRIPT = """
import torch, torch.distributed as dist
from launch import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from lit_llm.core._torch import box_at
from lit_llm.distributed.traffic import Traffic
from lit_llm.optim import muon
from test_muon_on_meshes import EVEN, OPTIONS, SHAPES, train

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
line = init_device_mesh("cpu", (4,))
alone = init_device_mesh("cpu", (4, 1))
cube = init_device_mesh("cpu", (2, 1, 2))
columns, rows, replicas = Shard(1), Shard(0), Replicate()
half = 3 + 2 * mesh.get_local_rank("outer")
layouts = {  # mesh, placements of the matrices in turn, shapes
    "fsdp": (line, [[rows]], SHAPES),
    "tensor parallel": (line, [[rows], [columns]], SHAPES),
    "hsdp": (mesh, [[replicas, rows]], SHAPES),
    "replicas": (alone, [[replicas, rows]], SHAPES),
    "replicas of replicas": (mesh, [[replicas, replicas]], SHAPES),
    "fsdp and tensor parallel": (mesh, [[rows, columns], [_StridedShard(0, split_factor=2), rows]], [*EVEN, (6, 10), (9, 3)]),
    "shards replicated inside": (mesh, [[rows, replicas], [replicas, columns]], SHAPES),
    "hsdp and tensor parallel": (cube, [[replicas, rows, columns]], SHAPES),
    "even fsdp": (line, [[rows]], EVEN),
    "even hsdp": (mesh, [[replicas, rows]], EVEN),
    "even replicas": (alone, [[replicas, rows]], EVEN),
    "even fsdp and tensor parallel": (mesh, [[rows, columns]], EVEN),
    # Ranks 0 and 1 train other matrices, and fewer of them, than ranks 2 and 3.
    "stages": (mesh["inner"], [[rows]], SHAPES[:half]),
}
computed = []
newton_schulz = muon.newton_schulz

def computing(x, **options):
    computed.append(tuple(x.shape))
    return newton_schulz(x, **options)

muon.newton_schulz = computing
found = {}
for name, (devices, placements, shapes) in layouts.items():
    def distribute(i, whole):
        where = placements[i % len(placements)]
        size, (top, left) = box_at(tuple(whole.shape), tuple(devices.shape), devices.get_coordinate(), tuple(where))
        part = whole[top : top + size[0], left : left + size[1]].contiguous()
        return DTensor.from_local(part, devices, where, run_check=False, shape=whole.shape, stride=whole.stride())
    for kind in OPTIONS:
        computed.clear()
        with Traffic(devices) as traffic:
            parameters, states = train(shapes, kind, distribute)
        found[f"{name} / {kind}"] = {
            "computed": list(computed),
            "sent": {kind: traffic.sent(kind=kind) for kind in ("all_to_all", "broadcast", "all_reduce", None)},
            "parameters": [p.detach().full_tensor() for p in parameters],
            "states": [s.full_tensor() if isinstance(s, DTensor) else s for s in states],
        }
report(**found)
"""


def train(shapes, kind, distribute=lambda i, whole: whole):
    """Three steps, of which one is skipped. Another parameter is frozen, and the second has no gradient in the last step."""
    dtype, options = OPTIONS[kind]

    def draw(i, seed):
        return distribute(i, torch.randn(shapes[i], generator=torch.Generator().manual_seed(100 * seed + i)).to(dtype))

    parameters = [nn.Parameter(draw(i, 0)) for i in range(len(shapes))]
    frozen = nn.Parameter(draw(0, 0), requires_grad=False)
    make = TorchMuon if kind == "torch" else MuonAdamW
    optimizer = make([*parameters, frozen], lr=0.1, **options)
    for step in range(STEPS):
        for i, p in enumerate(parameters):
            p.grad = draw(i, step + 1) * (math.nan if step == SKIPPED else 1.0) if (step, i) != (STEPS - 1, 1) else None
        optimizer.found_inf = torch.tensor(float(step == SKIPPED))
        optimizer.step()
    return parameters, [state for p in parameters for state in optimizer.state[p].values()]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_ranks(SCRIPT, 4, tmp_path_factory.mktemp("muon-on-meshes"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_on_every_mesh_steps_have_the_bits_of_one_process(reports, kind):
    found = [(name, report[name]) for report in reports for name in report if name.endswith(f"/ {kind}")]
    assert len(found) == 4 * 13
    for name, result in found:
        shapes = [tuple(p.shape) for p in result["parameters"]]
        for one, many in zip(train(shapes, kind), (result["parameters"], result["states"]), strict=True):
            assert all(torch.equal(a, b) and b.isfinite().all() for a, b in zip(one, many, strict=True)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["fsdp", "tensor parallel", "hsdp", "replicas", "replicas of replicas", "hsdp and tensor parallel"]
)
def test_each_matrix_is_orthogonalised_on_one_rank(reports, mesh):
    results = [report[f"{mesh} / float32"] for report in reports]
    everywhere = sum((Counter(result["computed"]) for result in results), Counter())
    expected = Counter(shape for i, shape in enumerate(SHAPES) for _ in range(STEPS - (i == 1)))
    assert everywhere == expected
    # The largest one is more work than the others together: its owner has no other.
    assert sorted(set(result["computed"]) == {(33, 77)} for result in results) == [False, False, False, True]


@pytest.mark.slow
def test_stages_share_nothing(reports):
    results = [report["stages / float32"] for report in reports]
    assert [len(result["computed"]) for result in results] == [3, 5, 7, 7]  # by hand: 5 (4 r² c + 2 r³) FLOPs each


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), [("float32", 4), ("bfloat16", 2), ("float64, iterating in bf16", 2)])
@pytest.mark.parametrize(
    ("mesh", "exchanged", "shared"),
    [  # of the elements of all matrices, sent by all ranks together: to the owners and back, and to replicas
        ("even fsdp", 2 * 3 / 4, 0),
        ("even hsdp", 2 * 1 / 2, 2),  # each row sends its half of the matrices to the other; counted on both ends
        ("even replicas", 0, 4),
        ("even fsdp and tensor parallel", 2 * (1 / 2 + 1 / 2), 0),
    ],
)
def test_bytes_are_those_of_the_parts_in_the_dtype_of_the_iteration(reports, mesh, exchanged, shared, kind, width):
    sizes = [rows * columns for rows, columns in EVEN]
    elements = STEPS * sum(sizes) - sizes[1]  # the second has no gradient once
    found = [report[f"{mesh} / {kind}"]["sent"] for report in reports]
    assert sum(each["all_to_all"] for each in found) == exchanged * elements * width
    assert sum(each["broadcast"] for each in found) == shared * elements * width
    assert all(each[None] == each["all_to_all"] + each["broadcast"] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "of_rows"), [("even fsdp", 2 * 3 / 4), ("even hsdp", 2 * 1 / 2 + 2 * 1 / 2)])
def test_normuon_adds_an_all_reduce_of_a_number_for_each_row(reports, mesh, of_rows):
    rows = STEPS * sum(rows for rows, _ in EVEN) - EVEN[1][0]  # the second has no gradient once
    for report in reports:
        sent = report[f"{mesh} / normuon"]["sent"]
        assert sent["all_reduce"] == of_rows * rows * 4
        assert sent[None] == sum(sent[kind] for kind in ("all_to_all", "broadcast", "all_reduce"))
