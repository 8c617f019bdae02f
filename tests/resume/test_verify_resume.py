"""The command verify-resume: equal runs get a certificate, different ones do not."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fork_server
import matrix
import pytest

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.commands import verify_resume
from lit_llm.runs import comparison
from lit_llm.training.sample_ledger import SampleLedger

RECIPE = ["verify-resume", "--config", "recipe.yaml", "--trainer.callbacks", "null", "--model.dropout", "0.2", "--steps", "10"]
DDP = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
FSDP2 = ["--config", str(matrix.OVERLAYS / "fsdp2.yaml"), "--trainer.devices", "2", "--sharded_checkpoints", "true"]


@pytest.fixture
def forked(launcher, monkeypatch, folder):
    """Runs are forked after the imports. With two devices, they are started like torchrun would."""

    def launch(arguments: list[str], log: Path, kill_now: Callable[[], bool] | None = None) -> int:
        ranks = 2 if DDP[1] in arguments[arguments.index("--trainer.devices") + 1 :][:1] else 1
        log.unlink(missing_ok=True)
        run = launcher.start(arguments, folder, ranks=ranks, log=str(log))
        while kill_now is not None and run.alive():
            if kill_now():
                run.kill()
                break
            time.sleep(0.002)
        return run.wait()[0]

    monkeypatch.setattr(verify_resume, "launch", launch)
    monkeypatch.chdir(folder)


ONE = ["--trainer.devices", "1", "--data.num_workers", "1"]


@pytest.mark.parametrize(
    ("flags", "kill"),
    [
        pytest.param(ONE, ["--kill"], id="SIGKILL-one"),
        pytest.param(ONE, [], id="SIGTERM-one", marks=pytest.mark.soak),
        pytest.param(DDP, ["--kill"], id="SIGKILL-ddp", marks=pytest.mark.soak),
        pytest.param(DDP, [], id="SIGTERM-ddp", marks=pytest.mark.slow),
        pytest.param(FSDP2, ["--kill"], id="SIGKILL-fsdp2", marks=pytest.mark.slow),
        pytest.param(FSDP2, [], id="SIGTERM-fsdp2", marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_run_with_dropout_gets_a_certificate(forked, capsys, flags, kill):
    code = main([*RECIPE, *flags, *kill])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    for rank in range(int(flags[flags.index("--trainer.devices") + 1])):
        assert f"samples of rank {rank}, by step           10 compared, 0 differ" in out
    step, resumed = int(out.split("interrupted in step ")[1].split()[0]), int(out.split("continued from step ")[1].split()[0])
    assert 1 <= resumed <= step and "certificate" in out


@pytest.mark.parametrize("flags", [[], DDP], ids=["one", "ddp"])
@pytest.mark.soak
def test_fresh_processes_get_a_certificate_too(launcher, folder, monkeypatch, capsys, flags):
    monkeypatch.chdir(folder)
    code = main([*RECIPE, "--kill", *flags])
    out, err = capsys.readouterr()
    assert code == 0 and "exit code -9" in out and "certificate" in out, out + err


class Forgetful(SampleLedger):
    """Changes the weights when a run resumes."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        if trainer.global_step:
            next(pl_module.parameters()).data.mul_(1.001)


def test_a_run_that_differs_gets_no_certificate_and_the_first_difference_is_named(forked, capsys, monkeypatch):
    monkeypatch.setattr(random, "randint", lambda low, high: 6)
    code = main([*RECIPE, "--trainer.devices", "1", "--trainer.callbacks+", "test_verify_resume.Forgetful"])
    out, _ = capsys.readouterr()
    assert code == 1 and "certificate" not in out
    assert "train/loss differs first at 7: " in out and "samples of rank 0 differs" not in out
    assert "Likely: weights, optimizer state or random draws were not restored" in out


def test_a_run_without_checkpoints_gets_no_certificate(forked, capsys):
    code = main([*RECIPE, "--trainer.devices", "1", "--checkpoint", "null"])
    out, err = capsys.readouterr()
    assert code == 2 and "certificate" not in out
    assert "error: the interrupted run saved no checkpoint: set --checkpoint" in err


def test_what_cannot_be_verified_is_refused(forked, capsys, folder):
    before = sorted(folder.iterdir())
    for flags, said in (
        (["--run_dir", "runs/a"], "remove --run_dir"),
        (["--resume=auto"], "remove --resume"),
        (["--steps=1"], "at least 2 (--steps)"),
        (["--steps", "few"], "--steps needs a whole number"),
        (["--trainer.devices", "1", "--model.n_head", "3", "--data.paths", "no.txt"], "error: model.n_head=3 does not divide"),
    ):
        code = main(["verify-resume", "--config", "recipe.yaml", *flags])
        err = capsys.readouterr().err
        assert code == 2 and said in err, err
    assert err.count("error: ") == 2 and "no.txt" in err  # all mistakes, with the names of the recipe
    assert sorted(folder.iterdir()) == before


def test_every_value_of_a_checkpoint_but_those_about_time_is_compared(launcher, folder):
    run = launcher.run(matrix.fit(matrix.CELLS[0], "compared"), folder, log="compared.log")
    assert run.codes == [0], run.said()
    content = read(folder / "compared" / "checkpoints" / "last.ckpt")
    paths = {path for part in content for path, _ in comparison.values(content[part], part)}
    for path in (
        "state_dict.model.head.weight",
        "optimizer_states.0.state.0.momentum_buffer",
        "optimizer_states.0.param_groups.0.lr",
        "callbacks.SpikeGuard.losses.0",
        "callbacks.GradientNorm.clipped",
        "callbacks.Throughput.tokens",
        "callbacks.StepCheckpoint.best_score",
        "TextFiles.consumed_samples",
        "loops.fit_loop.epoch_loop.batch_progress.total.ready",
    ):
        assert path in paths, sorted(paths)


@pytest.mark.slow
def test_ctrl_c_ends_the_run_that_it_verifies(folder, tmp_path):
    """The run is a process group of its own, so a terminal's Ctrl-C does not reach it."""
    words = ["verify-resume", "--config", "recipe.yaml", "--steps", "500", "--trainer.max_steps", "500"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    verify = fork_server.Popen([sys.executable, "-m", "lit_llm", *words], cwd=folder, env=environment)
    end = time.monotonic() + 120
    while not (ledgers := list(tmp_path.glob("verify-resume-*/**/samples-rank0.jsonl"))) and time.monotonic() < end:
        time.sleep(0.05)
    assert ledgers, "the run has not begun"
    verify.send_signal(signal.SIGINT)
    assert verify.wait(60) == 130
    assert list(tmp_path.iterdir()) == [], "the folder of the runs is deleted, and nobody writes into it"
