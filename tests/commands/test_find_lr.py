"""`find-lr` through the command line: short runs are the run that they stand for, and nothing but the overlay is written."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from recipe_runs import curve, run

from lit_llm.commands.find_lr import find_rates, tail_loss
from lit_llm.commands.short_runs import ShortRuns, option_of
from lit_llm.core.errors import UserError
from lit_llm.training.rate_search import FoundRates, Sweep

TINY = ["--config", "tiny.yaml"]


@pytest.mark.slow
def test_a_probe_of_the_whole_length_is_the_run_itself(folder, capsys):
    words = [*TINY, "--optimizer.lr", "0.02", "--trainer.log_every_n_steps", "1", "--samples", "null"]
    assert run(capsys, "fit", *words)[0] == 0
    logged = curve(Path("runs/tiny"), "train/loss")
    before = sorted(folder.rglob("*"))
    runs = ShortRuns(words)
    assert runs.rates == {"lr": 0.02, "adamw_lr": 0.01} and runs.steps == 8 and not runs.from_weights
    assert ShortRuns([*words, "--init_from", "runs/tiny"]).from_weights
    losses = runs.probe({}, 8, seed=0)
    assert losses == pytest.approx(list(logged.values()), rel=1e-6)  # TensorBoard keeps float32
    assert runs.probe({"lr": 0.02, "adamw_lr": 0.01}, 8, seed=0) == losses != runs.probe({}, 8, seed=1)
    assert sorted(folder.rglob("*")) == before and runs.done == 24


@pytest.mark.slow
def test_a_sweep_changes_one_rate_and_ends_when_told(folder):
    runs = ShortRuns(TINY)
    rates = [1e-3, 1e-2, 1e-1, 1.0]
    adamw, both = runs.sweep("adamw_lr", rates, lambda losses: False, seed=0), runs.sweep("lr", rates, lambda _: False, seed=0)
    assert len(adamw) == 4 and adamw[0] == both[0] and adamw[2:] != both[2:]
    assert runs.sweep("lr", rates, lambda losses: len(losses) == 2, seed=0) == both[:2]
    still = runs.probe({"lr": 1e-12, "adamw_lr": 1e-12}, 4, seed=0)
    assert runs.observe(4, [], seed=0, frozen_after=0) == pytest.approx(still, rel=1e-6) != pytest.approx(adamw, rel=1e-3)
    assert option_of({"algorithm": "adamw"}, ("lr", "adamw_lr")) == "adamw_lr"
    assert option_of({"algorithm": "muon"}, ("lr", "adamw_lr")) == option_of({"algorithm": "adamw"}, ("lr",)) == "lr"


def test_the_run_ends_where_its_epochs_end_and_a_short_run_does_not(folder):
    runs = ShortRuns([*TINY, "--trainer.max_steps", "10000", "--trainer.max_epochs", "2"])
    blocks = len(runs.data.blocks("train"))
    assert runs.steps == -(-2 * blocks // runs.data.global_batch_size)
    runs.data_options = {"micro_batch_size": blocks, "global_batch_size": 2 * blocks}  # one step is both epochs
    assert len(runs.observe(2, [], seed=0)) == 2


class KnownLosses:
    """Runs whose loss has its minimum at known rates, different ones for each seed. Every third batch is hard."""

    seed, steps, done = 0, 1000, 0

    def __init__(self, from_weights=False):
        self.from_weights = from_weights
        self.rates = {"lr": 1.0, "adamw_lr": 1.0}

    def sweep(self, key, rates, ends, *, seed):
        return [(5.0 - i * 0.01 if rate < 0.5 else 9.0) + (i % 3 == 1) for i, rate in enumerate(rates)]

    def observe(self, steps, observers, *, seed, frozen_after):
        assert seed == frozen_after == 0 and not observers
        return [5.0 + (i % 3 == 1) for i in range(steps)]

    def probe(self, rates, steps, *, seed):
        best = {"lr": 0.01 * 2 ** (0.2 * seed), "adamw_lr": 0.003}
        return [2 + sum(0.01 * math.log2(rates[key] / best[key]) ** 2 for key in best)] * steps


def test_the_suggestion_is_the_mean_over_seeds_of_the_best_rates():
    found = find_rates(KnownLosses(), seeds=3, sweep_steps=100, probe_steps=10)  # type: ignore[arg-type]
    longer = 100**-0.32  # of 1,000 steps instead of 10
    assert 0.3 < found.sweeps["lr"].edge < 0.5 and found.sweeps["lr"].losses[1] == pytest.approx(5 - 0.01 + 1 / 3, abs=0.01)
    assert found.by_seed["lr"] == pytest.approx([longer * 0.01 * 2 ** (0.2 * seed) for seed in range(3)], rel=1e-6)
    assert found.by_seed["adamw_lr"] == pytest.approx([longer * 0.003] * 3, rel=1e-6)
    assert found.rates == {"lr": 0.0026, "adamw_lr": 0.00069}
    again = find_rates(KnownLosses(from_weights=True), seeds=3, sweep_steps=100, probe_steps=10)  # type: ignore[arg-type]
    assert again.factor == 1 and again.by_seed["adamw_lr"] == pytest.approx([0.003] * 3, rel=1e-6)
    assert [ShortRuns.tenth(SimpleNamespace(steps=steps), 50) for steps in (30, 300, 5000)] == [30, 50, 500]
    assert tail_loss([9.0, 9, 9, 9, 9, 9, 9, 9, 2, 4], 10) == 3 and tail_loss([1.0, math.nan], 10) == math.inf


class Broken(KnownLosses):
    """No step has a finite loss."""

    def sweep(self, key, rates, ends, *, seed):
        return [math.nan]

    def observe(self, steps, observers, *, seed, frozen_after):
        return [math.nan]

    def probe(self, rates, steps, *, seed):
        self.done += 1
        return [math.nan]


def test_without_a_finite_loss_there_is_no_suggestion():
    broken = Broken()
    with pytest.raises(UserError, match="no short run with seed 0 had a finite loss"):
        find_rates(broken, seeds=3, sweep_steps=100, probe_steps=10)  # type: ignore[arg-type]
    assert broken.done < 30


def test_a_run_too_short_for_a_sweep_is_refused():
    short = KnownLosses()
    short.steps = 1
    with pytest.raises(UserError, match=r"one step, but a sweep needs several \(--trainer.max_steps\)"):
        find_rates(short, seeds=1, sweep_steps=100, probe_steps=10)  # type: ignore[arg-type]


def test_the_page_is_one_file_with_every_measurement():
    from lit_llm.reporting.rate_page import rate_page

    sweep = Sweep([1e-4, 1e-3, 1e-2], [5.0, 4.0, math.nan])
    probes = [{0.001: 3.25, 0.002: 3.0, 0.004: math.inf}, {0.001: 3.5, 0.002: 3.125}]
    page = rate_page(
        FoundRates({"lr": 0.01}, {"lr": 0.002}, {"lr": [0.0019, 0.0021]}, {"lr": sweep}, {"lr": probes}, 50, 500, 0.5),
        "T",
        "find-lr <x>",
    )
    assert page.startswith("<!DOCTYPE html>") and "find-lr &lt;x&gt;" in page and "<script" not in page
    assert "0.0019 – 0.0021" in page and all(f"seed {i}: {loss}" in page for i, loss in ((0, 3.25), (0, 3), (1, 3.125)))
    assert "1 value is not finite" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--out overlay.yaml"),
        (["--out", "o.yaml", "--seeds", "0"], "seeds"),
        (["--out", "tiny.yaml"], "tiny.yaml exists already"),
        (["--out", "o.yaml", "--trainer.max_steps", "-1"], "--trainer.max_steps"),
        (["--out", "o.yaml", "--schedule", "Decay"], "--schedule"),
        (["--out", "o.yaml", "--model.n_layer", "0"], "--model.n_layer"),
    ],
)
def test_a_mistake_is_a_sentence_and_leaves_no_file(folder, capsys, words, said):
    before = sorted(folder.rglob("*"))
    code, _, err = run(capsys, "find-lr", *TINY, *words)
    assert code == 2 and said in err and sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_the_command_writes_an_overlay_that_fit_takes(folder, capsys):
    """Its rates are those of the recipe that it makes, and a second search of the same seeds finds the same."""
    few = {"--trainer.max_steps": 40, "--seeds": 1, "--sweep_steps": 20, "--probe_steps": 5, "--trainer.devices": 1}
    words = ["find-lr", *TINY, *(str(word) for pair in few.items() for word in pair)]
    code, out, _ = run(capsys, *words, "--out", "rate.yaml", "--html", "rate.html")
    assert code == 0
    assert {path.name for path in folder.iterdir()} <= {"text.txt", "tiny.yaml", "cache", "rate.yaml", "rate.html"}
    rates = yaml.safe_load(Path("rate.yaml").read_text())["optimizer"]["init_args"]
    assert set(rates) == {"lr", "adamw_lr"} and all(f"{key}: {rate:g} (recipe: 0.01)" in out for key, rate in rates.items())
    code, printed, _ = run(capsys, "fit", *TINY, "--config", "rate.yaml", "--print_config")
    used = yaml.safe_load(printed)["optimizer"]["init_args"]
    assert code == 0 and {key: used[key] for key in rates} == rates
    first = Path("rate.yaml").read_text()
    assert run(capsys, *words, "--out", "rate.yaml", "--replace", "true")[0] == 0
    assert yaml.safe_load(first) == yaml.safe_load(Path("rate.yaml").read_text()), json.dumps(rates)
