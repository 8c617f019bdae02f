"""`--log_dir`: each rank's output in a file of its own, however it is written and however the process ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs import run

from lit_llm.core.errors import UserError
from lit_llm.training.lost_peer import record_collectives
from lit_llm.training.output_streams import log_to

WRITES = """
import os, signal, subprocess, sys
from pathlib import Path
from lit_llm.training.output_streams import log_to, survive_lost_output
survive_lost_output()  # as every command does
print("before")
log_to(Path("logs") / "new", int(sys.argv[1]), 2)
print("printed")
os.write(1, b"written to 1\\n")
os.write(2, b"written to 2\\n")
subprocess.run(["echo", "by a child"])
print("an error", file=sys.stderr)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(3)
"""
AFTER = {"printed", "written to 1", "written to 2", "by a child", "an error"}


def writes(folder: Path, rank: int, end: str) -> tuple[int, list[str], list[str]]:
    """Exit code, lines of the terminal, lines of the log."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(rank), end], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    log = (folder / "logs" / "new" / f"rank-{rank}.log").read_text().splitlines()
    assert log[0].startswith("---- 20") and f"rank {rank} of 2, process " in log[0]
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()], log[1:]


def test_rank_0_writes_to_its_terminal_and_its_log_and_the_others_to_their_logs(tmp_path):
    code, terminal, log = writes(tmp_path, 0, "exits")
    assert code == 3 and set(log) == AFTER and set(terminal) == {"before"} | AFTER
    assert terminal.index("printed") < terminal.index("by a child"), "each stream keeps its order"
    code, terminal, log = writes(tmp_path, 1, "exits")
    assert code == 3 and set(log) == AFTER and terminal == ["before"]
    code, terminal, log = writes(tmp_path, 0, "killed")  # appends
    assert code == -signal.SIGKILL and log[len(AFTER)].startswith("---- 20") and set(log[-len(AFTER) :]) == AFTER


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^log_dir '.*file' is a file, but must be a folder: .* \(--log_dir DIR\)$"):
        log_to(tmp_path / "file", 1, 2)
    (tmp_path / "rank-1.log").mkdir()
    with pytest.raises(UserError, match=r"cannot have rank-1\.log: "):
        log_to(tmp_path, 1, 2)


def test_a_record_of_collectives_is_kept_unless_the_user_has_set_it(tmp_path, monkeypatch):
    names = ["TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"]
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "5")
    record_collectives(tmp_path / "logs")
    assert [os.environ.get(name) for name in names] == ["1", "5", str(tmp_path / "logs" / "nccl-rank-")]


def test_an_empty_log_folder_is_refused_before_anything_is_written(folder, capsys):
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--log_dir", "")
    assert code == 2 and "log_dir is empty, but must name a folder (--log_dir DIR)" in err
    assert sorted(path.name for path in folder.iterdir() if path.name != "cache") == ["text.txt", "tiny.yaml"]
