"""Generated command lines and files: each is accepted or refused as it should be; no traceback, no hang, no lost file."""

import attacks
import cases
import pytest
from attacks import judge
from cases import Case

QUICK, SLOW, ALL = 12, 42, 1100


def chosen() -> list[Case]:
    """The first cases of each family, so that small families are complete, and then the others."""
    everything = cases.generate(seed=0)
    number: dict[str, int] = {}
    rank = []
    for case in everything:
        number[case.family] = number.get(case.family, 0) + 1
        rank.append(number[case.family])
    return [case for _, case in sorted(zip(rank, everything, strict=True), key=lambda pair: pair[0])]


def test_a_sample_of_attacks():
    sample = chosen()[:QUICK]
    assert len({case.family for case in sample}) == 12
    found, _ = attacks.run(sample)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("first", "last"), [pytest.param(QUICK, SLOW, marks=pytest.mark.slow), pytest.param(SLOW, ALL, marks=pytest.mark.soak)]
)
def test_many_attacks(first, last):
    found, _ = attacks.run(chosen()[first:last])
    assert not found, "\n".join(map(str, found))


REFUSED = {"code": 2, "err": "error: lr is wrong (--optimizer.lr)\n", "out": "", "trace": None, "changed": [], "new": []}
CASE = Case(["fit", "--optimizer.lr=x"], False, "type", ["lr"])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("hang or death", None),
        ("hang", {"trace": "Traceback\nvictim.TimeIsUp"}),
        ("traceback", {"trace": "Traceback\nKeyError: 3"}),
        ("traceback", {"err": "error: lr\nTraceback (most recent call last):\n"}),
        ("wrong exit", {"code": 0}),
        ("wrong exit", {"code": 1}),
        ("changed", {"changed": ["notes.md"]}),
        ("written", {"new": ["runs/mine"]}),
        ("no message", {"err": "usage: lr"}),
        ("no key", {"err": "error: something is wrong"}),
    ],
)
def test_the_judge_notices(kind, change):
    assert judge(CASE, REFUSED) is None
    finding = judge(CASE, None if change is None else REFUSED | change)
    assert finding is not None and finding.kind == kind


def test_the_judge_wants_accepted_attacks_to_write_into_their_own_folders_only():
    right = Case(["fit", "--optimizer.lr=0.1"], True, "right")
    assert judge(right, REFUSED | {"code": 0, "new": ["runs/mine/config.yaml"]}) is None
    for change, kind in (
        ({"code": 2}, "wrong exit"),
        ({"new": ["x.txt"]}, "misplaced"),
        ({"changed": ["text.txt"]}, "changed"),
    ):
        finding = judge(right, REFUSED | {"code": 0} | change)
        assert finding is not None and finding.kind == kind
