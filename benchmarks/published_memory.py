"""Compare predicted with published GPU memory, for each run of benchmarks/published.yaml whose source states its memory.

    python benchmarks/published_memory.py

Nothing is fitted to these runs. The ratio of reserved to allocated memory is the median of other runs, in PAIRS. For programs
that differ from lit_llm (`PROGRAMS`), the memory is computed from the same traces with the program's differences.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from lit_llm.plan.memory import SLACK, peak_memory, reserved_bytes, resolved
from lit_llm.plan.micro_batch import micro_batch
from lit_llm.plan.optimizer import state_bytes
from lit_llm.plan.segments import Step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
from published_runs import Run, runs

GIB = 2**30
PAIRS = {  # (allocated, reserved) MiB at the peak, of training runs in bf16 with torch's default allocator
    # logs of github.com/openai/parameter-golf and its forks: "peak memory allocated: … MiB reserved: … MiB"
    "parameter golf": [
        *((10303, 10622), (11270, 11326), (10255, 10574), (1808, 1936), (15392, 15788), (19139, 19202), (14727, 14978)),
        *((20245, 20856), (20241, 20390), (23304, 23884), (19739, 20374), (5332, 5752), (35942, 40070), (36149, 40336)),
        *((35950, 41116), (18179, 19658)),
    ],
    # llama-1B with data, tensor and pipeline parallelism: huggingface.co/nanotron/old_bench, log_metrics.csv
    "nanotron": [
        *((16550, 16842), (7520, 8718), (13153, 14332), (42485, 42994), (25707, 26100), (25808, 27166), (24416, 25252)),
        *((44034, 44472), (43651, 44378)),
    ],
}


@dataclass(frozen=True)
class Program:
    """The differences of a training program from lit_llm.

    Attributes:
        every_second: whether selective recomputation saves attention and every second matrix product (torchtitan's "op").
        compiled_loss: whether the loss is compiled. A compiled loss keeps the logits and their gradient in bf16.
    """

    every_second: bool = False
    compiled_loss: bool = False


PROGRAMS = {  # all of these programs keep the residual stream in bf16, and gather all weights in bf16
    "torchtitan, 96 GB H100": Program(every_second=True),
    "torchtitan, H200": Program(every_second=True, compiled_loss=True),
    "nanochat": Program(compiled_loss=True),
}


def predicted(run: Run) -> int:
    """Return the predicted peak bytes of `run`: allocated or reserved bytes, whichever the run's source states."""
    settings = resolved(run.settings, run.hardware)
    if (program := PROGRAMS.get(run.group)) is None:
        memory = peak_memory(settings, cuda=True)
    else:
        ranks = range(settings.layout.pipeline.ranks)
        return max(_of_rank(replace(run, settings=settings), program, rank) for rank in ranks)
    return memory.total if run.memory_kind == "allocated" else memory.needed


def _of_rank(run: Run, program: Program, rank: int) -> int:
    settings, layout = run.settings, run.settings.layout
    model, tp, shards = settings.model, layout.tensor_parallel, layout.divisor("parameters")
    weights, in_pipeline = settings.weights_of_rank(rank), layout.pipeline.ranks > 1
    total = sum(weight.total for weight in weights)
    blocks = {weight.block for weight in weights if weight.block is not None}
    root = sum(weight.total for weight in weights if weight.block is None)
    block = (total - root) // len(blocks)

    selective = program.every_second and settings.compute.activation_checkpointing == 2
    recomputed = "cheap" if selective else settings.compute.activation_checkpointing
    whole = replace(layout, strategy="single")  # sharded tensors are counted below
    traced = replace(settings, precision="bf16-true", layout=whole).with_checkpointing(recomputed)
    step = Step(traced, settings.sequences, settings.accumulation, rank, cuda=True, gradients_exist=True)
    peaks = {moment: peak | {"gradients": 0} for moment, peak in micro_batch(step).peaks.items()}
    tokens = step.sequences * settings.local_length
    if selective:  # the second, fourth and sixth products are computed again: keys, the projection, and up
        again = 2 * tokens * (model.kv_heads * model.resolved_head_dim + model.n_embd + model.hidden_width) * model.n_layer
        for peak in peaks.values():
            peak["activations"] -= again
    if head := peaks.get("loss head"):
        logits = tokens * model.padded_vocab_size // tp
        if tp > 1:  # four fp32 arrays in the backward pass of DTensor's loss (torch/distributed/tensor/parallel/loss.py)
            head["loss head"] = 4 * 4 * logits
        elif program.compiled_loss:
            head["loss head"] = 2 * 2 * logits
        if not in_pipeline:
            head["unusable"] = peaks["forward"]["activations"] - head["activations"]
    if shards == 1:  # the 8 bytes are weights and the gradients of the previous step
        stays = 8 * total + int(state_bytes(settings.optimizer, weights, 4) / layout.divisor("optimizer"))
        pools, own = (0, 0, 0), dict.fromkeys(peaks, 0)
    else:
        # FSDP2 gathers in bf16, and reduces in fp32. Embedding, norm and head are one group. In a pipeline, gathered weights
        # stay, and gradients are summed in fp32 before they are reduced once.
        stays = 12 * total // shards
        pools = (2 * (root + block) * (shards + 1) // shards, 4 * total // shards, 4 * max(root, block))
        own = dict.fromkeys(peaks, 6 * total if in_pipeline else 2 * (root + block))
        own["backward"] += 0 if in_pipeline else 2 * (root + block)
    reserved = reserved_bytes(stays, [(peak, own[moment]) for moment, peak in peaks.items()], *pools)
    return round(reserved / SLACK) if run.memory_kind == "allocated" else reserved


def main() -> None:
    ratios = [reserved / allocated for pairs in PAIRS.values() for allocated, reserved in pairs]
    print(f"reserved over allocated in {len(ratios)} runs: {min(ratios):.3f} to {max(ratios):.3f}, ", end="")
    print(f"median {statistics.median(ratios):.3f}; the planner takes {SLACK}\n")
    print("| run | published GiB | predicted | ratio |\n|---|---|---|---|")
    found = {}
    for run in runs(memory=True):
        assert run.memory_gib is not None
        size = predicted(run) / GIB
        found[str(run)] = size / run.memory_gib
        print(f"| {run} | {run.memory_gib:.1f} {run.memory_kind} | {size:.1f} | {size / run.memory_gib:.3f} |")
    worst = max(found, key=lambda name: abs(found[name] - 1))
    within = sum(abs(ratio - 1) <= 0.1 for ratio in found.values())
    off = statistics.median(abs(ratio - 1) for ratio in found.values())
    print(f"\n{within} of {len(found)} within 10 %, median {off:.1%} off; worst {found[worst]:.3f}, {worst}")


if __name__ == "__main__":
    main()
