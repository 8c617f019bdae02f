"""Script of test_context_parallel.py: attention and models whose sequences ranks share, against one process.

python context_script.py     one process per rank; reports the largest differences, and what was sent
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from launch import report
from torch import Tensor

from lit_llm.distributed.traffic import Traffic
from lit_llm.models.attention import attend, visibilities
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import cross_entropy
from lit_llm.models.sequence_shard import SequenceShard

HEADS, WIDTH, BATCH = 8, 6, 2
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
CASES = (  # key/value heads, window, documents, soft cap, sinks
    (HEADS, None, False, None, False),
    (4, 1, False, None, True),
    (4, 7, True, 2.0, False),
    (4, None, True, None, True),
    (HEADS, 64, False, 2.0, True),
)
COMPILED = {"gather": ("documents", "latent"), "heads": ("dropout", "latent")}
LENGTHS = (40, 13, 1)  # of block_size 40; 13 and 1 are padded


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def of_attention(
    shard: SequenceShard, length: int, kv_heads: int, window: int | None, masked: bool, softcap: float | None, sink: bool
) -> float:
    """The largest difference of this rank's outputs and gradients."""
    generator = torch.Generator().manual_seed(length)
    drawn = [
        torch.randn(BATCH, n, length, WIDTH, dtype=torch.float64, generator=generator) for n in (HEADS, kv_heads, kv_heads)
    ]
    documents = None
    if masked:
        documents = (torch.rand(BATCH, length, generator=generator) < torch.tensor([[0.1], [0.4]])).long().cumsum(1)
    weight = torch.randn(BATCH, HEADS, length, WIDTH, dtype=torch.float64, generator=generator)
    ids = torch.zeros(BATCH, length, dtype=torch.int64)
    config = GPTConfig(**SIZE, window=window, attention_softcap=softcap, attention_sinks=sink)

    def run(split: SequenceShard | None) -> list[Tensor]:
        own = (lambda x: x) if split is None else (lambda x: split.take(x, dim=2))
        inputs = [own(x).clone().requires_grad_() for x in drawn]
        sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_() if sink else None
        see = visibilities(config, ids, documents, "auto", cached=0, shard=split)[window]
        y = attend(*inputs, see=see, softcap=softcap, sinks=sinks)
        found = torch.autograd.grad((y * own(weight)).sum(), inputs if sinks is None else [*inputs, sinks])
        if split is None:
            return [y, *found]
        return [y, *found[:3], *(summed(g) for g in found[3:])]  # the gradient of a parameter is a sum over the ranks

    ours, whole = run(shard), run(None)
    theirs = [*(shard.take(x, dim=2) for x in whole[:4]), *whole[4:]]
    return max(difference(a, b) for a, b in zip(ours, theirs, strict=True))


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


def of_compiled(shard: SequenceShard, settings: dict[str, Any]) -> float:
    """The largest difference of gradients with blocks that are traced as a whole, as torch.compile does, from plain ones."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SIZE, **settings}))
    model.sequence_shard = shard
    ids, seed = torch.randint(50, (BATCH, 39)), torch.tensor(3)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(ids, ids, seed=seed).loss, list(model.parameters()))

    theirs = gradients()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    return max(difference(a, b) for a, b in zip(gradients(), theirs, strict=True))


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
    found: dict[str, Any] = {"attention": {}, "models": {}, "compiled": {}, "traffic": {}}
    for kind in ("gather", "heads"):
        shard = SequenceShard(group, ranks, rank, kind)  # type: ignore[arg-type]
        for chunk in (1, 3, 19):  # positions
            for case in CASES:
                found["attention"][f"{kind}, {chunk}, {case}"] = of_attention(shard, chunk * shard.multiple, *case)
        for name, settings in MODELS.items():
            for length in LENGTHS:
                found["models"][f"{kind}, {name}, {length}"] = of_model(shard, settings, length)
        for name in COMPILED[kind] if ranks == 2 else ():  # what is traced does not depend on their number
            found["compiled"][f"{kind}, {name}"] = of_compiled(shard, MODELS[name])
        for dtype in (torch.float32, torch.bfloat16):
            found["traffic"][f"{kind}, {dtype}"] = traffic(shard, 39, dtype, {})
            found["traffic"][f"latent, {kind}, {dtype}"] = traffic(shard, 39, dtype, MODELS["latent"])
    report(**found)


if __name__ == "__main__":
    main()
