"""Bytes that a rank sends in an optimizer step, by purpose. With a pipeline: the rank that sends most."""

from __future__ import annotations

from lit_llm.plan import communication, muon
from lit_llm.plan.optimizer import matrix_shapes
from lit_llm.plan.parameters import weights_of
from lit_llm.plan.passes import Step
from lit_llm.plan.pipeline import StageShare, shares, weights_of_stages
from lit_llm.plan.settings import BYTES, RunSettings
from lit_llm.plan.weights import Weight, gathered_bytes, reduced_bytes, stored_bytes


def stages_of_rank(settings: RunSettings, rank: int) -> tuple[StageShare, ...]:
    """What a rank of the pipeline has; without a pipeline all."""
    layout, layers = settings.layout.pipeline, settings.model.n_layer
    if layout.ranks == 1:
        return (StageShare(0, layers, first=True, last=True),)
    return shares(layout, layers, rank)


def weights_of_rank(settings: RunSettings, rank: int, tensor_parallel: int = 1) -> tuple[Weight, ...]:
    """The weights of a rank of the pipeline, whole, or a tensor-parallel rank's part of them."""
    weights = weights_of(settings.model, settings.lora, tensor_parallel)
    return weights if settings.layout.pipeline.ranks == 1 else weights_of_stages(weights, stages_of_rank(settings, rank))


def fullest_stage(settings: RunSettings, tensor_parallel: int = 1) -> tuple[Weight, ...]:
    """The weights of the rank of the pipeline that has most."""
    held = (weights_of_rank(settings, rank, tensor_parallel) for rank in range(settings.layout.pipeline.ranks))
    return max(held, key=lambda each: sum(weight.total for weight in each))


def tensor_parallel_sizes(settings: RunSettings, rank: int) -> list[float]:
    """Bytes of what tensor-parallel ranks gather or scatter in a micro-batch, one for each collective."""
    stages, (stored, computed) = stages_of_rank(settings, rank), BYTES[settings.precision]
    step = Step(settings, settings.sequences)
    return communication.tensor_parallel_sizes(
        step.tokens,
        settings.model.n_embd,
        _layers(stages),
        settings.layout.tensor_parallel,
        parameter_bytes=stored,
        compute_bytes=computed,
        first=any(stage.first for stage in stages),
        last=any(stage.last for stage in stages),
        positions=step.local_length if settings.model.position == "learned" else 0,
        recompute=settings.compute.activation_checkpointing == "full",
    )


def sequence_bytes(settings: RunSettings, rank: int) -> float:
    """What ranks that share sequences exchange in attention: forward, backward as much, and forward again if recomputed."""
    model, layout, n = settings.model, settings.layout, settings.layout.context
    if n == 1:
        return 0.0
    positions = Step(settings, settings.sequences).tokens
    if layout.context_attention == "gather":
        values = 2 * positions * n * model.kv_heads  # keys and values of the whole sequence
    else:
        values = positions * 2 * (model.n_head + model.kv_heads)  # queries, keys and values there, the result back
    size = values * model.resolved_head_dim / layout.tensor_parallel * BYTES[settings.precision][1]
    passes = 3 if settings.compute.activation_checkpointing in ("full", "attention") else 2
    return passes * (n - 1) / n * size * _layers(stages_of_rank(settings, rank)) * settings.accumulation


def stage_bytes(settings: RunSettings, rank: int) -> float:
    """Activations to the next stage and gradients to the one before; a tied matrix's gradient between first and last rank."""
    layout, weight_bytes = settings.layout.pipeline, BYTES[settings.precision][0]
    if layout.ranks == 1:
        return 0.0
    tokens = Step(settings, settings.sequences).tokens / settings.layout.tensor_parallel
    moved = tokens * settings.model.n_embd * weight_bytes * settings.accumulation
    stages, last = layout.stages_of(rank), layout.stages - 1
    onward = sum(stage < last and layout.rank_of(stage + 1) != rank for stage in stages)
    back = sum(stage > 0 and layout.rank_of(stage - 1) != rank for stage in stages)
    ends = {layout.rank_of(0), layout.rank_of(last)}
    tied = 0
    if settings.model.tie_embeddings and len(ends) == 2 and rank in ends:
        local = weights_of_rank(settings, rank, settings.layout.tensor_parallel)
        embedding = tuple(weight for weight in local if weight.part == "token embedding")
        tied = stored_bytes(embedding, weight_bytes, trainable=True) // settings.layout.divisor("parameters")
    return moved * (onward + back) + tied


def communicated_bytes(settings: RunSettings, *, cuda: bool) -> dict[str, float]:
    """Bytes that a rank sends per optimizer step, by purpose; with a pipeline, the rank that sends most."""
    ranks = range(settings.layout.pipeline.ranks)
    return max((bytes_of_rank(settings, rank, cuda=cuda) for rank in ranks), key=lambda found: sum(found.values()))


def bytes_of_rank(settings: RunSettings, rank: int, *, cuda: bool) -> dict[str, float]:
    """Bytes that a rank of the pipeline sends per optimizer step, by purpose.

    Numbers are left out: sums of the loss and of gradient norms, gradients of norms between tensor-parallel ranks.
    """
    layout = settings.layout
    weight_bytes, compute_bytes = BYTES[settings.precision]
    tp, local = layout.tensor_parallel, weights_of_rank(settings, rank, layout.tensor_parallel)
    gradients, sharing = stored_bytes(local, weight_bytes, trainable=True), layout.divisor("parameters")
    found: dict[str, float] = {}
    if tp > 1:
        found["tensor parallel"] = (tp - 1) / tp * sum(tensor_parallel_sizes(settings, rank)) * settings.accumulation
    found["keys and values between ranks of a sequence"] = sequence_bytes(settings, rank)
    found["activations between stages"] = stage_bytes(settings, rank)
    if sharing > 1:
        found["weights gathered, gradients scattered"] = communication.fsdp_bytes(
            *gathered_bytes(local, weight_bytes, compute_bytes),
            reduced_bytes(local),
            sharing,
            micro_batches=settings.accumulation,
            keep_weights=layout.kept.weights,
            reduce_once=layout.kept.gradients,
        )
    if layout.replicate > 1:
        whole = reduced_bytes(local) if layout.shards == "parameters" else gradients
        found["gradients all-reduced"] = communication.ddp_bytes(whole / sharing, layout.replicate)
    elif layout.shards in ("optimizer", "gradients"):
        found["gradients scattered, weights gathered"] = communication.ddp_bytes(gradients, layout.shard)
    if settings.optimizer.is_muon:
        dimensions, rows = layout.owners
        shapes = matrix_shapes(weights_of_rank(settings, rank))
        iterate = settings.optimizer.newton_schulz_bytes(cuda=cuda)
        sent = muon.traffic_bytes(shapes, iterate, dimensions=dimensions, rows=rows, normuon=settings.optimizer.normuon)
        found["Muon's updates"] = sum(sent.values())
    return {purpose: sent for purpose, sent in found.items() if sent}


def _layers(stages: tuple[StageShare, ...]) -> int:
    return sum(stage.stop - stage.start for stage in stages)
