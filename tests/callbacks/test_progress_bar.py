import io
import math
import re
import sys

import pytest
import torch
from foreign import Batches, Foreign, fit, make_trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lit_llm.callbacks import Constant, GradientNorm, Linear, TrainingProgress, ValidateEvery
from lit_llm.callbacks import progress_bar as module_under_test
from lit_llm.callbacks.progress_bar import (
    format_count,
    format_duration,
    format_line,
    format_metrics,
)

METRICS = {
    "train/loss": 2.34561,
    "train/perplexity": 10.4397,
    "lr": 3e-4,
    "grad/norm": 0.4217,
    "throughput/tokens_per_second": 45210.0,
    "something/else": 1.0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (7, "7s"),
        (59.6, "1m00s"),
        (187, "3m07s"),
        (3599.7, "1h00m"),
        (11107, "3h05m"),
        (86399, "1d00h"),
        (93600, "1d02h"),
    ],
)
def test_durations_are_short_and_never_print_sixty(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (873, "873"), (999.7, "1k"), (45210, "45.2k"), (999_900, "1M"), (1.234e6, "1.23M"), (5e9, "5G")],
)
def test_counts_have_three_digits(number, text):
    assert format_count(number) == text


def test_a_line_holds_what_is_logged_in_a_fixed_order():
    text = "loss 2.3456  ppl 10.44  lr 3.00e-04  grad 0.422  45.2k tok/s"
    assert format_metrics(METRICS) == text
    assert format_metrics({"lr": 1e-3}) == "lr 1.00e-03"
    assert format_line(100, 2000, METRICS, 187.0) == f"step  100/2000  {text}  ETA 3m07s"
    assert format_line(100, -1, {}, None) == "step 100"


def test_a_loss_of_another_name_is_shown_in_its_place(tmp_path, capsys):
    class Named(Foreign):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    module = fit([TrainingProgress(loss="train_loss")], tmp_path, module=Named(), steps=3, enable_progress_bar=True)[1]
    shown = [float(loss) for loss in re.findall(r"^step \d/3  loss ([\d.]+)", capsys.readouterr().out, re.M)]
    assert shown == [pytest.approx(loss, abs=5e-5) for _, loss in module.seen] and len(shown) == 3
    assert format_metrics({"train/loss": 1.0, "train_loss": 2.0}, "train_loss") == "loss 2.0000"


