"""Two ranks with other settings or other data end before the first step, and name what differs; what may differ does not."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fork_server
import pytest
import torch.distributed as dist
from ports import free_port

from lit_llm.core.errors import UserError
from lit_llm.training import meeting

ROOT = Path(__file__).parents[2]


def ranks(folder: Path, *further: str, flags: tuple[str, ...] = (), other: Path | None = None) -> Iterator[fork_server.Popen]:
    """Two ranks, each started when it is asked for. Rank 1 has further flags, and may start in another folder."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    words = ["fit", "--config", "tiny.yaml", "--trainer.devices", "2", "--run_dir", str(folder / "runs" / "pair"), *flags]
    for rank in (0, 1):
        yield fork_server.Popen(
            [sys.executable, "-m", "lit_llm", *words, *(further if rank else ())],
            cwd=other if rank else folder,
            env={**os.environ, **common, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def fit(folder: Path, *further: str, flags: tuple[str, ...] = (), other: Path | None = None) -> tuple[list[int], str]:
    """Exit codes and output of two ranks."""
    started = list(ranks(folder, *further, flags=flags, other=other))
    said = [rank.communicate(timeout=120)[0] for rank in started]
    return [rank.returncode for rank in started], "".join(said)


@pytest.mark.slow
def test_rank_0_says_where_and_for_whom_it_waits_and_trains_when_the_other_has_come(folder):
    both = ranks(folder)
    first = next(both)
    line = next(line for line in first.stdout if line.startswith("note: rank 0 waits"))
    assert "127.0.0.1:" in line and line.endswith("for 1 of 2 ranks to start: 1\n")
    second = next(both)
    assert "training ended" in first.communicate(timeout=120)[0] and second.wait(timeout=120) == first.returncode == 0


@pytest.fixture
def elsewhere(folder):
    """Another folder with the same recipe and text."""
    there = folder / "elsewhere"
    there.mkdir()
    for name in ("tiny.yaml", "text.txt"):
        (there / name).write_bytes((folder / name).read_bytes())
    return there


MESH = ("--trainer.strategy", "{class_path: lit_llm.distributed.mesh_strategy.MeshStrategy}")


@pytest.mark.parametrize(
    ("further", "names"),
    [
        (
            ("--optimizer.lr", "0.003", "--data.seed", "3"),
            ("optimizer.lr is 0.01 on rank 0", "data.seed is 0"),
        ),
        pytest.param(MESH, ("trainer.strategy is",), marks=pytest.mark.slow),
        pytest.param(("--trainer.devices", "1"), ("rank 1: 2 processes are launched",), marks=pytest.mark.slow),
        pytest.param(("--typo", "1"), ("rank 1: unknown key typo",), marks=pytest.mark.slow),
    ],
)
def test_settings_of_one_rank_are_named_before_the_first_step_and_nothing_is_written(folder, further, names):
    codes, said = fit(folder, *further)
    assert codes == [2, 2] and "step 1/" not in said and "Traceback" not in said, said
    for name in names:
        assert said.count(f"error: {name}") == 1, said
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_ranks_that_torchrun_starts_again_meet_anew_in_the_store_that_outlives_them(monkeypatch):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = SimpleNamespace(main_address="127.0.0.1", main_port=agent.port)
    trainer = SimpleNamespace(global_rank=0, world_size=1, strategy=SimpleNamespace(cluster_environment=address))
    variables = {"RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": str(agent.port)}.items():
        monkeypatch.setenv(name, value)

    def start(number):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setattr(meeting, "_meetings", itertools.count())

    start(0)
    meeting.tell_failure(RuntimeError("no disk"))
    start(0)
    with pytest.raises(UserError, match="no disk"):
        meeting.meet(trainer, {})
    start(1)
    assert meeting.meet(trainer, {}) is not None


@pytest.mark.slow
def test_a_text_of_the_same_name_and_size_with_other_content_is_named(folder, elsewhere):
    text = (folder / "text.txt").read_bytes()
    (elsewhere / "text.txt").write_bytes(text.replace(b"line 7 ", b"lime 7 "))
    codes, said = fit(folder, other=elsewhere)
    assert codes == [2, 2] and said.count("error: data file text.txt is ") == 1 and "step 1/" not in said, said


@pytest.mark.slow
def test_ranks_may_have_the_same_text_elsewhere_and_differ_in_what_concerns_their_machine(folder, elsewhere):
    (elsewhere / "text.txt").rename(elsewhere / "copy.txt")
    own = ("--data.paths", str(elsewhere / "copy.txt"), "--data.num_workers", "1", "--data.cache_dir", str(elsewhere / "cache"))
    codes, said = fit(folder, *own, "--log_dir", "logs", other=elsewhere)
    assert codes == [0, 0], said
