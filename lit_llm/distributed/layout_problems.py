"""Find the reasons why a model cannot be trained in a parallel layout, one sentence each, before any process starts.

`model_problems` collects all reasons. `tensor_parallel.py` and `context_parallel.py` have the checks of their techniques.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallel_layout import Layout
from lit_llm.distributed.pipeline_layers import KINDS
from lit_llm.models.config import GPTConfig

if TYPE_CHECKING:  # these import torch
    from lit_llm.models.custom import Architecture

_ONE_PASS = "--trainer.strategy.schedule 1f1b or interleaved1f1b"


def model_problems(
    layout: Layout,
    model: GPTConfig | None,
    architecture: Architecture | None,
    compute: ComputeConfig | None,
    precision: str,
    chunk_size: int | None,
) -> list[str]:
    """Return a sentence for each reason why the ranks of `layout` cannot train the model. See `pipeline_problems` for Args."""
    from lit_llm.distributed.context_parallel import context_problems  # these import torch
    from lit_llm.distributed.tensor_parallel import tensor_parallel_problem
    from lit_llm.models.custom import architecture_layout_problems

    gpt, ranks, problems = model if architecture is None else None, layout.tensor_parallel, list[str]()
    if architecture is not None:
        problems += architecture_layout_problems(architecture.class_path, ranks, layout.context)
    if gpt is not None and ranks > 1:
        problems += filter(None, [tensor_parallel_problem(gpt, ranks)])
    if model is not None:
        problems += expert_problems(gpt, layout, compiled=compute is not None and compute.compile)
    if compute is not None:
        problems += filter(None, [compile_problem(ranks, compute)])
    problems += pipeline_problems(layout, model, architecture, compute, precision, chunk_size)
    if gpt is not None and layout.context > 1:
        problems += context_problems(gpt, layout)
    return problems


def pipeline_problems(
    layout: Layout,
    model: GPTConfig | None,
    architecture: Architecture | None,
    compute: ComputeConfig | None,
    precision: str,
    chunk_size: int | None,
) -> list[str]:
    """Return a sentence for each reason why settings do not work with the pipeline of `layout`; [] without a pipeline.

    Args:
        model: the GPT's configuration. None: the configuration is not checked.
        architecture: the custom model; None for a GPT.
        precision: the Trainer's precision, such as "bf16-mixed".
        chunk_size: `loss.chunk_size`.
    """
    pipeline, expert = layout.pipeline, layout.expert
    if pipeline.ranks == 1:
        return []
    if architecture is not None:
        return [
            f"pipeline={pipeline.ranks} works with lit_llm's GPT only, because {architecture.class_path} cannot be cut between "
            "its layers; use shards instead (--trainer.strategy.pipeline 1, --config recipes/strategy/fsdp2.yaml)"
        ]
    kind, problems = KINDS[pipeline.schedule], []
    if model is not None:
        problems += pipeline.layer_problems(model.n_layer)
        twice = {"is tied": model.tie_embeddings, f"serves model.predict_ahead {model.predict_ahead}": model.predict_ahead > 0}
        mends = ("--model.tie_embeddings false", "--model.predict_ahead 0")
        problems += [
            f"trainer.strategy.schedule is {pipeline.schedule}, which puts the first and the last stage on one rank, but the "
            f"embedding {why} ({_ONE_PASS}, or {mend})"
            for (why, is_so), mend in zip(twice.items(), mends, strict=True)
            if kind.folds and is_so
        ]
    if precision == "16-mixed":
        problems.append(loss_scale_problem(pipeline.ranks))
    if not kind.splits_backward:
        return problems
    cheap = "what compute.activation_checkpointing cheap keeps serves one gradient only"
    ranks = f"the loss of tensor_parallel={layout.tensor_parallel} computes both at once"
    checkpointing = None if compute is None else compute.activation_checkpointing
    wrong = (  # torch looks for whole weights before the backward pass gathers them
        (compute is not None and compute.compile, "compiled blocks compute both at once", "compute.compile false"),
        (checkpointing == "cheap", cheap, "compute.activation_checkpointing full"),
        (
            expert > 1 and checkpointing not in (None, "none", "attention"),
            f"compute.activation_checkpointing {checkpointing} keeps what expert={expert} ranks exchange for one gradient only",
            "compute.activation_checkpointing none",
        ),
        (chunk_size is not None, "a loss in chunks computes both at once", "loss.chunk_size null"),
        (layout.tensor_parallel > 1, ranks, "trainer.strategy.tensor_parallel 1"),
        (
            not layout.kept.weights,
            "reshard_after_forward true frees the weights before",
            "trainer.strategy.reshard_after_forward false",
        ),
    )
    named = f"trainer.strategy.schedule is {pipeline.schedule}, which computes gradients of weights later,"
    return problems + [f"{named} but {what} ({_ONE_PASS}, or --{mend})" for is_wrong, what, mend in wrong if is_wrong]


def compile_problem(tensor_parallel: int, compute: ComputeConfig) -> str | None:
    """A sentence if settings combine tensor parallelism, compiled blocks and recomputed attention, else None.

    This cannot work, because torch 2.13 loses the mesh of DTensors that a compiled graph recomputes. Whole blocks can be
    recomputed, because `parallelize` does so outside their graphs.
    """
    if tensor_parallel == 1 or not compute.compile or compute.activation_checkpointing != "attention":
        return None
    return (
        f"compute.activation_checkpointing is attention, which torch cannot compile with tensor_parallel={tensor_parallel} "
        "(--compute.activation_checkpointing full, cheap or none, or --compute.compile false)"
    )


def clip_problem(pipeline: int, clip: float | None) -> str | None:
    """A sentence that refuses `clip`, the Trainer's gradient_clip_val, for a pipeline of `pipeline` ranks, else None.

    Lightning would clip the gradients of each stage by that stage's norm. None if `pipeline` is 1 or `clip` is None.
    """
    if pipeline == 1 or clip is None:
        return None
    return (
        f"trainer.gradient_clip_val is {clip}, but the norm of pipeline={pipeline} spans its stages "
        f"(--gradient_norm GradientNorm --gradient_norm.clip {clip}, and --trainer.gradient_clip_val null)"
    )


def loss_scale_problem(pipeline: int) -> str:
    """The error message that refuses precision 16-mixed, which needs a loss scale, for a pipeline of `pipeline` ranks."""
    return (
        f"trainer.precision is 16-mixed, but the stages of pipeline={pipeline} do not share a loss scale "
        "(--trainer.precision bf16-mixed)"
    )


def expert_problems(config: GPTConfig | None, layout: Layout, *, compiled: bool) -> list[str]:
    """Return a sentence for each reason why `layout.expert` ranks cannot share the experts of a model's layers.

    Args:
        config: the GPT's configuration; None for a custom model.
        compiled: whether blocks are compiled.
    """
    expert, flag = layout.expert, "--trainer.strategy.expert"
    if expert == 1:
        return []
    if config is None or config.moe is None:
        return [
            f"expert={expert} shares the experts of a layer among ranks, but the model has none ({flag} 1, or "
            "--model.moe.experts)"
        ]
    among = layout.shard * layout.context * layout.tensor_parallel
    fitting = max(n for n in range(1, expert + 1) if among % n == 0 and config.moe.experts % n == 0)
    problems = []
    if among % expert:
        problems.append(
            f"expert={expert} does not divide the {among} ranks along shard, context and tensor_parallel: use {fitting} "
            f"({flag} {fitting})"
        )
    if config.moe.experts % expert:
        problems.append(
            f"expert={expert} does not divide model.moe.experts={config.moe.experts}: use {fitting} ({flag} {fitting}, or "
            "--model.moe.experts)"
        )
    if compiled:
        problems.append(
            f"compute.compile is true, but the rows that expert={expert} ranks exchange have other sizes in every step "
            f"(--compute.compile false, or {flag} 1)"
        )
    return problems
