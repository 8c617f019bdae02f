"""`certify`: cells, outcomes, the certificate, and mistakes in the input."""

import itertools
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from certifying import outcome
from lightning.pytorch.strategies import DDPStrategy

from lit_llm.__main__ import main
from lit_llm.certify import promises
from lit_llm.certify.cells import AXES, cells, layouts
from lit_llm.certify.check import Check, Figure, Group, run_checks, summary
from lit_llm.certify.processes import run_ranks
from lit_llm.commands.certify import fingerprints
from lit_llm.core.errors import UserError
from lit_llm.training.language_model import LanguageModel


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_value_of_each_setting_occurs_with_each_layout():
    for devices, float8 in itertools.product((1, 2, 4, 8), (False, True)):
        tried = {tuple(name.split("/")[1:]) for name in cells(devices, float8=float8)}
        for layout in layouts(devices):
            of = [values for name, *values in tried if name == layout]
            compiled = set() if "expert" in layouts(devices)[layout]["strategy"] else {"compiled"}
            assert {mode for _, mode, _, _ in of} == {"eager"} | compiled
            assert {recomputation for _, _, recomputation, _ in of} == set(AXES["activation_checkpointing"])
            assert {optimizer for *_, optimizer in of} == set(AXES["optimizer"])
            expected = {"32-true", "bf16-mixed", "bf16-true"} | ({"float8"} if float8 and compiled else set())
            assert {precision for precision, *_ in of} == expected


def test_names_are_unique_and_each_job_is_started():
    for devices, device in itertools.product((1, 2, 3, 4, 8), ("cpu", "cuda")):
        names = [check.name for group in promises.groups(devices, device, place=".") for check in group.checks]
        assert len(set(names)) == len(names)
        jobs = [
            (group, check, job)
            for group in promises.groups(devices, device, place=".")
            for check in group.checks
            for job in check.jobs
        ]
        assert all(any(job in of for _, of in group.starts) for group, _, job in jobs)


def test_losses_are_compared_by_step_and_nan_never_passes():
    straight = {"1": 4.0, "2": 2.0}
    assert promises.difference({"1": 4.0, "2": 2.5}, straight) == 0.25
    assert promises.difference({"2": 2.0}, straight, first=2) == 0.0
    assert promises.difference({"1": 4.0}, straight) == float("inf")  # a step is missing
    assert promises.difference({}, {}) == float("inf")  # nothing was shown
    nan = promises.difference({"1": float("nan"), "2": 2.0}, straight)
    assert nan != nan and not Figure(nan, 1.0).value <= 1.0


DOES = {"do": "disk", "place": ".", "mb": 1}


def group(*names: str, figure=lambda found: Figure(0.0, 1.0), required=False, job=DOES) -> Group:
    return Group("p", tuple(Check(name, ("job",), figure, required) for name in names), ((1, {"job": job}),))


def test_what_is_required_fails_if_it_is_skipped_and_what_is_recorded_is_not_passed():
    kinds = [
        group("passed"),
        group("recorded", figure=lambda found: Figure(2.0, unit="GB/s")),
        group("failed", figure=lambda found: Figure(2.0, 1.0)),
        group("nan", figure=lambda found: Figure(float("nan"), 1.0)),
        group("no figure", figure=lambda found: "nothing was compiled"),
        group("needed", figure=lambda found: "nothing was compiled", required=True),
        group("refused", job={"do": "train", "precision": "float8"}),
        group("broken", job={**DOES, "unknown": 1}),
        Group("p", (Check("elsewhere", ("job",), Figure),), unless="there is no GPU"),
    ]
    found, ended = run_checks(kinds, (), "cpu", 100)
    assert ended is None
    assert {each.name: each.outcome for each in found} == {
        **{"passed": "passed", "recorded": "recorded", "failed": "failed", "nan": "failed", "no figure": "skipped"},
        **{"needed": "failed", "refused": "skipped", "broken": "failed", "elsewhere": "skipped"},
    }
    reasons = {each.name: each.reason for each in found}
    assert "required" in reasons["needed"] and "float8" in reasons["refused"] and "TypeError" in reasons["broken"]
    assert summary(found, "m") == "NOT certified: 0 of 1 required and 1 of 8 checks passed, 3 skipped, 4 failed on m"
    assert summary(found[:2], "m") == "certified: 0 of 0 required and 1 of 1 checks passed, 0 skipped, 0 failed on m"


@pytest.mark.slow
def test_a_spent_budget_skips_and_one_that_shows_nothing_is_an_error():
    with pytest.raises(UserError, match=r"too small for one check.*--budget"):
        run_checks([group("a")], (), "cpu", 0.0)
    jobs = {str(i): DOES for i in range(10**4)}  # the reference run: it is interrupted, and what came before stays
    many = Group("p", (Check("b", tuple(jobs), lambda *found: Figure(0.0, 1.0)),), ((1, jobs),))
    found, ended = run_checks([group("a"), many, group("c")], (), "cpu", 4.0)
    assert ended is None and [each.outcome for each in found] == ["passed", "skipped", "skipped"]
    assert "budget" in found[1].reason and "budget" in found[2].reason


