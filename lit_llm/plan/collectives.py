"""The collectives of a rank in an optimizer step: bytes that the rank sends, and seconds on links within and between nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import NamedTuple

from lit_llm.core.hardware import Hardware
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.models.config import GPTConfig
from lit_llm.plan.micro_batch import stages_work
from lit_llm.plan.optimizer import MuonWork
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.segments import TRAFFIC
from lit_llm.plan.weights import Weights, average_bytes, gathered_bytes, reduced_bytes, stored_bytes

LATENCY_SECONDS = 10e-6
"""Assumed latency of one message in seconds: NCCL takes 5 to 10 microseconds over NVLink, 10 to 20 over InfiniBand."""


class Collective(NamedTuple):
    """Record of one or more calls of a collective in a group of ranks.

    Attributes:
        purpose: the name under which the plan lists the bytes of the calls.
        kind: all_gather (also for a reduce_scatter, which sends as many bytes), all_reduce, all_to_all, broadcast, pass_on
            (a message to another node) or copy (to or from host memory).
        size: bytes of all calls together: for all_gather and all_reduce, of the whole tensors; for all_to_all, of a rank's
            input; for broadcast, pass_on and copy, of a rank's messages.
        ranks: number of ranks of the group.
        stride: distance between the numbers of neighbouring ranks of the group.
        each: whether the calls run in each micro-batch. False: once in an optimizer step.
        overlap: share of a micro-batch's computation during which the calls can run; 0: computation waits for all of their
            seconds. None: the next operations need the results; computation waits for the share `speed.Constants.waiting`.
        calls: number of calls that share `size`. Latencies of calls over rings add up; the messages of all-to-alls overlap.
    """

    purpose: str
    kind: str
    size: float
    ranks: int = 2
    stride: int = 1
    each: bool = False
    overlap: float | None = None
    calls: int = 1

    def sent(self, micro_batches: int) -> float:
        """Return the bytes that a rank sends in an optimizer step of `micro_batches` micro-batches, with ring algorithms."""
        parts = {"all_gather": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}.get(self.kind)
        size = self.size if parts is None else parts * (self.ranks - 1) / self.ranks * self.size
        return size * (micro_batches if self.each else 1)

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds that the `calls` calls take together. `hardware` must have known bandwidths.

        An all-reduce has two levels: reduce-scatter within each node, all-reduce between nodes, all-gather within each node.
        Each level is a ring of n ranks: 2(n − 1)/n · size / bandwidth + 2(n − 1) · latency. An all-gather takes half as long.
        """
        if self.kind == "copy":
            assert hardware.host["copy_gbps"] is not None
            return self.size / (hardware.host["copy_gbps"] * 1e9)
        assert hardware.node_gbps is not None and hardware.network_gbps is not None
        within, between = hardware.node_gbps * 1e9, hardware.network_gbps * 1e9
        # If the distance between neighbours is a whole node, all traffic crosses the network.
        inside = max(1, min(self.ranks, hardware.devices_per_node // self.stride))
        if self.kind in ("all_gather", "all_reduce"):
            levels = ((inside, self.size, within), (-(-self.ranks // inside), self.size / inside, between))
            whole = sum(2 * (n - 1) * (part / n / speed + self.calls * LATENCY_SECONDS) for n, part, speed in levels)
            return whole if self.kind == "all_reduce" else whole / 2
        if self.kind == "all_to_all":  # a rank keeps 1/n; messages to other nodes cross the network
            seconds = ((inside - 1) / within + (self.ranks - inside) / between) * self.size / self.ranks
            return seconds + (self.ranks - 1) * LATENCY_SECONDS
        return self.size / (within if self.kind == "broadcast" and inside == self.ranks else between)


# -- collectives of a rank --------------------------------------------------------------------------------------------


def fullest_stage(settings: PlannedRun) -> Weights:
    """Return the weights of the pipeline rank that stores most elements, as split by tensor and expert parallelism."""
    stages = (settings.weights_of_rank(rank) for rank in range(settings.layout.pipeline.ranks))
    return max(stages, key=lambda each: sum(weight.split for weight in each))


def collectives_of_rank(settings: PlannedRun, rank: int, *, cuda: bool) -> list[Collective]:
    """Return the collectives of the pipeline rank `rank` in an optimizer step. `cuda`: whether the run is on GPUs.

    Small collectives are left out: sums of the loss and of gradient norms, and gradients of norm layers between
    tensor-parallel ranks.
    """
    layout, optimizer, forwards = settings.layout, settings.optimizer, 1 + settings.reference_pass
    weights, sharing, tp = settings.weights_of_rank(rank), layout.divisor("parameters"), layout.tensor_parallel
    apart = tuple(weight for weight in weights if weight.experts and settings.experts_apart)
    local = tuple(weight for weight in weights if weight not in apart)
    collectives: list[Collective] = []
    if layout.expert > 1 or layout.context > 1 or tp > 1:
        collectives += _of_blocks(settings, rank, cuda=cuda)
    if apart and (holders := settings.holders(sharing)) > 1:
        sizes = (*gathered_bytes(apart, *settings.sizes), reduced_bytes(apart))
        collectives += fsdp_collectives(*sizes, holders, stride=layout.expert, kept=layout.kept, forwards=forwards)
    if tp > 1:  # gradients of replicated weights: summed when FSDP2 scatters them, or twice, for their norm and for the update
        replicated = (
            *(".ahead.weight", ".query_latent.weight", ".rotary_key.weight"),
            *(".attention_convolution.weight", ".mlp_convolution.weight"),
        )
        size = reduced_bytes(tuple(weight for weight in local if weight.name.endswith(replicated)))
        each = sharing > 1 and not layout.kept.gradients
        collectives += [Collective("tensor parallel", "all_reduce", size, tp, each=each)] * (1 if sharing > 1 else 2)
    if layout.pipeline.ranks > 1:
        collectives += _of_stages(settings, rank, local)
    if sharing > 1:
        blocks, others = gathered_bytes(local, *settings.sizes)
        if isinstance(settings.model, GPTConfig) and not (settings.model.tie_embeddings or layout.kept.weights):
            looked_up = sum(stage.first + stage.ahead for stage in settings.pipeline_stages(rank))
            others += gathered_bytes(_embedding(local), *settings.sizes)[1] * max(0, looked_up - 1)
        sizes = (blocks, others, reduced_bytes(local))
        collectives += fsdp_collectives(*sizes, sharing, stride=tp, kept=layout.kept, forwards=forwards)
    if layout.replicate > 1 or layout.shards in ("optimizer", "gradients"):
        purpose, ranks = "gradients scattered, weights gathered", layout.shard
        if layout.replicate > 1:
            purpose, ranks = "gradients all-reduced", layout.replicate
        whole = reduced_bytes(local) if sharing > 1 else stored_bytes(local, settings.weight_bytes, trainable=True)
        whole += average_bytes(apart)
        stride = layout.data_parallel * layout.context // ranks * tp
        collectives.append(Collective(purpose, "all_reduce", whole / sharing, ranks, stride, overlap=2 / 3))
    if settings.offloads(cuda=cuda):
        collectives += _host_copies(settings, weights)
    if optimizer.is_muon and layout.devices > 1:
        muon = MuonWork.of(settings.weights_of_rank(rank, whole=True), layout, normuon=optimizer.normuon)
        collectives += muon_collectives(muon, settings.weight_bytes, optimizer.newton_schulz_bytes(cuda=cuda))
    return collectives


def _embedding(weights: Weights) -> Weights:
    return tuple(weight for weight in weights if weight.part == "token embedding")


def fsdp_collectives(
    blocks: float, others: float, gradients: float, ranks: int, *, stride: int, kept: KeptWhole, forwards: int = 1
) -> list[Collective]:
    """Return FSDP2's all-gathers of weights and reduce-scatters of gradients.

    If all weights and gradients are resharded after use, and both have the same dtype, a step of one micro-batch sends at most
    1.5 times the bytes of DDP.

    Args:
        blocks: bytes of all blocks' weights in the gathered dtype (2 per element of a matrix under bf16-mixed).
        others: gathered bytes of the embedding (once for each use), last norm and head, which backward does not gather again.
        gradients: bytes of the whole (unsharded) gradients in fp32, the dtype of the reduction.
        ranks: number of ranks that shard the parameters; `stride`: difference of the numbers of two neighbours of these.
        kept: whether ranks keep whole weights, which they gather once a step, and whole gradients, which they reduce once.
        forwards: number of forward passes in each micro-batch, each of which gathers the weights.
    """
    gathers = (blocks, others) if kept.weights else (*(blocks, others) * forwards, blocks)
    sizes = [*((size, not kept.weights) for size in gathers), (gradients, not kept.gradients)]
    purpose = "weights gathered, gradients scattered"
    return [Collective(purpose, "all_gather", size, ranks, stride, each, overlap=1.0) for size, each in sizes]


def _host_copies(settings: PlannedRun, weights: Weights) -> list[Collective]:
    """Return `cpu_offload`'s copies: of weights from host memory before each gather, of gradients to it after each reduction.

    Weights and gradients are copied in the dtype of the stored weights. When gradients are accumulated, the CPU waits for the
    copy of the gradients (torch 2.13's `foreach_reduce`).
    """
    layout, wide = settings.layout, settings.weight_bytes
    sizes = (*gathered_bytes(weights, wide, wide), stored_bytes(weights, wide, trainable=True))
    calls = fsdp_collectives(*sizes, 1, stride=1, kept=layout.kept, forwards=1 + settings.reference_pass)
    purpose, shards = "weights from and gradients to host memory", layout.divisor("parameters")
    *gathers, reduction = (call._replace(purpose=purpose, kind="copy", size=call.size / shards) for call in calls)
    waits = reduction.each and settings.accumulation > 1
    return [*gathers, reduction._replace(overlap=0.0 if waits else 1.0)]


def muon_collectives(work: MuonWork, parameter_bytes: int, iterate_bytes: int) -> list[Collective]:
    """Return the collectives of Muon's exchange (`lit_llm.optim.exchange`). Sizes are means over the ranks.

    Each matrix has one rank as its owner. All ranks send their shards of the matrix to the owner, along one mesh dimension
    after the other. The owner sends the updates back, and then to the other replicas. If every rank has a shard of each expert,
    the experts are all-gathered instead. An element takes `parameter_bytes` bytes in a stored weight, and `iterate_bytes` in
    Muon's Newton-Schulz iteration and in messages.
    """
    size = sum(map(math.prod, work.matrices)) * iterate_bytes
    heights = 4 * sum(shape[0] for shape in work.matrices)  # bytes of NorMuon's fp32 number per row
    muon = partial(Collective, "Muon's updates", overlap=0.0)
    collectives, stride = [], 1
    for n in work.dimensions:
        collectives += 2 * [muon("all_to_all", size / (work.shards * work.rows), n, stride)]
        collectives += [muon("all_reduce", heights, n, stride)] * work.normuon
        stride *= n
    if work.rows > 1:
        collectives.append(muon("broadcast", size / work.shards, work.rows, stride))
        collectives += [muon("all_reduce", heights, work.rows, stride)] * work.normuon
    if divided := [stack for stack in work.stacks if work.divides(stack)]:
        size = sum(map(math.prod, divided)) // work.expert * parameter_bytes
        collectives.append(muon("all_gather", size, work.shards // work.expert, work.expert))
    return collectives


def _of_blocks(settings: PlannedRun, rank: int, *, cuda: bool) -> list[Collective]:
    """Return the collectives of tensor, context and expert parallelism that pipeline rank `rank` runs in each micro-batch.

    A trace of the blocks counts them, on tensors without values, so all experts get equally many tokens. The trace lacks the
    loss of a vocabulary that tensor parallelism splits. This function adds it: each loss (of the next token, and of each
    further predicted token) gathers three fp32 numbers a token from each rank.
    """
    layout, counts, collectives = settings.layout, stages_work(settings, rank, cuda=cuda).counts[4:], list[Collective]()
    groups = {
        "tensor": ("tensor parallel", layout.tensor_parallel, 1),
        "context": ("between ranks of a sequence", layout.context, layout.tensor_parallel),
        "expert": ("rows to experts and back", layout.expert, 1),
    }
    for (group, kind), size, calls in zip(TRAFFIC, counts[::2], counts[1::2], strict=True):
        purpose, ranks, stride = groups[group]
        if calls:
            collectives.append(Collective(purpose, kind, size, ranks, stride, each=True, calls=calls))
    tokens, tp = settings.sequences * settings.local_length, layout.tensor_parallel
    losses = sum(stage.last + stage.ahead for stage in settings.pipeline_stages(rank)) if tp > 1 else 0
    return [*collectives, *[Collective("tensor parallel", "all_gather", 12 * tokens * tp, tp, each=True)] * losses]


def _of_stages(settings: PlannedRun, rank: int, local: Weights) -> list[Collective]:
    """Return the messages that pipeline rank `rank` sends to other pipeline ranks: activations, their gradients, and the
    gradient of an embedding that the first and the last stage share. `local`: the rank's weights."""
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


def bytes_of_rank(settings: PlannedRun, rank: int, *, cuda: bool) -> dict[str, float]:
    """Return {purpose: bytes that pipeline rank `rank` sends in an optimizer step}."""
    totals: dict[str, float] = defaultdict(float)
    for each in collectives_of_rank(settings, rank, cuda=cuda):
        totals[each.purpose] += each.sent(settings.accumulation)
    return {purpose: sent for purpose, sent in totals.items() if sent}


def busiest_rank(settings: PlannedRun, *, cuda: bool) -> int:
    """Return the number of the pipeline rank that sends most bytes in an optimizer step."""
    ranks = range(settings.layout.pipeline.ranks)
    return max(ranks, key=lambda rank: sum(bytes_of_rank(settings, rank, cuda=cuda).values()))


def communicated_bytes(settings: PlannedRun, *, cuda: bool) -> dict[str, float]:
    """Return {purpose: bytes sent in an optimizer step} of a rank; with a pipeline, of the rank that sends most bytes."""
    return bytes_of_rank(settings, busiest_rank(settings, cuda=cuda), cuda=cuda)


class Exchange(NamedTuple):
    """Record of the seconds of a rank's communication in an optimizer step, at full bandwidth.

    Attributes:
        waiting: seconds of the collectives whose `Collective.overlap` is None.
        behind: for the other collectives, grouped by `overlap`: (seconds of a group once, times that the group runs in a step,
            the group's `overlap`, which is a share of a micro-batch's computation).
    """

    waiting: float = 0.0
    behind: tuple[tuple[float, int, float], ...] = ()

    @property
    def total(self) -> float:
        return self.waiting + sum(seconds * times for seconds, times, _ in self.behind)

    def exposed(self, micro_batch_seconds: float, least: float, waiting: float) -> float:
        """Return the exposed seconds of a step: those in which computation waits for communication.

        Args:
            micro_batch_seconds: seconds of computation of a micro-batch.
            least: the share of the seconds in `behind` that is exposed at least, even if computation takes much longer.
            waiting: the share of the seconds `self.waiting` that is exposed.
        """
        late = (max(least * s, s - (share * micro_batch_seconds if share else 0.0)) * times for s, times, share in self.behind)
        return self.waiting * waiting + sum(late)


def exchange_of(settings: PlannedRun, hardware: Hardware) -> Exchange | None:
    """Return the seconds that a rank (in a pipeline, `busiest_rank`) communicates in a step. None: a bandwidth is unknown."""
    offloads = settings.offloads(cuda=hardware.is_gpu)
    needed = (hardware.node_gbps, hardware.network_gbps) if settings.layout.devices > 1 else ()
    if None in (*needed, hardware.host["copy_gbps"] if offloads else 0.0):
        return None
    waiting, behind = 0.0, defaultdict[tuple[bool, float], float](float)
    times = {True: settings.accumulation, False: 1}
    for each in collectives_of_rank(settings, busiest_rank(settings, cuda=hardware.is_gpu), cuda=hardware.is_gpu):
        if each.overlap is None:
            waiting += each.seconds(hardware) * times[each.each]
        else:
            behind[each.each, each.overlap] += each.seconds(hardware)
    return Exchange(waiting, tuple((seconds, times[every], share) for (every, share), seconds in behind.items()))
