"""Script of test_vocabulary_parallel_loss.py: the loss of each case with this rank's shard of the output matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from launch import report
from torch import Tensor

from lit_llm.models import chunked_loss as loss_module
from lit_llm.models.distillation_loss import TeacherLogits
from lit_llm.models.loss import VocabularyShards, chunked_cross_entropy, cross_entropy

SHARD = 6
"""Rows of W on each rank, unless a case says otherwise."""


class Case(NamedTuple):
    missing: int = 2
    """Rows of padding in W, at its end: fewer than the matrix has with two ranks."""
    rows: int = 13
    width: int = 5
    shard: int = SHARD
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    softcap: float | None = None
    z_loss: float = 0.0
    ignored: float = 0.25
    chunk_size: int | None = 4
    """None: `cross_entropy`."""
    softmax_rows: int = 3
    """Rows of a softmax block, which divides neither a chunk nor all rows."""
    frozen: str = ""
    seed: int = 1
    teacher: tuple[int, float] | None = None
    """Distillation instead: the k ids that a teacher gives, 0 for all, and the temperature."""

    def vocab_size(self, ranks: int) -> int:
        return self.shard * ranks - self.missing

    def options(self, ranks: int) -> dict[str, Any]:
        names = ("softcap", "z_loss")
        return {"vocab_size": self.vocab_size(ranks), **{name: getattr(self, name) for name in names}}


BOTH_TERMS: dict[str, Any] = {"softcap": 2.5, "z_loss": 0.3}
CASES = {
    "plain": Case(),
    "softcap-z-loss": Case(**BOTH_TERMS),
    "full": Case(chunk_size=None, **BOTH_TERMS),
    "one-chunk-of-one-block": Case(chunk_size=100, softmax_rows=100, **BOTH_TERMS),
    "one-row": Case(rows=1, ignored=0.0, **BOTH_TERMS),
    "a-rank-of-padding": Case(missing=SHARD, **BOTH_TERMS),
    "two-shards-less-a-row-are-padding": Case(missing=2 * SHARD - 1, **BOTH_TERMS),
    "all-ignored": Case(ignored=1.0, **BOTH_TERMS),
    "frozen-weight": Case(frozen="weight", **BOTH_TERMS),
    "frozen-hidden": Case(frozen="hidden", **BOTH_TERMS),
    "inference": Case(frozen="inference_mode", **BOTH_TERMS),
    "fp32": Case(dtype=torch.float32, **BOTH_TERMS),
    "fp32-wide": Case(rows=96, width=32, shard=200, missing=20, softmax_rows=10, chunk_size=32, dtype=torch.float32),
    "bf16-autocast": Case(
        rows=96, width=32, shard=200, missing=20, softmax_rows=10, chunk_size=32, dtype=torch.float32, autocast=True
    ),
    "bf16-autocast-terms": Case(
        rows=96, width=32, shard=200, missing=20, chunk_size=40, dtype=torch.float32, autocast=True, softcap=8.0, z_loss=1e-2
    ),
    "teacher": Case(teacher=(3, 1.0), softcap=2.5),
    "teacher-one-id-full": Case(teacher=(1, 0.7), chunk_size=None, missing=SHARD),
    "teacher-all": Case(teacher=(0, 2.0), softcap=2.5),
    "bf16-weights": Case(rows=96, width=32, shard=200, missing=20, softmax_rows=10, dtype=torch.bfloat16, z_loss=1e-2),
}


def inputs(case: Case, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (N, d), the whole matrix (ranks·V, d) with huge padding that must be ignored, and targets (N,)."""
    generator = torch.Generator().manual_seed(case.seed)
    hidden = torch.randn(case.rows, case.width, generator=generator, dtype=torch.float64)
    weight = torch.randn(case.shard * ranks, case.width, generator=generator, dtype=torch.float64)
    weight[case.vocab_size(ranks) :] = 1e3
    targets = torch.randint(case.vocab_size(ranks), (case.rows,), generator=generator)
    targets[torch.rand(case.rows, generator=generator) < case.ignored] = -100
    return hidden.to(case.dtype), weight.to(case.dtype), targets


