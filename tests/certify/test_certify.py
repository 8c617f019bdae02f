"""`certify`: cells, outcomes and certificate, and planted faults that the checks find."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from lit_llm.__main__ import main
from lit_llm.certify import attention, checks, graphs
from lit_llm.certify.cells import AXES, cells, layouts, pairwise
from lit_llm.certify.check import DeviceDied, Group, judged, run_checks, skipped, summary
from lit_llm.models.attention import attend


def test_each_pair_of_values_occurs_in_few_cells():
    for devices in (1, 2, 4, 8):
        axes = {"layout": tuple(layouts(devices)), **AXES}
        chosen = pairwise(axes)
        for (first, ones), (second, others) in itertools.combinations(axes.items(), 2):
            found = {(each[first], each[second]) for each in chosen}
            assert found == set(itertools.product(ones, others)), (devices, first, second)
        # At least the product of the two largest axes; greedy needs a little more.
        sizes = sorted(map(len, axes.values()))
        assert sizes[-1] * sizes[-2] <= len(chosen) <= 1.3 * sizes[-1] * sizes[-2]
        assert len(cells(devices)) == len(chosen)


@pytest.mark.parametrize("name", [n for n in attention.NAMES if n.startswith(("attention/sdpa", "attention/blocks"))])
def test_kernels_of_this_processor_pass(name):
    outcome = attention.check(name, "cpu")
    assert outcome.outcome == ("skipped" if name.startswith("attention/sdpa") and not name.endswith("causal") else "passed")


def test_flex_is_skipped_on_a_processor_and_never_passed():
    found = [attention.check(name, "cpu") for name in attention.NAMES if "/flex/" in name]
    assert {each.outcome for each in found} == {"skipped"} and all("flex" in each.reason for each in found)


def test_a_window_that_is_one_too_wide_is_found(monkeypatch):
    def wider(*args, see, **kwargs):
        return attend(*args, see=replace(see, window=None if see.window is None else see.window + 1), **kwargs)

    monkeypatch.setattr(attention, "attend", wider)
    assert attention.check("attention/blocks/window", "cpu").outcome == "failed"
    assert attention.check("attention/blocks/documents", "cpu").outcome == "passed"


def test_documents_that_are_ignored_are_found(monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda *a, see, **k: attend(*a, see=replace(see, documents=None), **k))
    assert attention.check("attention/blocks/documents", "cpu").outcome == "failed"


def test_blocks_are_compiled_at_most_three_times():
    outcome = graphs.check(graphs.NAME, "cpu")
    assert outcome.outcome == "passed" and 1 <= outcome.figure <= 3


def test_a_graph_break_in_a_block_is_found(monkeypatch):
    from lit_llm.models.block import Block

    forward = Block.forward

    def broken(self, x, *args, **kwargs):
        for _ in range(4):
            torch.compiler.disable(lambda: None)()
            x = x * 1.0
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", broken)
    assert graphs.check(graphs.NAME, "cpu").outcome == "failed"


def test_losses_are_compared_by_step_and_nan_never_passes():
    straight = {"1": 4.0, "2": 2.0}
    assert checks.difference({"1": 4.0, "2": 2.5}, straight) == 0.25
    assert checks.difference({"2": 2.0}, straight, first=2) == 0.0
    assert checks.difference({"1": 4.0}, straight) == float("inf")  # a step is missing
    assert checks.difference({}, {}) == float("inf")  # nothing was shown
    nan = judged("x", "", checks.difference({"1": float("nan"), "2": 2.0}, straight), 1.0)
    assert (nan.outcome, nan.figure) == ("failed", None)


def shown(names, _):
    return [judged(name, "p", 0.0, 1.0) for name in names]


def dies(names, _):
    raise DeviceDied("the process of device 1 was ended by signal 9", [judged(names[0], "p", 0.0, 1.0)])


def test_what_was_shown_before_a_device_died_stays_and_the_rest_is_skipped():
    found, ended = run_checks([Group("p", ("a",), shown), Group("p", ("b", "c"), dies), Group("p", ("d",), shown)], (), 2, 60)
    assert [(each.name, each.outcome) for each in found] == [
        *[("a", "passed"), ("b", "passed")],
        *[("c", "skipped"), ("d", "skipped")],
    ]
    assert ended is not None and "device 1" in ended
    assert found[1].reproduce == "python -m lit_llm certify --devices 2 --only 'b'"


def test_a_spent_budget_skips_and_says_so():
    found, _ = run_checks([Group("p", ("a",), shown)], (), 1, 0.0)
    assert found[0].outcome == "skipped" and "budget" in found[0].reason
    assert summary(found, "1 x CPU process") == "NOT certified: 0 passed, 1 skipped, 0 failed on 1 x CPU process"
    assert summary([*found, skipped("b", "p", "r"), *shown(("c",), 1)], "m") == "certified: 1 passed, 2 skipped, 0 failed on m"


def test_the_certificate_has_no_host_and_no_path(tmp_path, capsys):
    out = tmp_path / "c.json"
    names = ["attention/blocks/all", "attention/flex/all", "waits/host synchronisations"]
    assert main(["certify", "--out", str(out), "--only", *names]) == 0
    text = out.read_text()
    written = json.loads(text)
    assert {each["name"]: each["outcome"] for each in written["checks"]} == dict(
        zip(names, ("passed", "skipped", "skipped"), strict=True)
    )
    assert written["machine"].keys() == {"device", "devices", "cores", "versions", "date"}
    assert str(tmp_path) not in text and __import__("socket").gethostname() not in text
    assert capsys.readouterr().out.splitlines()[-1].startswith("certified: 1 passed, 2 skipped, 0 failed on 1 x CPU process")


def test_a_failed_check_is_exit_code_1_with_its_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda *a, **k: attend(*a, **k) * 1.001)
    assert main(["certify", "--out", str(tmp_path / "c.json"), "--only", "attention/blocks/causal"]) == 1
    assert "certify --devices 1 --only 'attention/blocks/causal'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--devices", "0"], "--devices"),
        (["--budget", "0"], "--budget"),
        (["--budget", "nan"], "--budget"),
        (["--only", "nothing"], "--only"),
        (["--out", "/proc/1/nothing/c.json"], "--out"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(words, key, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["certify", *words]) == 2
    assert key in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from lit_llm.certify.training import TEXT

    folder = tmp_path_factory.mktemp("certify")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def straight(folder):
    from lit_llm.certify.training import train

    return train(folder, steps=5, save="saved")


CHECKPOINT = "saved/step-00000003.ckpt"


def test_an_exact_resume_passes_and_a_lost_optimizer_state_is_found(folder, straight, monkeypatch):
    from lit_llm.certify.training import train

    assert checks.difference(train(folder, steps=5, resume=CHECKPOINT), straight, 4) == 0.0
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)
    assert checks.difference(train(folder, steps=5, resume=CHECKPOINT), straight, 4) > 0.0


@pytest.mark.parametrize("fault", ["bf16", "an eighth too large"])
def test_a_wrong_gradient_is_found(fault, folder, straight, monkeypatch):
    from lit_llm.certify.training import train
    from lit_llm.training.language_model import LanguageModel

    def spoil(self, *args):
        for i, parameter in enumerate(self.parameters()):
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16() if fault == "bf16" else parameter.grad * (1 + i % 2 / 8))

    monkeypatch.setattr(LanguageModel, "on_after_backward", spoil, raising=False)
    assert judged("x", "", checks.difference(train(folder, steps=5), straight), 1e-5).outcome == "failed"
