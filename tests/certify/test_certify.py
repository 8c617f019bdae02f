"""`certify`: cells, outcomes, the certificate and its page, and mistakes in the input."""

import itertools
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from certifying import outcome

from lit_llm.__main__ import main
from lit_llm.certify import attention, promises
from lit_llm.certify.cells import AXES, PLAIN, cells, layouts, pairwise
from lit_llm.certify.check import Check, Figure, Group, run_checks, summary
from lit_llm.certify.processes import run_ranks
from lit_llm.commands.certify import fingerprints
from lit_llm.core.errors import UserError
from lit_llm.training.language_model import LanguageModel


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_pair_of_values_occurs_in_few_cells():
    for devices in (1, 2, 4, 8):
        axes = {"layout": tuple(layouts(devices)), **AXES}
        plain = [{"layout": layout, **PLAIN} for layout in axes["layout"]]
        chosen = pairwise(axes, plain)
        assert chosen[: len(plain)] == plain
        for (first, ones), (second, others) in itertools.combinations(axes.items(), 2):
            found = {(each[first], each[second]) for each in chosen}
            assert found == set(itertools.product(ones, others)), (devices, first, second)
        # At least the product of the two largest axes; greedy needs a little more, and the plain ones come first.
        sizes = sorted(map(len, axes.values()))
        assert sizes[-1] * sizes[-2] <= len(chosen) <= 1.3 * sizes[-1] * sizes[-2] + len(plain)
        made = [name.split("/")[1:5] for name in cells(devices, float8=True)]
        assert len(made) == pytest.approx(len(chosen), abs=3)
        impossible = [each for each in made if "tp" in each[0] and each[2:4] == ["compiled", "attention"]]
        assert not impossible  # torch cannot compile it
        assert not any("float8" in name for name in cells(devices, float8=False))


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


DOES = {"do": "attention", "kernel": "sdpa", "kind": "causal"}


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
        group("refused", job={**DOES, "kernel": "flex"}),
        group("broken", job={**DOES, "kind": "all", "kernel": "sdpa", "unknown": 1}),
        Group("p", (Check("elsewhere", ("job",), Figure),), unless="there is no GPU"),
    ]
    found, ended = run_checks(kinds, (), "cpu", 100)
    assert ended is None
    assert {each.name: each.outcome for each in found} == {
        **{"passed": "passed", "recorded": "recorded", "failed": "failed", "nan": "failed", "no figure": "skipped"},
        **{"needed": "failed", "refused": "skipped", "broken": "failed", "elsewhere": "skipped"},
    }
    reasons = {each.name: each.reason for each in found}
    assert "required" in reasons["needed"] and "flex" in reasons["refused"] and "TypeError" in reasons["broken"]
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
    two = Group(
        "p", (Check("bad", ("bad",), Figure), Check("good", ("good",), lambda found: Figure(found["error"], 1.0))), ((1, jobs),)
    )
    assert [each.outcome for each in run_checks([two], (), "cpu", 60)[0]] == ["failed", "passed"]


def test_what_was_shown_before_a_device_died_stays(monkeypatch, capsys):
    def die(self):
        if os.environ.get("LOCAL_RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(LanguageModel, "on_train_start", die)
    names = ["attention/sdpa/causal", "losses/ddp/32-true/eager/none/AdamW", "plan/memory/ddp"]
    assert main(["certify", "--devices", "2", "--only", *names]) == 2
    written = json.loads(Path("certificate.json").read_text())
    assert [each["outcome"] for each in written["checks"]] == ["passed", "skipped", "skipped"]
    assert "device 1 was ended by signal 9" in written["ended_early"]
    assert "the certificate has what was shown before" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [f"attention/{k}/{kind}" for k in ("sdpa", "blocks") for kind in attention.KINDS_OF.get(k, attention.KINDS)]
)
def test_kernels_of_this_processor_pass(name):
    assert outcome(name).outcome == "passed"


@pytest.mark.parametrize(
    "name", ["attention/flex/all", "attention/flash3/causal", "waits/host synchronisations", "losses/float8"]
)
def test_what_needs_a_gpu_is_skipped_with_the_reason_and_never_passed(name):
    found = outcome(name)
    assert found.outcome == "skipped" and ("cpu" in found.reason or "CUDA" in found.reason or "GPU" in found.reason)


def test_the_certificate_has_no_host_and_no_path_and_the_page_shows_it(tmp_path, capsys):
    names = ["attention/blocks/all", "attention/flex/all", "losses/one/32-true/eager/none/AdamW"]
    assert main(["certify", "--out", "c.json", "--html", "c.html", "--only", *names]) == 0
    out, text = capsys.readouterr().out, (tmp_path / "c.json").read_text()
    written = json.loads(text)
    assert {each["name"]: each["outcome"] for each in written["checks"]} == dict(
        zip(names, ("passed", "skipped", "passed"), strict=True)
    )
    assert written["machine"].keys() == {"device", "devices", "cores", "versions", "date", "seconds", "code"}
    assert str(tmp_path) not in text and socket.gethostname() not in text and "/tmp" not in text
    assert written["machine"]["code"] == fingerprints()
    assert len(next(each for each in written["checks"] if each["name"] == names[2])["details"]["losses"]) == 20
    assert out.splitlines()[-1] == written["said"] and written["said"].startswith(
        "certified in part: 2 of 2 required and 2 of 3 checks passed, 1 skipped, 0 failed on 1 × CPU process, torch "
    )
    kinds = [line.split()[:8] for line in out.splitlines() if line.startswith(("attention  ", "losses  "))]
    assert kinds == [["attention", "1", "1", "of", "1", "0", "1", "0"], ["losses", "1", "1", "of", "1", "0", "0", "0"]]
    page = (tmp_path / "c.html").read_text()
    assert page.count('<td data-name="outcome">') == 3 and page.count(">required</td>") == 2
    assert "The same losses on every layout" in page and all(name in page for name in names) and "<svg" in page


def test_a_failed_check_is_exit_code_1_with_its_command(capsys, monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda *a, attend=attention.attend, **k: attend(*a, **k) * 1.001)
    assert main(["certify", "--only", "attention/blocks/causal"]) == 1
    assert "certify --devices 1 --only 'attention/blocks/causal'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--devices", "0"], "devices"),
        (["--budget", "0"], "budget"),
        (["--budget", "nan"], "budget"),
        (["--budget", "1e-7"], "--budget"),
        (["--only", "nothing"], "--only"),
        (["--out", "/proc/1/nothing/c.json"], "--out"),
        (["--html", "/proc/1/nothing/c.html"], "--html"),
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
    assert main(["certify", "--only", "attention/sdpa/causal"]) == 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    assert main(["certify", "--only", "attention/sdpa/causal"]) == 0
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
