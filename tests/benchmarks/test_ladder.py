"""The ladder of techniques (benchmarks/ladder.py): its runs and the statistics of its table."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ladder
from ladder_techniques import BASELINE, Technique

sys.path.pop()  # benchmarks/clean.py would hide tests/clean


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(400)))
    return ladder.open_text(str(path), 8)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(ladder.SIZES, "tiny", ladder.Size(layers=1, heads=1, width=8, block_size=8, batch=2, steps=4))
    for name in ("CURVE_TOKENS", "FINAL_TOKENS"):
        monkeypatch.setattr(ladder, name, 64)


def results(path: Path) -> list[tuple]:
    return [(*row.key, row.tokens, row.parameters, row.val_loss, row.curve) for row in ladder.read_rows(path)]


def test_an_interrupted_ladder_continues_and_gives_the_rows_of_one_that_was_not(tiny, text, tmp_path):
    pieces = Technique("pieces", "", length=lambda t, total: 2, rows=lambda t, total: min(1.0, t / 4))
    techniques, whole, cut = [BASELINE, pieces], tmp_path / "whole.csv", tmp_path / "cut.csv"
    ladder.climb(techniques, "tiny", text, whole, seeds=range(2), steps=4)
    ladder.climb(techniques, "tiny", text, cut, seeds=range(1), steps=4)
    with cut.open("a") as file:
        file.write("tiny,lines,baseline,1,4")  # the process ended while it wrote
    ladder.climb(techniques, "tiny", text, cut, seeds=range(2), steps=4)
    assert results(cut) == results(whole)
    assert len(results(whole)) == 4  # 2 techniques, 2 seeds
    before = whole.read_text()
    ladder.climb(techniques, "tiny", text, whole, seeds=range(2), steps=4)
    assert whole.read_text() == before


def row(technique: str, seed: int, loss: float, points: list[float], time_ratio: float = 1.0) -> ladder.Row:
    curve = " ".join(f"{100 * (i + 1)}:{point}" for i, point in enumerate(points))
    return ladder.Row("tiny", "lines", technique, seed, 6, 1000, 5, loss, curve, 2.0, time_ratio)


def test_the_table_has_numpys_statistics():
    falling = [3 - 0.2 * i for i in range(10)]  # ends at 1.2
    losses = {"baseline": [1.5, 1.6, 1.4], "better": [1.1, 1.3], "worse": [1.9]}
    faster = [max(1.1, 2.8 - 0.2 * i) for i in range(10)]  # reaches 1.2 at the ninth point
    curves = {"baseline": falling, "better": faster, "worse": [4.0] * 10}
    rows = [row(name, i, loss, curves[name], 1 + 0.1 * i) for name, runs in losses.items() for i, loss in enumerate(runs)]
    baseline, better, worse = ladder.summaries(rows)
    assert (baseline.technique, better.technique, worse.technique) == ("baseline", "better", "worse")
    assert better.loss == pytest.approx(np.mean(losses["better"]))
    assert baseline.spread == pytest.approx(np.std(losses["baseline"], ddof=1))
    assert math.isnan(worse.spread)
    pairs = np.array(losses["better"]) - np.array(losses["baseline"][:2])  # of the same seed; `worse` has one seed
    assert better.difference == pytest.approx(pairs.mean())
    assert better.noise == pytest.approx(pairs.std(ddof=1) / np.sqrt(2))
    assert better.time == pytest.approx(1.05)
    assert better.tokens_to_baseline == pytest.approx(0.9)
    assert math.isinf(worse.tokens_to_baseline)
    assert (
        f"| better | 2 | 1.2000 ± 0.1414 | {pairs.mean():+.4f} | {pairs.mean() / better.noise:+.1f} | 1.05 | 0.90 |"
        in ladder.table(rows)
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--techniques", "nope"], "The technique 'nope' is unknown"),
        (["--steps", "0"], "0 is no number of steps: give 1 or more (--steps)."),
        (["--text", "nofile", "--techniques", "baseline"], "nofile"),
        (["--table"], "none.csv has no rows"),
        (["--out", "other.csv", "--techniques", "baseline"], "other.csv is no table of the ladder"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_trained(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--out", "none.csv", *flags])
    with pytest.raises(SystemExit) as end:
        ladder.main()
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert Path("other.csv").read_text() == "a,b\n1,2\n" and not Path("none.csv").exists()
