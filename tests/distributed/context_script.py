"""Script of test_context_parallel.py: models whose sequences ranks share, against one process.

python context_script.py     one process per rank; reports the largest differences, and what was sent
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from launch import report
from torch import Tensor

from lit_llm.distributed.traffic import Traffic
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import cross_entropy
from lit_llm.models.sequence_shard import SequenceShard

BATCH = 2
SIZE: dict[str, Any] = {"n_layer": 2, "n_head": 8, "n_kv_head": 4, "n_embd": 32, "block_size": 40, "vocab_size": 50}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 14, "short_factor": [1.0, 2.0], "long_factor": [3.0, 9.0]}
MODELS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "documents": {"mask_documents": True, "eos_id": 3},
    "given documents": {"mask_documents": True},
    "learned positions, sinks": {"position": "learned", "attention_sinks": True, "attention_softcap": 3.0},
    "dropout": {"dropout": 0.3, "window": 9},
    "latent": {
        **{"latent": {"kv_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 5}, "n_kv_head": None},
        **{"qk_norm": False, "dropout": 0.3, "window": 9},
    },
    "two tables": {"rope_scaling": LONG, "layers": {"rope": [True, False]}},
}
LENGTHS = (40, 13, 1)  # of block_size 40; 13 and 1 are padded


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def of_model(shard: SequenceShard, settings: dict[str, Any], length: int) -> dict[str, float]:
    """The largest differences of the loss sums and of the gradients, summed over the ranks."""
    torch.manual_seed(length)
    model = GPT(GPTConfig(**{**SIZE, **settings})).double()
    ids, targets = torch.randint(50, (2, BATCH, length)).unbind()
    targets[0, ::3] = -100
    seed, given = torch.tensor(length), {}
    if settings.get("mask_documents") and "eos_id" not in settings:
        given = {"documents": (torch.rand(BATCH, length) < 0.2).long().cumsum(1)}

    def run(split: SequenceShard | None) -> list[Tensor]:
        model.sequence_shard = split
        sums = model(ids, targets, loss=lambda *a, **k: cross_entropy(*a, **k, by_row=True, z_loss=0.1), seed=seed, **given)
        gradients = torch.autograd.grad(sums.loss, list(model.parameters()))
        return [x.detach() if split is None else summed(x.detach()) for x in (*sums[:5], *gradients)]

    ours, theirs = run(shard), run(None)
    model.sequence_shard = shard
    with torch.no_grad():
        assert model(ids[:, :length], **given).shape == (BATCH, length, 50)  # without targets the whole sequence
    pairs = [difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {"sums": max(pairs[:5]), "gradients": max(pairs[5:])}


def traffic(
    shard: SequenceShard, length: int, dtype: torch.dtype, settings: dict[str, Any]
) -> dict[str, list[tuple[str, int, int]]]:
    """(kind, calls, bytes of the whole tensors) of a forward and a backward pass."""
    model = GPT(GPTConfig(**{**SIZE, **settings})).to(dtype)
    model.sequence_shard = shard
    ids = torch.zeros(BATCH, length, dtype=torch.int64)
    with Traffic() as forward:
        loss = model(ids, ids).loss
    with Traffic() as backward:
        loss.backward()
    return {
        name: [(row.kind, row.calls, row.size) for row in of.rows()]
        for name, of in (("forward", forward), ("backward", backward))
    }


def main() -> None:
    dist.init_process_group("gloo")
    group, ranks, rank = dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {"models": {}, "traffic": {}}
    for kind in ("gather", "heads"):
        shard = SequenceShard(group, ranks, rank, kind)  # type: ignore[arg-type]
        for name, settings in MODELS.items():
            for length in LENGTHS:
                found["models"][f"{kind}, {name}, {length}"] = of_model(shard, settings, length)
        for dtype in (torch.float32, torch.bfloat16):
            found["traffic"][f"{kind}, {dtype}"] = traffic(shard, 39, dtype, {})
            found["traffic"][f"latent, {kind}, {dtype}"] = traffic(shard, 39, dtype, MODELS["latent"])
    report(**found)


if __name__ == "__main__":
    main()
