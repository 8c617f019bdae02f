"""What a rank sends in an optimizer step: its collectives, with their bytes, and their seconds within and between nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.models.config import GPTConfig
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.optimizer import MuonWork
from lit_llm.plan.pipeline_order import stages_of_rank, weights_of_rank
from lit_llm.plan.run_settings import RunSettings
from lit_llm.plan.weights import Weights, average_bytes, gathered_bytes, reduced_bytes, stored_bytes

LATENCY_SECONDS = 10e-6
"""Latency of one message. An assumption: NCCL takes 5 to 10 microseconds over NVLink, 10 to 20 over InfiniBand."""


@dataclass(frozen=True)
class Links:
    """Bandwidth within a node and between nodes, in GB/s per device and direction, and the number of devices per node."""

    node_gbps: float
    network_gbps: float
    devices_per_node: int


def _inside(ranks: int, links: Links, stride: int) -> int:
    """Ranks of a group within a node. If the distance between neighbours is a whole node, all traffic crosses the network."""
    return max(1, min(ranks, links.devices_per_node // stride))


def all_reduce_seconds(size: float, ranks: int, links: Links, *, stride: int = 1) -> float:
    """Two-level all-reduce: reduce-scatter within each node, all-reduce between nodes, all-gather within each node.

    Each level is a ring of n ranks: 2(n − 1)/n · size / bandwidth + 2(n − 1) · latency. For the arguments see `Collective`.
    """
    inside = _inside(ranks, links, stride)
    levels = ((inside, size, links.node_gbps), (-(-ranks // inside), size / inside, links.network_gbps))
    return sum(2 * (n - 1) / n * part / (gbps * 1e9) + 2 * (n - 1) * LATENCY_SECONDS for n, part, gbps in levels)


def exchange_seconds(size: float, ranks: int, links: Links, *, stride: int = 1) -> float:
    """All-to-all in which each rank has `size` bytes, of which it keeps 1/n. What goes to other nodes crosses the network."""
    inside = _inside(ranks, links, stride)
    within = (inside - 1) / ranks * size / (links.node_gbps * 1e9)
    between = (ranks - inside) / ranks * size / (links.network_gbps * 1e9)
    return within + between + (ranks - 1) * LATENCY_SECONDS


class Collective(NamedTuple):
    """A collective of a group of ranks.

    Attributes:
        kind: all_gather stands for reduce_scatter too, which sends as much; exchange: messages within a node; pass_on: messages
            to another node.
        size: bytes of the whole tensor; in an all_to_all, of what a rank has; of other messages, what a rank sends.
        stride: distance between neighbouring ranks of the group.
        each: in each micro-batch, not once in a step.
        overlap: the share of a micro-batch's computation behind which it runs: 0 after it. None: computation waits for it.
    """

    purpose: str
    kind: Literal["all_gather", "all_reduce", "all_to_all", "broadcast", "exchange", "pass_on"]
    size: float
    ranks: int = 2
    stride: int = 1
    each: bool = False
    overlap: float | None = None

    def sent(self, micro_batches: int) -> float:
        """Bytes that a rank sends in a step of so many micro-batches, over rings."""
        parts = {"all_gather": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}.get(self.kind)
        size = self.size if parts is None else parts * (self.ranks - 1) / self.ranks * self.size
        return size * (micro_batches if self.each else 1)

    def seconds(self, links: Links) -> float:
        """Of one time."""
        if self.kind == "all_to_all":
            return exchange_seconds(self.size, self.ranks, links, stride=self.stride)
        if self.kind in ("all_gather", "all_reduce"):
            whole = all_reduce_seconds(self.size, self.ranks, links, stride=self.stride)
            return whole if self.kind == "all_reduce" else whole / 2
        within = self.kind == "exchange" or (self.kind == "broadcast" and links.devices_per_node >= self.stride * self.ranks)
        return self.size / ((links.node_gbps if within else links.network_gbps) * 1e9)


# -- collectives of a rank --------------------------------------------------------------------------------------------


def fullest_stage(settings: RunSettings) -> Weights:
    """A tensor-parallel rank's part of the weights of the rank of the pipeline that has most."""
    held = (weights_of_rank(settings, rank) for rank in range(settings.layout.pipeline.ranks))
    return max(held, key=lambda each: sum(weight.split for weight in each))


