"""The lock of a run folder: two real processes, killed owners, owners on other hosts, and what the lock must not disturb."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fork_server
import pytest
from recipe_runs import breaking, run

from lit_llm.core.errors import UserError
from lit_llm.runs import lock as lock_module
from lit_llm.runs.lock import LOCK, RunLock, sign_of_life

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from lit_llm.runs.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("acquired", flush=True)
time.sleep(300)
"""
SLOW = """
import time
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_start(self, trainer, *_):
        print("a step begins", flush=True)
        time.sleep(300)
"""


def start(*command: str, cwd: Path) -> fork_server.Popen:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)]),
    }
    command = (sys.executable, *command)
    return fork_server.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(process: fork_server.Popen, line: str) -> None:
    """Returns when a line of the output contains `line`. After 5 minutes all processes print their stacks and end."""
    assert process.stdout is not None
    overdue = threading.Timer(300, os.killpg, [process.pid, signal.SIGABRT])
    overdue.start()
    try:
        for printed in process.stdout:
            if line in printed:
                return
    finally:
        overdue.cancel()
    raise AssertionError(f"the process ended without printing {line!r}")


@pytest.fixture
def owner(tmp_path):
    """A process that owns the lock of tmp_path/run."""
    process = start("-c", HOLD, str(tmp_path / "run"), cwd=tmp_path)
    wait_for(process, "acquired")
    yield process
    process.kill()
    process.wait()


def entries(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / LOCK).read_text())


def write_foreign(run_dir: Path, **changes: object) -> Path:
    """The lock of a process on another host."""
    run_dir.mkdir(exist_ok=True)
    foreign = {"pid": 4711, "host": "node17", "machine": "another boot", "started": "123", "since": "2026-01-02T03:04:05+00:00"}
    (run_dir / LOCK).write_text(json.dumps({**foreign, "token": "theirs", **changes}))
    return run_dir / LOCK


def test_a_second_owner_is_refused_with_process_host_and_time(owner, tmp_path):
    with pytest.raises(UserError) as refused:
        RunLock(tmp_path / "run").acquire()
    locked = entries(tmp_path / "run")
    assert locked["pid"] == owner.pid
    for part in (f"process {owner.pid} on {os.uname().nodename}", f"since {locked['since']}", "--run_dir"):
        assert part in str(refused.value)
    assert abs(time.time() - time.mktime(time.strptime(str(locked["since"])[:19], "%Y-%m-%dT%H:%M:%S"))) < 600


