"""The launcher: its ranks connect, and all end after a failure or a timeout."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from launch import run_ranks

MEET = """
import os, sys, torch, torch.distributed as dist
from launch import report
import lit_llm

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
report(total=total, rank=dist.get_rank(), local=int(os.environ["LOCAL_RANK"]), arguments=sys.argv[1:])
dist.destroy_process_group()
"""

# Rank 1 fails (or waits) while rank 0 waits for it. Each first writes its process id.
WAIT = """
import os, sys, time
from pathlib import Path

Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
if sys.argv[1] == "raise" and os.environ["RANK"] == "1":
    while not Path("pid-0").exists() or not Path("pid-0").read_text():
        time.sleep(0.01)
    raise ValueError("the reason")
print("waiting for the others", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_meet_and_report_in_order(ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(MEET, ranks, tmp_path, "a b", 3)
    for rank, each in enumerate(reports):
        assert torch.equal(each.pop("total"), torch.tensor([ranks * (ranks + 1) // 2]))
        assert each == {"rank": rank, "local": rank, "arguments": ["a b", "3"]}
    assert len(reports) == ranks


@pytest.mark.slow
def test_ranks_do_not_inherit_the_seed_of_an_earlier_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("KEPT", "yes")
    script = "import os; from launch import report; report(names=[n for n in os.environ if n == 'KEPT' or n.startswith('PL_')])"
    assert run_ranks(script, 1, tmp_path) == [{"names": ["KEPT"]}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout", "message"),
    [("raise", 60, "rank 1, exit code 1:\n.*the reason"), ("wait", 4, "rank 1, killed:\nwaiting for")],
)
def test_all_processes_end_after_a_failure_or_a_timeout(how: str, timeout: float, message: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        run_ranks(WAIT, 2, tmp_path, how, timeout=timeout)
    assert time.monotonic() - began < 50  # not the script's 600 s
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


@pytest.mark.slow
def test_a_script_that_ends_without_a_report_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import os\nfrom launch import report\nif os.environ['RANK'] == '0': report(done=True)")
    with pytest.raises(AssertionError, match="no report\nrank 1, exit code 0"):
        run_ranks(script, 2, tmp_path)
