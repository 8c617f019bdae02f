"""Short convolutions of ranks that share positions: the values and the gradients of one process, in float64."""

import json

import pytest
import torch
from launch import run_ranks

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from launch import report
from lit_llm.models.sequence_shard import SequenceShard
from lit_llm.models.short_convolution import ShortConvolution

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def shard(ranks, step, kind):
    # Ranks r, r + step, r + 2 step, ... are one group, as along a dimension of a mesh.
    found = None
    for first in range(world):
        members = [first + i * step for i in range(ranks)]
        if first // step % ranks == 0 and members[-1] < world:
            group = dist.new_group(members)
            if rank in members:
                found = SequenceShard(group.group_name, ranks, members.index(rank), kind)
    return found


results = {}
for name, (context, kind, stream, positions, length) in json.loads(sys.argv[1]).items():
    torch.manual_seed(0)
    x = torch.randn(2, length, 3, dtype=torch.float64)
    weight = torch.randn(3 * positions, dtype=torch.float64)
    documents = torch.tensor([[i // 5 for i in range(length)], [i // 11 for i in range(length)]])
    upstream = torch.randn(2, length, 3, dtype=torch.float64)
    outer = shard(context, stream, kind) if context > 1 else None
    inner = shard(stream, 1, "heads") if stream > 1 else None
    for seen in (None, documents):
        module = ShortConvolution(positions, 3).double()
        with torch.no_grad():
            module.weight.copy_(weight)
        module.stream = inner
        take = lambda y: y if inner is None else inner.take(y)
        own = take(x if outer is None else outer.take(x)).clone().requires_grad_()
        y = module(own, seen, None, outer)
        y.backward(take(upstream if outer is None else outer.take(upstream)))
        whole = module.weight.grad.clone()
        dist.all_reduce(whole)
        where = take(torch.arange(length)[None] if outer is None else outer.take(torch.arange(length)[None]))[0]
        results[f"{name}, documents {seen is not None}"] = {
            "y": y.detach(), "x": own.grad, "where": where, "weight": whole,
        }
report(results=results)
"""


def alone(positions: int, length: int, documents: bool) -> dict[str, torch.Tensor]:
    """By the formula, position by position."""
    torch.manual_seed(0)
    x = torch.randn(2, length, 3, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3 * positions, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(2, length, 3, dtype=torch.float64)
    rows = []
    for row, size in enumerate((5, 11)):
        for t in range(length):
            y = x[row, t]
            for i in range(min(positions, t + 1)):
                if not documents or (t - i) // size == t // size:
                    y = y + weight.view(3, positions)[:, i] * x[row, t - i]
            rows.append(y)
    y = torch.stack(rows).view(2, length, 3)
    y.backward(upstream)
    assert x.grad is not None and weight.grad is not None
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad}


CASES = {  # context ranks, kind, ranks of tensor parallelism, positions of the convolution, positions of the sequence
    2: {"gather": (2, "gather", 1, 4, 24), "heads": (2, "heads", 1, 4, 24), "stream": (1, "gather", 2, 4, 24)},
    4: {
        **{"gather of four": (4, "gather", 1, 3, 24), "one position each": (4, "gather", 1, 6, 8)},
        **{"gather and stream": (2, "gather", 2, 4, 24), "pieces of one": (2, "gather", 2, 5, 8)},
        **{"heads and stream": (2, "heads", 2, 4, 12)},
    },
    6: {"a chunk ends within a rank": (2, "gather", 3, 4, 36), "pieces of one": (2, "gather", 3, 9, 12)},
}


@pytest.mark.parametrize("ranks", CASES)
def test_values_and_gradients_are_those_of_one_process(tmp_path, ranks):
    reports = run_ranks(SCRIPT, ranks, tmp_path, json.dumps(CASES[ranks]))
    for name, (_, _, _, positions, length) in CASES[ranks].items():
        for documents in (False, True):
            wanted = alone(positions, length, documents)
            for each in reports:
                found = each["results"][f"{name}, documents {documents}"]
                for key in ("y", "x"):
                    assert torch.allclose(found[key], wanted[key][:, found["where"]], rtol=1e-12, atol=1e-12), (name, key)
                assert torch.allclose(found["weight"], wanted["weight"], rtol=1e-12, atol=1e-12), name
