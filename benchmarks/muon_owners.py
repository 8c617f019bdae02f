"""Bytes that Muon sends in a step: owners against gathering every matrix on every rank, for each rank of a mesh.

    python benchmarks/muon_owners.py                      # GPT-2 124M on 8 ranks, by mesh
    python benchmarks/muon_owners.py --n_layer 32 --n_embd 4096

Each rank runs as one process with a fake process group, which sends nothing; `Traffic` counts what it is asked to send. Before
owners existed, each rank gathered each matrix, orthogonalised its share, and gathered all results. The formula for that is
here; for owners it is `lit_llm.plan.collectives.muon_collectives`.
"""

from __future__ import annotations

import argparse
import math
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_llm.core._torch import box_at
from lit_llm.distributed.traffic import Traffic
from lit_llm.optim import MuonAdamW
from lit_llm.plan.collectives import muon_collectives
from lit_llm.plan.optimizer import MuonWork

ITERATE_BYTES = 4  # float32, the default on CPUs; 2 on accelerators
MESHES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "fsdp2, 8": ((8,), [Shard(0)]),
    "hsdp, 2 x 4": ((2, 4), [Replicate(), Shard(0)]),
    "replicas, 8": ((8, 1), [Replicate(), Shard(0)]),
    "fsdp2 x tensor parallel, 4 x 2": ((4, 2), [Shard(0), Shard(1)]),
}


def before(shapes: list[tuple[int, int]], sizes: tuple[int, ...], placements: list[Placement], width: int) -> float:
    """Bytes that a rank sent: each matrix gathered, and the shares of the results, along one dimension after the other."""
    sent = 0.0
    for shape in shapes:
        part = math.prod(shape) * 4  # parameters are fp32
        sent += part * (1 - 1 / math.prod(n for n, p in zip(sizes, placements, strict=True) if isinstance(p, Shard)))
    by_shape = {(min(s), max(s)): 0 for s in shapes}
    for shape in shapes:
        by_shape[min(shape), max(shape)] += 1
    for (r, c), count in by_shape.items():
        held = -(-count // math.prod(sizes)) * r * c * width  # a share, rounded up
        for n in reversed(sizes):
            sent += (n - 1) * held
            held *= n
    return sent


def counted(shapes: list[tuple[int, int]], sizes: tuple[int, ...], placements: list[Placement], rank: int, name: str) -> float:
    """Bytes that a rank sends in a step."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"{name} {rank} {d}" for d in range(len(sizes))))
    try:
        parameters = []
        for shape in shapes:
            size, _ = box_at(shape, sizes, tuple(mesh.get_coordinate() or ()), tuple(placements))
            parts = [
                DTensor.from_local(torch.zeros(size), mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
                for _ in range(2)
            ]
            parameters.append(nn.Parameter(parts[0]))
            parameters[-1].grad = parts[1]
        optimizer = MuonAdamW(parameters, ns_steps=1)
        with Traffic() as traffic:
            optimizer.step()
        return traffic.sent()
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n_layer", type=int, default=12)
    parser.add_argument("--n_embd", type=int, default=768)
    parser.add_argument("--ranks", type=int, help="how many of the ranks to run, from 0 on; default: all")
    given = parser.parse_args()
    d = given.n_embd
    shapes = ([(d, d)] * 4 + [(4 * d, d), (d, 4 * d)]) * given.n_layer
    print(f"{len(shapes)} matrices, {sum(map(math.prod, shapes)) / 1e6:.1f} M elements; MB per rank and step, mean (and most)")
    print("| mesh | before, formula | owners, formula | owners, counted |")
    print("|---|---|---|---|")
    for name, (sizes, placements) in MESHES.items():
        splits = [n for n, p in zip(sizes, placements, strict=True) if isinstance(p, Shard)]
        rows = math.prod(sizes) // math.prod(splits)
        work = MuonWork(tuple(shapes), dimensions=tuple(splits), rows=rows)
        planned = sum(each.sent(1) for each in muon_collectives(work, 4, ITERATE_BYTES))
        ranks = range(given.ranks or math.prod(sizes))
        sent = [counted(shapes, sizes, placements, rank, name) for rank in ranks]
        old = before(shapes, sizes, placements, ITERATE_BYTES)
        print(
            f"| {name} | {old / 1e6:.1f} | {planned / 1e6:.1f} | {mean(sent) / 1e6:.1f} ({max(sent) / 1e6:.1f}) |", flush=True
        )


if __name__ == "__main__":
    main()
