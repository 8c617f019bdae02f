"""The support matrix is what certificates say, and says which of them the code has outdated."""

import json

import pytest

from benchmarks import support_matrix
from benchmarks.support_matrix import CERTIFICATES, COVERS
from lit_llm.certify.promises import groups
from lit_llm.commands.certify import fingerprints


def test_the_page_is_generated():
    """From the certificates, and the code of the day on which it was written: later changes of the code make no difference."""
    now = support_matrix.written()
    assert support_matrix.page(now) == support_matrix.PAGE.read_text(), "run `python benchmarks/support_matrix.py`"
    assert support_matrix.cells(now) == support_matrix.CELLS.read_text(), "run `python benchmarks/support_matrix.py`"


def test_certificates_of_several_processes_are_there_without_failures_hosts_and_paths():
    found = [json.loads(path.read_text()) for path in CERTIFICATES.glob("*.json")]
    on_cpu = {each["machine"]["devices"] for each in found if each["machine"]["device"] == "CPU process"}
    assert {2, 4, 8} <= on_cpu
    for each in found:
        assert each["said"].startswith("certified") and each["ended_early"] is None
        assert "/tmp" not in json.dumps(each) and "/home" not in json.dumps(each) and "/work" not in json.dumps(each)
        assert [check["name"] for check in each["checks"] if check["required"] and check["outcome"] != "passed"] == []


def test_each_kind_of_check_covers_rooms_that_exist():
    kinds = {check.name.split("/")[0] for group in groups(4, "cuda", place=".") for check in group.checks}
    assert kinds == COVERS.keys()
    assert {room for rooms in COVERS.values() for room in rooms} <= fingerprints().keys()


@pytest.mark.parametrize(("room", "cell"), [("optim", "2; 4 stale"), ("ingest", "2, 4"), ("plan", "2, 4")])
def test_a_cell_names_devices_and_what_the_code_has_outdated(room, cell, monkeypatch):
    def certificate(devices, code):
        checks = [{"name": "losses/tp/32-true/eager/full/Muon", "outcome": "passed"}]
        return {"machine": {"devices": devices, "code": code}, "checks": checks}

    now = fingerprints()
    found = [certificate(2, now), certificate(4, now | {room: "another"})]
    cells = {feature: cells for feature, *cells in support_matrix.matrix(found, now)}
    place = support_matrix.LAYOUTS.index("tp")
    for feature in ("32-true", "eager", "recomputation: full", "Muon"):
        assert cells[feature][place] == cell, feature
    assert cells["AdamW"][place] == "not run" and cells["Muon"][place - 1] == "not run"
    assert "| Muon | 1 of 9 | 1 of 13 |" in support_matrix.summary(found, now)
    assert "| AdamW | not run | not run |" in support_matrix.summary(found, now)


def test_a_failure_is_named_before_everything_else():
    checks = [{"name": f"plan/memory/{layout}", "outcome": outcome} for layout, outcome in (("tp", "failed"), ("pp", "passed"))]
    found = [{"machine": {"devices": 2, "code": fingerprints()}, "checks": checks}]
    assert "| plan = measured, memory | 1 of 9, failed: tp |" in support_matrix.summary(found, fingerprints())
    assert support_matrix.cell({2: {"passed", "failed"}, 4: {"skipped"}, 8: {"passed", "stale"}}) == "2 failed; 8 stale"