def collectives_of_rank(settings: RunSettings, rank: int, *, cuda: bool) -> list[Collective]:
    """What a rank of the pipeline sends in a step.

    Numbers are left out: sums of the loss and of gradient norms, gradients of norms between tensor-parallel ranks.
    """
    layout, optimizer = settings.layout, settings.optimizer
    weights, sharing, tp = weights_of_rank(settings, rank), layout.divisor("parameters"), layout.tensor_parallel
    apart = tuple(weight for weight in weights if weight.experts and settings.experts_apart)
    local = tuple(weight for weight in weights if weight not in apart)
    found: list[Collective] = []
    if layout.expert > 1:
        found += _of_experts(settings, rank)
    if apart and (holders := settings.holders(sharing)) > 1:
        sizes = (*gathered_bytes(apart, *settings.sizes), reduced_bytes(apart))
        found += fsdp_collectives(*sizes, holders, stride=layout.expert, kept=layout.kept)
    if tp > 1 or layout.context > 1:
        found += _of_split_blocks(settings, rank) + _of_convolutions(settings, rank)
    if tp > 1:  # FSDP2 sums the gradients of replicated weights when it scatters them; else their norm and the update both do
        replicated = (
            *(".ahead.weight", ".query_latent.weight", ".rotary_key.weight"),
            *(".attention_convolution.weight", ".mlp_convolution.weight"),
        )
        size = reduced_bytes(tuple(weight for weight in local if weight.name.endswith(replicated)))
        each = sharing > 1 and not layout.kept.gradients
        found += [Collective("tensor parallel", "all_reduce", size, tp, each=each)] * (1 if sharing > 1 else 2)
    if layout.pipeline.ranks > 1:
        found += _of_stages(settings, rank, local)
    if sharing > 1:
        blocks, others = gathered_bytes(local, *settings.sizes)
        if isinstance(settings.model, GPTConfig) and not (settings.model.tie_embeddings or layout.kept.weights):
            looked_up = sum(stage.first + stage.ahead for stage in stages_of_rank(settings, rank))
            others += gathered_bytes(_embedding(local), *settings.sizes)[1] * max(0, looked_up - 1)
        found += fsdp_collectives(blocks, others, reduced_bytes(local), sharing, stride=tp, kept=layout.kept)
    if layout.replicate > 1 or layout.shards in ("optimizer", "gradients"):
        purpose, ranks = "gradients scattered, weights gathered", layout.shard
        if layout.replicate > 1:
            purpose, ranks = "gradients all-reduced", layout.replicate
        whole = reduced_bytes(local) if sharing > 1 else stored_bytes(local, settings.weight_bytes, trainable=True)
        whole += average_bytes(apart)
        stride = layout.data_parallel * layout.context // ranks * tp
        found.append(Collective(purpose, "all_reduce", whole / sharing, ranks, stride, overlap=2 / 3))
    if optimizer.is_muon:
        muon = MuonWork.of(weights_of_rank(settings, rank, whole=True), layout, normuon=optimizer.normuon)
        found += muon_collectives(muon, settings.weight_bytes, optimizer.newton_schulz_bytes(cuda=cuda))
    return found


def _embedding(weights: Weights) -> Weights:
    return tuple(weight for weight in weights if weight.part == "token embedding")