def teacher(case: Case, ranks: int) -> tuple[Tensor, Tensor]:
    """What the teacher of a case gives for each target: ids and log-probabilities (N, k)."""
    assert case.teacher is not None
    size, (k, temperature) = case.vocab_size(ranks), case.teacher
    z = torch.randn(case.rows, size, generator=torch.Generator().manual_seed(case.seed + 7), dtype=case.dtype)
    logp, ids = torch.log_softmax(3 * z / temperature, dim=-1).topk(k or size)
    return ids.int(), logp


def run(case: Case, hidden: Tensor, weight: Tensor, targets: Tensor, ranks: int, shards: VocabularyShards | None) -> dict:
    """The sums, and the gradients of 0.37 × the loss (training also scales the loss). None for frozen inputs."""
    hidden = hidden.clone().requires_grad_(case.frozen != "hidden")
    weight = weight.clone().requires_grad_(case.frozen != "weight")
    loss_module.SOFTMAX_NUMEL = case.softmax_rows * len(weight)
    evaluation = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(case.frozen, torch.enable_grad)
    with evaluation(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
        if case.teacher is not None:
            given = {"teacher": TeacherLogits(*teacher(case, ranks), case.teacher[1], 0.3), "chunk_size": case.chunk_size or 99}
            sums = chunked_cross_entropy(hidden, weight, targets, **given, **case.options(ranks), shards=shards)
        elif case.chunk_size is None:
            sums = cross_entropy(hidden, weight, targets, **case.options(ranks), shards=shards)
        else:
            chunks = {"chunk_size": case.chunk_size, "shards": shards}
            sums = chunked_cross_entropy(hidden, weight, targets, **case.options(ranks), **chunks)
    if sums.loss.requires_grad:
        (sums.loss * 0.37).backward()
    values = {"loss": sums.loss.detach(), "nll": sums.nll, "count": sums.count, "hidden": hidden.grad, "weight": weight.grad}
    return {name: None if value is None else value.clone() for name, value in values.items()}


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = dist.group.WORLD
    results = {}
    gathers = 0
    all_gather = dist.all_gather

    def counted_all_gather(*args: Any, **kwargs: Any) -> None:
        nonlocal gathers
        gathers += 1
        all_gather(*args, **kwargs)

    dist.all_gather = counted_all_gather
    for name, case in CASES.items():
        hidden, weight, targets = inputs(case, ranks)
        first, gathers = rank * case.shard, 0
        shard = weight[first : first + case.shard]
        results[name] = run(case, hidden, shard, targets, ranks, VocabularyShards(everyone, first)) | {"gathers": gathers}

    # One rank is right without any doubt and the others have a little probability each, far from zero.
    shards = VocabularyShards(everyone, rank)
    z = torch.full((1, ranks), 1000.0)
    z[0, 1] = 1009.0
    z.requires_grad_()
    sums = chunked_cross_entropy(z, torch.eye(ranks)[rank : rank + 1], torch.tensor([1]), vocab_size=ranks, shards=shards)
    sums.loss.backward()
    results["confident"] = {"nll": sums.nll, "hidden": z.grad}

    case = Case()
    hidden, weight, targets = inputs(case, ranks)
    shards = VocabularyShards(everyone, rank * SHARD)
    shard, options = weight[rank * SHARD :][:SHARD], {**case.options(ranks), "shards": shards}
    rows = {"targets": targets[:12].view(3, 4), "hidden": hidden[:12].view(3, 4, -1)}
    results["by_row"] = [
        f(rows["hidden"], shard, rows["targets"], by_row=True, **options)[2:5] for f in (cross_entropy, chunked_cross_entropy)
    ]

    messages: list[str] = []
    for function in (cross_entropy, chunked_cross_entropy):
        for target in (case.vocab_size(ranks), SHARD * ranks, -1):
            wrong = targets.clone()
            wrong[3] = target
            try:
                function(hidden, shard, wrong, **options)
            except IndexError as error:
                messages.append(str(error))
    # After these errors no rank waits for another: the next loss is correct.
    results["after"] = run(case, hidden, shard, targets, ranks, shards)
    report(**results, messages=messages)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