def test_the_lock_of_a_killed_process_is_taken_over_with_a_message(owner, tmp_path, capsys):
    owner.send_signal(signal.SIGKILL)
    time.sleep(0.2)  # nobody has waited for it: it is a zombie, whose PID still exists
    assert Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    assert f"process {owner.pid} on" in (said := capsys.readouterr().err) and "no longer runs" in said
    assert entries(tmp_path / "run")["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / "run" / LOCK).exists()


def test_the_sign_of_life_of_an_owner_that_runs_was_killed_is_elsewhere_or_has_ended(owner, tmp_path):
    folder = tmp_path / "run"
    assert sign_of_life(folder).startswith(f"process {owner.pid} on ") and sign_of_life(folder).endswith(" runs")
    owner.kill()
    owner.wait()
    assert sign_of_life(folder).endswith(f" was killed: python -m lit_llm fit --run {folder} --resume auto continues")
    os.utime(write_foreign(folder), times=(time.time() - 7200,) * 2)
    expected = r"process 4711 on node17 \(since .*\) updated lock.json 7,2\d\d s ago; while it runs, it does so every 10 s"
    assert re.fullmatch(expected, sign_of_life(folder))
    (folder / LOCK).unlink()
    assert sign_of_life(folder) == ""


def test_a_reused_process_id_is_recognised_by_its_start_time(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    mine = entries(tmp_path)
    with pytest.raises(UserError):  # this process, started when the lock says
        RunLock(tmp_path).acquire()
    (tmp_path / LOCK).write_text(json.dumps({**mine, "started": str(int(str(mine["started"])) - 1)}))
    other = RunLock(tmp_path)
    other.acquire()
    assert entries(tmp_path)["token"] != mine["token"]
    with pytest.raises(RuntimeError, match="now in use by process"):
        lock.check()
    lock.release()  # not its lock any more
    other.check()
    other.release()


def test_an_owner_on_another_host_runs_if_its_heartbeat_changes(tmp_path):
    file = write_foreign(tmp_path / "run")
    threading.Timer(0.6, os.utime, [file]).start()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"process 4711 on node17 \(since 2026-01-02T03:04:05"):
        RunLock(tmp_path / "run").acquire()
    assert time.monotonic() - began < 30  # half of PATIENCE: it does not wait longer than needed
    assert entries(tmp_path / "run")["token"] == "theirs"


def test_a_lock_of_another_host_without_a_heartbeat_is_taken_over_after_one_wait(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock_module, "PATIENCE", 1.0)
    write_foreign(tmp_path / "run")
    lock = RunLock(tmp_path / "run")
    lock.refuse_if_held()  # as at the start of a launch
    began = time.monotonic()
    lock.acquire()
    assert time.monotonic() - began < 1.0  # not a second time
    assert capsys.readouterr().err.count("waiting up to") == 1
    lock.release()


def test_the_owners_heartbeat_is_the_modification_time_and_stops_for_a_lost_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.05)
    lock = RunLock(tmp_path)
    lock.acquire()
    os.utime(tmp_path / LOCK, (0, 0))
    deadline = time.monotonic() + 20
    while (tmp_path / LOCK).stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / LOCK).stat().st_mtime > 0
    os.utime(write_foreign(tmp_path), (0, 0))
    time.sleep(0.5)
    assert (tmp_path / LOCK).stat().st_mtime == 0
    lock.release()
    assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", ["", '{"pid": 1', "[]", "{}"])
def test_a_lock_whose_writer_was_killed_while_writing_it_is_free(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with RunLock(tmp_path) as lock:
        lock.check()
    assert not (tmp_path / LOCK).exists()


def test_of_many_processes_that_find_a_dead_lock_at_once_one_gets_it(owner, tmp_path):
    owner.kill()
    owner.wait()
    got: list[RunLock] = []
    refused: list[UserError] = []
    barrier = threading.Barrier(8)

    def acquire() -> None:
        lock = RunLock(tmp_path / "run")
        barrier.wait()
        try:
            lock.acquire()
            got.append(lock)
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].check()
    got[0].release()


# -- fit ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [pytest.param(1, id="one process"), pytest.param(2, id="two, started by Lightning", marks=pytest.mark.slow)],
)
def test_a_second_fit_on_a_folder_is_refused_and_a_killed_one_is_followed(folder, capsys, first):
    (folder / "slow.py").write_text(SLOW)
    (folder / "slow.yaml").write_text("trainer:\n  callbacks+:\n  - class_path: slow.Slow\n")
    flags = ["fit", "--config", "tiny.yaml", "--config", "slow.yaml", "--trainer.devices", str(first)]
    process = start("-m", "lit_llm", *flags, cwd=folder)
    try:
        wait_for(process, "a step begins")
        before = sorted(str(path) for path in (folder / "runs" / "tiny").rglob("*"))
        for more in (["--resume", "auto"], [], ["--replace", "true"]):
            code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *more)
            assert code == 2 and f"run folder runs/tiny is in use by process {process.pid} on" in err
            assert err.count("error: ") == 1 and "--run_dir" in err
        assert sorted(str(path) for path in (folder / "runs" / "tiny").rglob("*")) == before
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # both ranks
        process.wait()
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "2")
    assert code == 0 and f"process {process.pid} on" in err and "no longer runs" in err
    assert not (folder / "runs" / "tiny" / LOCK).exists()


def test_the_lock_is_released_whatever_ends_the_run_and_a_replaced_folder_keeps_none(folder, capsys):
    with pytest.raises(KeyError, match="broken"):
        run(capsys, "fit", "--config", "tiny.yaml", *breaking(2))
    assert not Path("runs/tiny", LOCK).exists()
    code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--replace", "true", "--trainer.max_steps", "2")
    assert code == 0
    assert not Path("runs/tiny", LOCK).exists() and not Path("runs/tiny.1", LOCK).exists()