def fsdp_collectives(
    blocks: float, others: float, gradients: float, ranks: int, *, stride: int, kept: KeptWhole
) -> list[Collective]:
    """FSDP2's all-gathers and reduce-scatters.

    With gradients as wide as the weights and resharding, these are at most 1.5 times the bytes of DDP in a step of one
    micro-batch.

    Args:
        blocks: bytes of the blocks' weights as they are gathered (2 per element of a matrix under bf16-mixed).
        others: the same of embedding, for each of its uses, last norm and head, which backward does not gather again.
        gradients: bytes of the whole gradients in the dtype of the reduction, fp32.
        ranks: that shard the parameters.
    """
    gathers = (blocks, others) if kept.weights else (blocks, blocks, others)
    sizes = [*((size, not kept.weights) for size in gathers), (gradients, not kept.gradients)]
    purpose = "weights gathered, gradients scattered"
    return [Collective(purpose, "all_gather", size, ranks, stride, each, overlap=1.0) for size, each in sizes]


def muon_collectives(work: MuonWork, parameter_bytes: int, iterate_bytes: int) -> list[Collective]:
    """Muon's exchange: the mean of the ranks, which differ by the work that they own.

    Each rank's parts travel to the owners, along one dimension after the other, and back; then to the other replicas. Divided
    experts are gathered instead.
    """
    size = sum(map(math.prod, work.matrices)) * iterate_bytes
    heights = 4 * sum(shape[0] for shape in work.matrices)  # NorMuon's numbers
    muon = partial(Collective, "Muon's updates", overlap=0.0)
    found, stride = [], 1
    for n in work.dimensions:
        found += 2 * [muon("all_to_all", size / (work.shards * work.rows), n, stride)]
        found += [muon("all_reduce", heights, n, stride)] * work.normuon
        stride *= n
    if work.rows > 1:
        found.append(muon("broadcast", size / work.shards, work.rows, stride))
        found += [muon("all_reduce", heights, work.rows, stride)] * work.normuon
    if divided := [stack for stack in work.stacks if work.divides(stack)]:
        size = sum(map(math.prod, divided)) // work.expert * parameter_bytes
        found.append(muon("all_gather", size, work.shards // work.expert, work.expert))
    return found


def _layers(settings: RunSettings, rank: int) -> list[int]:
    """The blocks of a rank of the pipeline, also those that predict ahead."""
    return [i for stage in stages_of_rank(settings, rank) for i in stage.layers]


def _forward_passes(settings: RunSettings, layers: list[int], *, attention: bool = False) -> int:
    """How often these blocks, or only their `attention`, run forward in a micro-batch: recomputed ones send once more."""
    from lit_llm.distributed.activation_checkpointing import recomputes  # imports torch

    mode = settings.compute.activation_checkpointing
    if mode in ("cheap", "attention"):
        return len(layers) * (2 if attention and mode == "attention" else 1)
    return len(layers) + sum(recomputes(mode, i) for i in layers)


def _of_experts(settings: RunSettings, rank: int) -> list[Collective]:
    """The rows that ranks send to each other's experts and get back, if all experts have equally many.

    Each layer sends inputs and results, and backward their gradients: that of the inputs in the dtype of the residual stream. A
    recomputed block sends once more forward. A rank keeps 1 / ranks of its rows.
    """
    model, layout, (wide, narrow) = settings.gpt, settings.layout, settings.sizes
    assert model.moe is not None
    layers = [i for i in _layers(settings, rank) if model.layer(i).experts]
    forward = _forward_passes(settings, layers)
    rows = settings.sequences * settings.local_length // layout.tensor_parallel * model.moe.top_k
    moved = rows * model.n_embd * (forward * 2 * narrow + len(layers) * (narrow + wide))
    numbers = 4 * model.moe.experts * forward
    return [Collective("rows to experts and back", "all_to_all", size, layout.expert, each=True) for size in (moved, numbers)]


def _of_split_blocks(settings: RunSettings, rank: int) -> list[Collective]:
    """What the blocks of a rank send in each micro-batch, because ranks share their matrices or positions.

    Tensor parallelism: each layer gathers the outputs of two norms, in the parameters' dtype, and scatters two results of
    matrix products; the backward pass does the reverse. The embedding scatters, the last norm gathers, and the loss gathers
    three fp32 numbers a token from each rank, once more for each token ahead. Every rank has the latents of keys and values,
    and sums their gradients, once from each of the two projections.

    Positions: attention exchanges keys and values, forward and backward as much.

    A recomputed block sends forward once more; with tensor parallelism up to the last product.
    """
    model, layout = settings.gpt, settings.layout
    layers, (wide, narrow), found = _layers(settings, rank), settings.sizes, list[Collective]()
    tokens, tp, context = settings.sequences * settings.local_length, layout.tensor_parallel, layout.context
    gathers_keys = layout.context_attention == "gather"
    if tp > 1:
        stages = stages_of_rank(settings, rank)
        first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        stream, product = (float(tokens * model.n_embd * size) for size in (wide, narrow))
        ahead = sum(stage.ahead for stage in stages)
        sizes = [stream] * 2 * (first + last + 2 * ahead)
        for i in layers:
            # Experts compute the rank's own positions. Shared ones are split as an MLP is.
            has_mlp = not model.layer(i).experts or (model.moe is not None and model.moe.shared_experts > 0)
            sizes += [stream, product] * (4 if has_mlp else 2)
            if _forward_passes(settings, [i]) > 1:
                sizes += [stream, product, stream] if has_mlp else [stream, product]
        if first and model.position == "learned":  # gradients of the positions that a batch uses
            sizes.append(settings.local_length * model.n_embd * wide)
        sizes += [12 * tokens * tp] * (last + ahead)
        found += [Collective("tensor parallel", "all_gather", size, tp, each=True) for size in sizes]
        if model.latent is not None:
            size = 2 * tokens * (context if gathers_keys else 1) * model.latent.kv_rank * narrow * len(layers)
            found.append(Collective("tensor parallel", "all_reduce", size, tp, each=True))
    if context > 1:
        head = model.widest_head / tp
        if not gathers_keys:
            values = tokens * 2 * (model.n_head + model.kv_heads) * head  # queries, keys and values there, the result back
        elif model.latent is not None:
            values = tokens * context * (model.latent.kv_rank + model.latent.rope_head_dim)
        else:
            values = 2 * tokens * context * model.kv_heads * head  # keys and values of the whole sequence
        passes = len(layers) + _forward_passes(settings, layers, attention=True)
        sent = passes * (context - 1) / context * (values * narrow)
        found.append(Collective("keys and values between ranks of a sequence", "exchange", sent, each=True))
    return found


def _of_convolutions(settings: RunSettings, rank: int) -> list[Collective]:
    """The positions before a rank's, which convolutions need: forward, backward as much, and forward again if recomputed.

    Each rank sends the last n - 1 positions of its pieces (`lit_llm.models.short_convolution`): all channels of the inputs of
    attention and MLP, which tensor-parallel ranks share by positions, and this rank's channels of queries, keys and values.
    """
    model, layout = settings.gpt, settings.layout
    tp, (wide, narrow) = layout.tensor_parallel, settings.sizes
    layers = _layers(settings, rank)
    heads = (model.n_head + 2 * model.kv_heads) * model.resolved_head_dim // tp
    chunks = 2 if layout.context_attention == "gather" and layout.context > 1 else 1
    found = list[Collective]()
    for positions, bytes_each, ranks, forward in (
        (model.input_convolution, 2 * model.n_embd * wide, tp, _forward_passes(settings, layers)),
        (model.qkv_convolution, heads * narrow, 1, _forward_passes(settings, layers, attention=True)),
    ):
        if positions is None:
            continue
        before = min(positions - 1, settings.local_length // chunks // ranks)
        of_chunk = min(positions - 1, ranks * before)
        for sharing, stride, rows in ((ranks, 1, ranks * before), (layout.context, tp, layout.context * of_chunk)):
            size = float(settings.sequences * chunks * rows * bytes_each * (len(layers) + forward))
            if sharing > 1:
                found.append(Collective("earlier positions for convolutions", "all_gather", size, sharing, stride, each=True))
    return found


def _of_stages(settings: RunSettings, rank: int, local: Weights) -> list[Collective]:
    """Activations to the next stage and gradients to the one before; an embedding's gradient between first and last rank."""
    layout, model, weight_bytes = settings.layout.pipeline, settings.gpt, settings.weight_bytes
    tokens = settings.sequences * settings.local_length / settings.layout.tensor_parallel
    stages, last = layout.stages_of(rank), layout.stages - 1
    onward = sum(stage < last and layout.rank_of(stage + 1) != rank for stage in stages)
    back = sum(stage > 0 and layout.rank_of(stage - 1) != rank for stage in stages)
    ends, tied = {layout.rank_of(0), layout.rank_of(last)}, 0
    if (model.tie_embeddings or model.predict_ahead) and len(ends) == 2 and rank in ends:
        tied = stored_bytes(_embedding(local), weight_bytes, trainable=True) // settings.layout.divisor("parameters")
    moved, purpose = tokens * model.n_embd * weight_bytes * (onward + back), "activations between stages"
    return [Collective(purpose, "pass_on", moved, each=True), Collective(purpose, "pass_on", tied)]


# -- a step -----------------------------------------------------------------------------------------------------------


def bytes_of_rank(settings: RunSettings, rank: int, *, cuda: bool) -> dict[str, float]:
    """Bytes that a rank of the pipeline sends per optimizer step, by purpose."""
    found: dict[str, float] = defaultdict(float)
    for each in collectives_of_rank(settings, rank, cuda=cuda):
        found[each.purpose] += each.sent(settings.accumulation)
    return {purpose: sent for purpose, sent in found.items() if sent}


def busiest_rank(settings: RunSettings, *, cuda: bool) -> int:
    """The rank of the pipeline that sends most."""
    ranks = range(settings.layout.pipeline.ranks)
    return max(ranks, key=lambda rank: sum(bytes_of_rank(settings, rank, cuda=cuda).values()))


def communicated_bytes(settings: RunSettings, *, cuda: bool) -> dict[str, float]:
    """Bytes that a rank sends per optimizer step, by purpose; with a pipeline, the rank that sends most."""
    return bytes_of_rank(settings, busiest_rank(settings, cuda=cuda), cuda=cuda)


class Exchange(NamedTuple):
    """Seconds of communication of a rank in a step, at full bandwidth.

    Attributes:
        waiting: in the middle of computation, which waits for it.
        behind: computation continues: (seconds, times in a step, share of a micro-batch's computation that they may overlap).
    """

    waiting: float = 0.0
    behind: tuple[tuple[float, int, float], ...] = ()

    @property
    def total(self) -> float:
        return self.waiting + sum(seconds * times for seconds, times, _ in self.behind)

    def exposed(self, micro_batch_seconds: float, least: float, waiting: float) -> float:
        """Seconds that computation waits.

        Args:
            least: the share of communication behind computation that is exposed, however long computation takes.
            waiting: the share of `self.waiting`.
        """
        late = (max(least * s, s - (share * micro_batch_seconds if share else 0.0)) * times for s, times, share in self.behind)
        return self.waiting * waiting + sum(late)


def exchange_of(settings: RunSettings, hardware: Hardware) -> Exchange | None:
    """The communication of a step; with a pipeline, of the rank that sends most. None: the bandwidth is unknown."""
    if settings.layout.devices == 1:
        return Exchange()
    if hardware.node_gbps is None or hardware.network_gbps is None:
        return None
    links = Links(hardware.node_gbps, hardware.network_gbps, hardware.devices_per_node)
    waiting, behind = 0.0, defaultdict[tuple[bool, float], float](float)
    times = {True: settings.accumulation, False: 1}
    for each in collectives_of_rank(settings, busiest_rank(settings, cuda=hardware.is_gpu), cuda=hardware.is_gpu):
        if each.overlap is None:
            waiting += each.seconds(links) * times[each.each]
        else:
            behind[each.each, each.overlap] += each.seconds(links)
    return Exchange(waiting, tuple((seconds, times[every], share) for (every, share), seconds in behind.items()))