def test_a_step_without_targets_does_not_show_the_loss_of_an_earlier_one(tmp_path, capsys):
    class Masked(WithLoss):
        step_loss = torch.tensor(1.5)

        @property
        def step_count(self):
            return torch.tensor(self.trainer.global_step % 2)

    fit([TrainingProgress(), Constant()], tmp_path, module=Masked(), steps=4, enable_progress_bar=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert ["loss 1.5000" in line for line in lines] == [True, False] * 2 and all("lr" in line for line in lines)


def test_the_loss_is_the_mean_over_the_targets_since_the_last_line(tmp_path, capsys):
    losses, counts = (9.0, 1.0, 2.0, 4.0, 3.0, 5.0), (10, 1, 2, 5, 0, 3)

    class Says(WithLoss):
        @property
        def step_loss(self):
            step = self.trainer.global_step - 1
            return torch.tensor(losses[step] if counts[step] else torch.nan)

        @property
        def step_count(self):
            return torch.tensor(counts[self.trainer.global_step - 1])

        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            self.trainer.callback_metrics["train/perplexity"] = torch.tensor(1.0)

    fit([TrainingProgress(), Constant()], tmp_path, module=Says(), steps=6, every=3, enable_progress_bar=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    middle, last = (1 * 1 + 2 * 2) / 3, (5 * 4 + 3 * 5) / 8
    assert [line.split("  lr")[0] for line in lines] == [
        f"step 1/6  loss 9.0000  ppl {math.exp(9):.4g}",
        f"step 3/6  loss {middle:.4f} (mean of 2)  ppl {math.exp(middle):.4g}",
        f"step 6/6  loss {last:.4f} (mean of 2)  ppl {math.exp(last):.4g}",
    ]


def test_a_logged_step_without_targets_shows_the_mean_of_the_steps_before_it(tmp_path, capsys):
    counts = (0, 2, 2, 0, 0, 0, 0)

    class Masked(Foreign):
        @property
        def step_loss(self):
            return torch.tensor(1.0 * self.trainer.global_step if self.step_count else torch.nan)

        @property
        def step_count(self):
            return torch.tensor(counts[self.trainer.global_step - 1])

    fit([TrainingProgress(), Constant()], tmp_path, module=Masked(), steps=7, every=4, enable_progress_bar=True)
    lines = [line.split("  lr")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert lines == ["step 1/7", f"step 4/7  loss {(2 + 3) / 2:.4f} (mean of 2)", "step 7/7"]


@pytest.mark.parametrize("stopped", [False, True])
def test_the_last_line_has_rate_and_norm_of_its_step_and_no_perplexity_of_a_loss_that_has_none(tmp_path, capsys, stopped):
    class Pairs(WithLoss):
        step_loss, step_count = torch.tensor(0.5), torch.tensor(2)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 5

    norms = GradientNorm()
    callbacks = [TrainingProgress(), norms, Linear(warmup_steps=2, final_ratio=0.0), *([Stop()] if stopped else [])]
    fit(callbacks, tmp_path, module=Pairs(), steps=6 if stopped else 5, every=4, enable_progress_bar=True)
    line = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")][-1]
    rate = 0.2 * (1 / 4 if stopped else 0)  # the first group's peak is 0.2, and it falls from step 2 to the end
    assert line.split("  ETA")[0] == f"step 5/{6 if stopped else 5}  loss 0.5000  lr {rate:.2e}  grad {norms.latest_norm:.3g}"


class WithLoss(Foreign):
    def on_before_optimizer_step(self, optimizer):
        self.trainer.callback_metrics["train/loss"] = torch.tensor(1.5)


def run(tmp_path, *callbacks, steps=8, **kwargs):
    options = {"enable_progress_bar": True, **kwargs}
    return fit([*callbacks, TrainingProgress()], tmp_path, module=WithLoss(steps=steps), steps=steps, **options)


def test_a_log_file_gets_one_plain_line_a_logged_step(tmp_path, capsys):
    run(tmp_path, Constant(), GradientNorm(), every=4, accumulate_grad_batches=2)
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step")]
    assert [re.match(r"step \d/8  loss 1\.5000  lr 2\.00e-01  grad [\d.]+", x) is not None for x in lines] == [True] * 3
    assert [x.split("/")[0] for x in lines] == ["step 1", "step 4", "step 8"]
    assert "ETA" not in lines[0]
    assert lines[1].split("ETA ")[1] == "0s"
    assert "\r" not in "".join(lines) and "\x1b" not in "".join(lines)


def test_validation_leaves_one_line_with_its_result(tmp_path, capsys):
    run(tmp_path, ValidateEvery(5), limit_val_batches=1.0, num_sanity_val_steps=1, every=100)
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("validation")]
    assert [re.fullmatch(r"validation after step \d: val/loss [\d.]+  \(\ds\)", x) is not None for x in lines] == [True] * 2
    assert [x.split(":")[0] for x in lines] == ["validation after step 5", "validation after step 8"]


def test_a_long_validation_leaves_a_line_every_30_seconds_in_a_log_file(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module_under_test.time, "monotonic", lambda: now[0])

    class Slow(Callback):
        def on_validation_batch_start(self, trainer, *_):
            now[0] += 20.0

    class Long(WithLoss):
        def val_dataloader(self):
            return DataLoader(Batches(5), batch_size=None)

    fit(
        [ValidateEvery(8), Slow(), TrainingProgress()], tmp_path, module=Long(), limit_val_batches=1.0, enable_progress_bar=True
    )
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validating")]
    assert said == ["validating after step 8: batch 2 of 5", "validating after step 8: batch 4 of 5"]


def test_a_resumed_run_starts_at_its_step(tmp_path, capsys, monkeypatch):
    trainer = make_trainer([], tmp_path, steps=5)
    trainer.fit(WithLoss(steps=5))
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    run(tmp_path, resume=tmp_path / "five.ckpt")
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step")]
    assert [x.split("  ")[0] for x in lines] == ["step 6/8", "step 7/8", "step 8/8"]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(tmp_path, resume=tmp_path / "five.ckpt")
    assert re.findall(r"step (\d+)/8 ", terminal.getvalue())[0] == "5"


def test_time_to_go_is_time_per_step_times_steps_left(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module_under_test.time, "monotonic", lambda: now[0])

    class Tick(Callback):
        def on_train_batch_start(self, trainer, *args):
            now[0] += 500.0 if trainer.global_step == 0 else 100.0  # the first step compiles

    run(tmp_path, Tick())
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step")]
    assert [x.split("ETA ")[1] for x in lines[1:]] == ["10m00s", "8m20s", "6m40s", "5m00s", "3m20s", "1m40s", "0s"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_bar_that_counts_optimizer_steps(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(tmp_path, ValidateEvery(4), limit_val_batches=1.0, accumulate_grad_batches=3, every=4)
    shown = terminal.getvalue()
    states = re.findall(r"step (\d+)/8 ", shown)
    assert states[0] == "0" and states[-1] == "8" and set(states) <= {str(i) for i in range(9)}
    assert "loss 1.5000" in shown
    assert "validation after step 4: val/loss" in shown
    assert re.search(r"validating: +\d+%", shown)


def test_nothing_is_read_at_unlogged_steps(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(module_under_test, "_floats", lambda trainer: reads.append(trainer.global_step) or {})
    run(tmp_path, every=4)
    assert reads == [1, 4, 8]