def test_a_mistake_within_a_job_does_not_end_the_jobs_after_it(tmp_path):
    jobs = {"bad": {**DOES, "unknown": 1}, "good": DOES}
    found, ended = run_ranks(tmp_path, 1, "cpu", jobs, 60)
    assert found.keys() == {"bad"} and "exit code 1" in ended
    checks = Check("bad", ("bad",), Figure), Check("good", ("good",), lambda found: Figure(0 * found["read"], 1.0))
    two = Group("p", checks, ((1, jobs),))
    assert [each.outcome for each in run_checks([two], (), "cpu", 60)[0]] == ["failed", "passed"]


def test_what_was_shown_before_a_device_died_stays(monkeypatch, capsys):
    start = LanguageModel.on_train_start

    def die(self):
        if os.environ.get("LOCAL_RANK") == "1" and not isinstance(self.trainer.strategy, DDPStrategy):
            os.kill(os.getpid(), signal.SIGKILL)
        start(self)

    monkeypatch.setattr(LanguageModel, "on_train_start", die)
    names = ["losses/ddp/32-true/eager/none/AdamW", "losses/tp/32-true/eager/none/AdamW", "plan/memory/ddp"]
    assert main(["certify", "--devices", "2", "--only", *names]) == 2
    written = json.loads(Path("certificate.json").read_text())
    assert [each["outcome"] for each in written["checks"]] == ["passed", "skipped", "skipped"]
    assert "device 1 was ended by signal 9" in written["ended_early"]
    assert "the certificate has what was shown before" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["waits/host synchronisations", "losses/float8"])
def test_what_needs_a_gpu_is_skipped_with_the_reason_and_never_passed(name):
    found = outcome(name)
    assert found.outcome == "skipped" and ("cpu" in found.reason or "CUDA" in found.reason or "GPU" in found.reason)


PLAIN = "losses/one/32-true/eager/none/AdamW"


def test_the_certificate_has_figures_and_no_host_and_no_path(tmp_path, capsys):
    names = ["waits/host synchronisations", "disk/write", PLAIN]
    assert main(["certify", "--out", "c.json", "--only", *names]) == 0
    out, text = capsys.readouterr().out, (tmp_path / "c.json").read_text()
    written = json.loads(text)
    outcomes = {each["name"]: each["outcome"] for each in written["checks"]}
    assert outcomes == dict(zip(names, ("skipped", "recorded", "passed"), strict=True))
    assert written["machine"].keys() == {"device", "devices", "cores", "versions", "date", "seconds", "code"}
    assert str(tmp_path) not in text and socket.gethostname() not in text and "/tmp" not in text
    assert written["machine"]["code"] == fingerprints()
    assert len(next(each for each in written["checks"] if each["name"] == PLAIN)["details"]["losses"]) == 20
    assert out.splitlines()[-1] == written["said"] and written["said"].startswith(
        "certified in part: 1 of 1 required and 1 of 2 checks passed, 1 skipped, 0 failed on 1 × CPU process, torch "
    )
    kinds = [line.split()[:8] for line in out.splitlines() if line.startswith(("disk  ", "losses  "))]
    assert ["losses", "1", "1", "of", "1", "0", "0", "0"] in kinds


def test_a_failed_check_is_exit_code_1_with_its_command(capsys, monkeypatch):
    monkeypatch.setitem(promises.TOLERANCES, "32-true", -1.0)
    assert main(["certify", "--only", PLAIN]) == 1
    assert f"certify --devices 1 --only '{PLAIN}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--devices", "0"], "devices"),
        (["--budget", "0"], "budget"),
        (["--budget", "nan"], "budget"),
        (["--budget", "1e-7"], "--budget"),
        (["--only", "nothing"], "--only"),
        (["--only", "resume/pp/whole"], "--devices 2"),
        (["--out", "/proc/1/nothing/c.json"], "--out"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(words, key, tmp_path, capsys):
    assert main(["certify", *words]) == 2
    err = capsys.readouterr().err
    assert key in err and err.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_the_first_process_certifies_all_devices_of_one_node(monkeypatch, capsys, tmp_path):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["certify", "--only", "disk/write"]) == 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    main(["certify", "--only", "disk/write"])
    assert json.loads((tmp_path / "certificate.json").read_text())["machine"]["devices"] == 2
    capsys.readouterr()
    assert main(["certify", "--devices", "4"]) == 2 and "--devices" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert main(["certify"]) == 2 and "one node" in capsys.readouterr().err


def test_fewer_gpus_than_asked_for_are_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["certify", "--devices", "2"]) == 2
    assert "devices is 2, but this machine has 1 (--devices)" in capsys.readouterr().err
