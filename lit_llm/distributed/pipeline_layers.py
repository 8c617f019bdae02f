"""The layers and the rank of each stage of a pipeline, and checks of the settings. Without torch, for the planner."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lit_llm.core.number_text import counted

Schedule = Literal["1f1b", "interleaved1f1b", "zbv", "dualpipev", "gpipe"]


class ScheduleKind(NamedTuple):
    """Record of the properties of one of the pipeline schedules of torch.distributed.pipelining."""

    torch_name: str
    stages: int | None
    """The number of stages on each rank; None: the user's choice, 2 by default."""
    folds: bool = False
    """Whether the second stages of the ranks are in reverse order (a "V"), so that rank 0 has the first and the last stage."""
    splits_backward: bool = False
    """Whether the gradients of weights are computed later than the gradients of activations."""


KINDS: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("GPipe", 1),
    "1f1b": ScheduleKind("1F1B", 1),
    "interleaved1f1b": ScheduleKind("Interleaved1F1B", None),
    "zbv": ScheduleKind("ZBVZeroBubble", 2, folds=True, splits_backward=True),
    "dualpipev": ScheduleKind("DualPipeV", 2, folds=True, splits_backward=True),
}


class PipelineLayout(NamedTuple):
    """Record of the settings of pipeline parallelism: ranks, schedule, stages per rank, layers of the first and last stage."""

    ranks: int
    schedule: Schedule = "1f1b"
    stages_per_rank: int | None = None
    """Stages on each rank. None: 1, or 2 if the schedule needs several."""
    layers_first: int | None = None
    """The number of layers in the first stage. None: chosen so that stages are balanced."""
    layers_last: int | None = None
    """The number of layers in the last stage. None: chosen so that stages are balanced."""

    @property
    def stages(self) -> int:
        """The number of stages of all ranks together."""
        return self.ranks * (self.stages_per_rank or KINDS[self.schedule].stages or 2)

    def rank_of(self, stage: int) -> int:
        """The rank of stage number `stage`. Four stages on two ranks: 0, 1, 0, 1, or 0, 1, 1, 0 if the schedule is a "V"."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if KINDS[self.schedule].folds and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The numbers of the stages that a rank has, ascending."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def layers(self, n_layer: int) -> list[range]:
        """The numbers of each stage's layers: one or more, about equally many if embedding and head count as a layer each.

        Layers that are left over after an even division go to middle stages, else to the first stage, which stores most
        activations, else to the last stage, which computes the loss.
        """
        stages = self.stages
        assert not self.layer_problems(n_layer)
        counts = [1] * stages
        given = {0: self.layers_first, stages - 1: self.layers_last}
        for stage, layers in given.items():
            counts[stage] = layers or 1
        open_stages = [stage for stage in (*range(stages - 2, 0, -1), 0, stages - 1) if given.get(stage) is None]
        for _ in range(n_layer - sum(counts)):
            chosen = min(open_stages, key=lambda stage: counts[stage] + (stage in given))
            counts[chosen] += 1
        ends = [sum(counts[: stage + 1]) for stage in range(stages)]
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def problems(self) -> list[str]:
        """A list with a sentence if `stages_per_rank` is a number that the schedule does not allow; else empty."""
        stages = KINDS[self.schedule].stages
        if self.stages_per_rank is None or stages in (None, self.stages_per_rank):
            return []
        return [
            f"stages_per_rank is {self.stages_per_rank}, but schedule {self.schedule} has {stages} "
            f"(--trainer.strategy.stages_per_rank {stages}, or --trainer.strategy.schedule interleaved1f1b)"
        ]

    def layer_problems(self, n_layer: int) -> list[str]:
        """A list with a sentence if a model of `n_layer` layers cannot be cut into the stages; else empty."""
        given = {"layers_first": self.layers_first, "layers_last": self.layers_last}
        chosen = {name: layers for name, layers in given.items() if layers is not None}
        rest, others = n_layer - sum(chosen.values()), self.stages - len(chosen)
        if rest == others == 0 or rest >= others > 0:
            return []
        flag = "--trainer.strategy"
        if n_layer < self.stages:
            enough, fewer = sum(chosen.values()) + others, max(1, n_layer * self.ranks // self.stages)
            fits = not self._replace(ranks=fewer).layer_problems(n_layer)
            smaller = f"{flag}.pipeline {fewer}" if fits else f"a smaller {flag}.pipeline"
            one_each = (
                ""
                if KINDS[self.schedule].stages == 1
                else f", or {flag}.schedule 1f1b {flag}.stages_per_rank null for fewer stages"
            )
            return [
                f"pipeline={self.ranks} with schedule {self.schedule} has {self.stages} stages of at least one layer, but "
                f"model.n_layer is {n_layer} (--model.n_layer {enough}, or {smaller}{one_each})"
            ]
        named = " and ".join(f"{name} {layers}" for name, layers in chosen.items())
        return [
            f"{named} leave {max(0, rest)} of {n_layer} layers (model.n_layer) to {counted(others, 'other stage')} of at least "
            f"one layer each ({' '.join(f'{flag}.{name} null' for name in chosen)})"
        ]

    def runs(self, micro_batches: int) -> bool:
        """Whether the schedule can run `micro_batches` micro-batches per data-parallel rank in a step, by torch's rules."""
        if self.schedule == "interleaved1f1b":
            return micro_batches % max(1, micro_batches // self.ranks) == 0
        return micro_batches >= (self.stages if self.schedule in ("1f1b", "dualpipev") else 1)

    def needs(self, micro_batches: int) -> str:
        """The error message for a step with `micro_batches` micro-batches, a number that the schedule cannot run."""
        number = f"at least {self.stages}"
        if self.schedule == "interleaved1f1b":
            number = f"a multiple of {self.ranks}"
        return (
            f"pipeline={self.ranks} with schedule {self.schedule} needs {number} micro-batches in a step, but it has "
            f"{micro_batches} (--trainer.strategy.schedule gpipe works with any number)"
        )
