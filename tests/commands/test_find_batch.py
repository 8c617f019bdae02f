"""`find-batch` and the callback in lit_llm's own runs, against gradients of single sequences."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from recipe_runs import curve, run

from lit_llm.callbacks import GradientNoise
from lit_llm.commands.noise_scale import Noise, _FrozenNoise, find_batch, mean_noise, measuring_micro_batch, nearest_batch
from lit_llm.commands.short_runs import ShortRuns, overlay_text
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import read_yaml

TINY = ["--config", "tiny.yaml"]


class Batches(Callback):
    """Keeps the micro-batches and the weights of the run. `ignored`: so many targets of each are ignored."""

    def __init__(self, ignored=()):
        self.seen, self.ignored = [], ignored

    def on_train_start(self, trainer, pl_module):
        self.model = copy.deepcopy(pl_module.model).double()
        if self.ignored:
            trainer.datamodule.every_target_counts = False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.ignored:
            batch["targets"].view(-1)[: self.ignored[len(self.seen) % len(self.ignored)]] = -100
        self.seen.append({name: value.clone() for name, value in batch.items()})

    def gradient(self, batches):
        """Of the mean over all targets that count, in float64."""
        self.model.zero_grad()
        sums = [self.model(batch["input_ids"], batch["targets"]) for batch in batches]
        (sum(each.loss for each in sums) / sum(each.count for each in sums)).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("ignored", [(), (3, 9)])
def test_the_estimates_are_those_of_the_gradients_in_float64(folder, ignored):
    """Two micro-batches of two sequences. With ignored targets each micro-batch is the mean over those that count."""
    runs = ShortRuns(TINY)
    batches, noise = Batches(ignored), GradientNoise(every_n_steps=1, decay=0.0)
    runs.observe(1, [batches, noise], seed=0)
    first, second = batches.seen[:2]
    small, big = batches.gradient([first]).square().sum().item(), batches.gradient([first, second]).square().sum().item()
    expected = [(small - big) / (1 / 2 - 1 / 4), (4 * big - 2 * small) / (4 - 2), 1.0]
    assert noise.sums.tolist() == pytest.approx(expected, rel=1e-4)


def test_a_step_whose_first_micro_batch_has_no_target_is_no_observation(folder):
    """Two micro-batches of 32 targets: in every second step the first one, or all of them, are without any."""
    runs = ShortRuns(TINY)
    for ignored in ((3, 9, 32, 9), (3, 9, 32, 32)):
        batches, noise, frozen = Batches(ignored), GradientNoise(every_n_steps=1, decay=0.0), _FrozenNoise(0)
        losses = runs.observe(4, [batches, noise, frozen], seed=0, frozen_after=0)
        steps = [batches.seen[:2], batches.seen[4:6]]
        assert frozen.steps == 2 and noise.sums[2] == 1.0
        small = sum(batches.gradient(step[:1]).square().sum().item() for step in steps) / 2
        assert frozen.small / 2 == pytest.approx(small, rel=1e-4)
    assert losses[1] == losses[0] and losses[3] == losses[2]  # `find-lr` sees the loss of the step before
    assert math.isnan(runs.observe(2, [Batches((32,))], seed=0)[0])


def test_fixed_weights_give_the_noise_of_all_their_sequences(folder):
    runs = ShortRuns([*TINY, "--trainer.max_steps", "40"])
    batches, noise = Batches(), _FrozenNoise(0)
    runs.observe(40, [batches, noise], seed=0, frozen_after=0)
    each = [batches.gradient([batch]) for batch in batches.seen]  # of two sequences
    mean = torch.stack(each).mean(0).square().sum().item()
    small = sum(gradient.square().sum().item() for gradient in each[::2]) / 40
    found = noise.noise()
    assert found.trace == pytest.approx((small - mean) / (1 / 2 - 1 / 160), rel=1e-4)
    assert found.square == pytest.approx((160 * mean - 2 * small) / 158, rel=1e-4)


def test_a_batch_is_whole_micro_batches_on_all_devices():
    assert nearest_batch(100.0, 8, 2) == (96, 8) and nearest_batch(17.0, 8, 2) == (16, 8)
    assert nearest_batch(5.0, 8, 2) == (4, 2) and nearest_batch(0.3, 8, 2) == (2, 1)
    assert [measuring_micro_batch(batch, 8) for batch in (512, 8, 6, 3, 2)] == [8, 2, 1, 1, 1]
    assert measuring_micro_batch(15, 8) == 3
    pooled = mean_noise([Noise(2.0, 0.1), Noise(4.0, 0.3)])
    assert _FrozenNoise(0).noise().scale == math.inf  # no first micro-batch had a target
    assert mean_noise([Noise(2.0, 0.1), _FrozenNoise(0).noise()]).scale == pytest.approx(20.0)
    assert pooled.scale == pytest.approx(15.0) and Noise(1.0, -0.1).scale == math.inf


def test_a_command_of_several_lines_is_a_comment():
    command = "find-batch --samples.prompts '[a\nseed_everything: 3\u2028x: 4'"
    settings = {"optimizer": {"init_args": {"lr": 0.1, "adamw_lr": 1.2e-5}}}
    assert read_yaml(overlay_text(settings, command)) == settings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--noise_steps", "1"], "noise_steps"),
        (["--data.global_batch_size", "1", "--data.micro_batch_size", "1"], "--data.global_batch_size"),
    ],
)
def test_a_mistake_is_a_sentence(folder, capsys, words, said):
    code, _, err = run(capsys, "find-batch", *TINY, "--out", "batch.yaml", *words)
    assert code == 2 and said in err and not Path("batch.yaml").exists()


def test_noise_that_hides_the_gradient_is_said(monkeypatch, folder):
    monkeypatch.setattr(_FrozenNoise, "noise", lambda self: Noise(3.0, -0.01))
    with pytest.raises(UserError, match="--noise_steps 16"):
        find_batch(ShortRuns(TINY), seeds=1, steps=4)


@pytest.mark.parametrize(("optimizer", "power"), [("SGD", 1.0), ("AdamW", 0.5), ("MuonAdamW", 0.5), ("Adagrad", None)])
def test_the_rate_of_the_found_batch_follows_from_the_optimizer(folder, capsys, monkeypatch, optimizer, power):
    monkeypatch.setattr(_FrozenNoise, "noise", lambda self: Noise(12.0, 1.0))  # the recipe has 4 sequences
    flags = ["--optimizer", optimizer, "--optimizer.lr", "0.02", "--data.micro_batch_size", "2"]
    code, out, _ = run(capsys, "find-batch", *TINY, "--seeds", "1", "--noise_steps", "4", *flags)
    assert code == 0 and "advised: 12 sequences" in out
    said = dict(re.findall(r"(\w*lr) \S+ becomes (\S+) ", out))
    assert "lr" in said if power else not said
    if power:
        assert float(said["lr"]) == pytest.approx(0.02 * 3**power, rel=5e-3)
        assert ("2205.10287" in out) is (power == 0.5) and ("1706.02677" in out) is (power == 1)
    assert ("adamw_lr" in said) is (optimizer == "MuonAdamW") and "find-lr" in out


@pytest.mark.slow
def test_the_command_writes_an_overlay_that_fit_takes(folder, capsys):
    code, out, _ = run(capsys, "find-batch", *TINY, "--out", "batch.yaml", "--seeds", "2", "--noise_steps", "8")
    written = yaml.safe_load(Path("batch.yaml").read_text())["data"]["init_args"]
    assert code == 0 and out.count("seed ") == 2 and f"advised: {written['global_batch_size']:,} sequences" in out
    assert {path.name for path in folder.iterdir()} <= {"text.txt", "tiny.yaml", "cache", "batch.yaml"}
    code, printed, _ = run(capsys, "fit", *TINY, "--config", "batch.yaml", "--print_config")
    used = yaml.safe_load(printed)["data"]["init_args"]
    assert code == 0 and {key: used[key] for key in written} == written


@pytest.mark.slow
def test_a_run_logs_the_noise_and_changes_nothing_else(folder, capsys):
    logging = ["--gradient_noise", "GradientNoise", "--gradient_noise.every_n_steps", "2"]
    assert run(capsys, "fit", *TINY, "--run_dir", "runs/plain")[0] == 0
    assert run(capsys, "fit", *TINY, *logging, "--run_dir", "runs/noise")[0] == 0
    assert curve(Path("runs/plain"), "train/loss") == curve(Path("runs/noise"), "train/loss")
    scales = curve(Path("runs/noise"), "gradient_noise/scale_samples")
    assert {step: 16 * value for step, value in scales.items()} == pytest.approx(
        curve(Path("runs/noise"), "gradient_noise/scale_tokens")
    )
