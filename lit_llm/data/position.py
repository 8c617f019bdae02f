"""The samples and micro-batches of each optimizer step, and the position of a run in its data. Does not need Lightning.

Steps are counted from 0. Samples are numbered from 0 over the whole run and all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_llm.core.batch_sizes import Pipeline, Stages, batch_problem, micro_batch, sequences_before
from lit_llm.core.errors import UserError


@dataclass(frozen=True)
class StepSamples:
    """Computes the samples of each optimizer step, and divides them over data-parallel ranks and micro-batches."""

    stages: Stages  # (first step, samples per step) of each stage of a batch ramp; without a ramp, there is one stage
    most: int | None = None  # the most samples of a micro-batch; None: no limit
    ranks: int = 1  # the number of data-parallel ranks
    pipeline: Pipeline | None = None  # the pipeline, which must be able to run the micro-batches of a step; None: no pipeline
    base: tuple[int, int] = (0, 0)  # steps and samples of the checkpoint from which the run continues

    def size(self, step: int) -> int:
        """Number of samples in the optimizer step ``step``, over all ranks."""
        return next(size for first, size in reversed(self.stages) if first <= step)

    def before(self, step: int) -> int:
        """Number of samples that all ranks read before ``step``: up to the checkpoint (`base`), plus those of steps since."""
        steps, samples = self.base
        return samples + sequences_before(self.stages, step) - sequences_before(self.stages, steps)

    def of_rank(self, step: int, rank: int) -> list[range]:
        """The numbers of the samples in each micro-batch of a rank in a step. Ranks have equal, contiguous shares of a step."""
        size = self.size(step)
        share, micro = size // self.ranks, micro_batch(size, self.most, self.ranks, self.pipeline)
        assert size == share * self.ranks and share % micro == 0
        begin = self.before(step) + rank * share
        return [range(first, first + micro) for first in range(begin, begin + share, micro)]

    def micro_batch(self, step: int) -> int:
        """Number of samples in each micro-batch of one rank in the optimizer step ``step``."""
        return micro_batch(self.size(step), self.most, self.ranks, self.pipeline)

    def micro_batches(self, step: int) -> int:
        """Number of micro-batches of each rank in the optimizer step ``step``."""
        return self.size(step) // (self.micro_batch(step) * self.ranks)

    def micro_batches_before(self, step: int) -> int:
        """Number of micro-batches that each rank would have read before ``step`` if the whole run had these batch sizes."""
        return sequences_before(tuple((first, self.micro_batches(first)) for first, _ in self.stages), step)


def batch_problems(
    batch: int, most: int | None, ranks: int, pipeline: Pipeline | None, *, ramp: Sequence[int] = (), length: int | None = None
) -> list[str]:
    """One sentence for each batch size that the ranks cannot share equally, and one if a ramp does not end at ``batch``.

    Args:
        batch: samples per optimizer step; with a batch ramp, samples per step at the end of the ramp.
        most: the most samples of a micro-batch. None: no limit.
        ranks: number of data-parallel ranks.
        pipeline: the pipeline, which must be able to run the micro-batches of a step. None: no pipeline.
        ramp: tokens per step of each stage of a batch ramp. Empty: no ramp.
        length: tokens per sample. None: the number is not known, so the ramp is not checked.
    """
    if not ramp or length is None:
        ramp, length = [batch], None
    answers = [batch_problem(size, most, ranks, pipeline, length=length) for size in dict.fromkeys(ramp)]
    problems = [answer for answer in answers if answer is not None]
    if length is not None and ramp[-1] % length == 0 and ramp[-1] != batch * length:
        problems.append(
            f"batch_ramp ends with {ramp[-1]} tokens per batch, but global_batch_size {batch} x block_size {length} = "
            f"{batch * length}: the two must be equal (--data.global_batch_size {ramp[-1] // length})."
        )
    return problems


def saved_base(state: Mapping[str, Any]) -> tuple[int, int]:
    """Read (optimizer steps made, samples read by all ranks) at the time of saving from a data module's saved ``state``.

    Raises:
        UserError: one of the two numbers is not a non-negative integer.
    """
    for name in ("consumed_samples", "global_step"):
        count: Any = state.get(name)
        if type(count) is not int or not 0 <= count < 2**63:
            raise UserError(f"the checkpoint has {name} {str(count)[:40]!r}: restore it, or use another one (--resume)")
    return state["global_step"], state["consumed_samples"]


def setting_changes(now: Mapping[str, Any], saved: Mapping[str, Any], changed_text: Callable[[str], str]) -> list[str]:
    """One phrase for each setting whose values in ``now`` and ``saved`` differ. A setting that either lacks is ignored.

    Args:
        now: name → value of the present settings and fingerprints.
        saved: the same, from a checkpoint.
        changed_text: takes the name of a fingerprint that differs, and returns the phrase about the changed text.
    """
    changes = []
    for name, value in now.items():
        if (before := saved.get(name, value)) == value:
            continue
        key = {"batch_ramp": "batch_ramp.tokens_per_batch", "teacher": "the teacher"}.get(name, f"data.{name}")
        is_text = name.startswith("fingerprint")
        changes.append(changed_text(name) if is_text else f"{key} was {before} in the checkpoint and is {value}")
    return changes
