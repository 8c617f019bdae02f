"""Stragglers on one process, and the basic case on two. Other cases: test_time_ranks.py."""

import pytest
from foreign import fit, run_ranks

from lit_llm.callbacks import Stragglers

SLOW_RANK = """
import time
from lit_llm.callbacks import Stragglers, StopOnSignal

class Slow(Foreign):
    def training_step(self, batch, batch_idx):
        time.sleep(0.2 if self.global_rank == 1 else 0.0)
        return super().training_step(batch, batch_idx)

trainer = make_trainer([StopOnSignal(), Stragglers()], OUT, steps=7, every=2, strategy="ddp", devices=2,
                       use_distributed_sampler=False)
trainer.fit(Slow(steps=7))
report(trainer, rows={step: row for step, row in trainer.logger.rows.items() if "rank/straggler" in row})
"""


def test_one_process_gets_no_row_and_no_hook(tmp_path):
    _, module, rows = fit([Stragglers()], tmp_path)
    assert rows == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


@pytest.mark.slow
def test_of_two_ranks_the_slow_one_is_named_with_its_time(tmp_path):
    for each in run_ranks(SLOW_RANK, tmp_path):
        assert set(each["rows"]) == {"4", "6"}  # not of the first two steps
        for row in each["rows"].values():
            assert row["rank/straggler"] == 1 and row["rank/step_time_max"] >= 0.2
            assert row["rank/step_time_mean"] < row["rank/step_time_max"]
