"""Rules about what a launch continues: schedule, weights and the optimizer's state."""

from __future__ import annotations

import math
import statistics
from bisect import bisect

from lit_llm.reporting.doctor.finding import JUDGED, ROUGH, error
from lit_llm.reporting.doctor.loss_rules import scatter
from lit_llm.reporting.doctor.observed import Observed


@error.likely(
    "the resumed run did not continue with the same model or data: weights, their order, a setting or the tokenizer differ",
    "compare what was saved with what was loaded, by name (--resume auto restores it); look at decoded batches",
    "train/loss at the step of the resume",
    explains=(*ROUGH, *JUDGED),
)
def loss_jumps_at_resume(run: Observed) -> str | None:
    rows = run.finite("train/loss", least=1)
    for first in (step for step in run.first_steps if step > 10):
        place = bisect(rows, (first, math.inf))
        before, after = ([loss for _, loss in part] for part in (rows[max(0, place - 6) : place], rows[place : place + 4]))
        rise = statistics.median(after) - statistics.median(before) if before and after else 0.0
        if len(before) == 6 and len(after) == 4 and rise > max(0.3, 4 * scatter(before + after)):
            return f"training loss rose by {rise:.2f} when the run was resumed at step {first:,} (usual: at most 0.1)"
    return None
