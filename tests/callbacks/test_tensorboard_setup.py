import json
import re
import statistics

import pytest
from foreign import Foreign, Rows, make_trainer
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lit_llm.callbacks import HealthSignals, TensorBoardPage
from lit_llm.callbacks._lightning import write_row

ANY_RUN = {
    "quality": {
        "training loss": ["train/loss"],
        "validation loss": ["val/loss"],
        "bits per byte": ["val/bits_per_byte", "val/gzip_bits_per_byte"],
    },
    "health": {
        "learning rate": ["lr", "lr/embedding"],
        "gradient norm": ["grad/norm", "grad/norm_clipped"],
        "fraction of steps clipped": ["grad/clip_fraction"],
        "skipped steps": ["spike/skipped"],
        "update norm / weight norm": ["health/update_ratio/head"],
        "largest attention logit": ["health/attention_logit_max/blocks.0"],
        "root mean square of activations": ["health/activation_rms/blocks.0"],
        "entropy of the output (nats)": ["health/output_entropy"],
    },
    "speed": {
        "throughput (tokens/s)": ["throughput/tokens_per_second"],
        "fractions of the time": ["time/data_fraction", "time/forward_fraction"],
        "peak memory (GB)": ["memory/peak_gb", "plan/peak_gb"],
    },
}
"""Charts and what they draw, by category."""
TASKS = {
    "mixture": {
        "training loss by source": ["train/web/loss", "train/code/loss"],
        "validation loss by source": ["val/web/loss"],
    },
    "preferences": {
        "margin of rewards": ["train/margin", "val/margin"],
        "accuracy": ["train/accuracy", "val/accuracy"],
        "rewards": ["train/reward_chosen", "train/reward_rejected"],
        "log-likelihoods (nats per document)": ["train/logp_chosen", "train/logp_rejected"],
    },
    "experts": {
        "tokens of the busiest expert / mean": ["experts/load"],
        "experts without a token": ["experts/dead"],
        "entropy of the router (nats)": ["experts/entropy"],
        "largest bias": ["experts/bias"],
    },
}
UNSEEN = ["train/perplexity", "val/perplexity", "throughput/mfu", "plan/memory_ratio", "health/update_norm/head"]


class Writes(Callback):
    """Logs these metrics at every step."""

    def __init__(self, *names):
        self.names = names

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        write_row(trainer, dict.fromkeys(self.names, 1.0), trainer.global_step + 1)


def train(folder, callbacks, **options):
    """Two steps with TensorBoard's logger and one more; returns the events and the other logger."""
    loggers = [TensorBoardLogger(folder, name="", version=""), Rows()]
    make_trainer(callbacks, folder, steps=2, logger=loggers, **options).fit(Foreign(steps=2))
    loggers[0].finalize("success")
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload(), loggers[1].rows


def charts(events, names):
    """What each chart of the last layout draws of the names, by category."""
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    # TensorBoard draws every scalar that a pattern matches from its beginning (custom_scalars_plugin: regex.match).
    return {
        category.title: {
            chart.title: [name for name in names if any(re.match(tag, name) for tag in chart.multiline.tag)]
            for chart in category.chart
        }
        for category in layout.category
    }


@pytest.mark.parametrize("task", [None, *TASKS])
def test_the_page_has_the_charts_of_what_is_logged_and_no_others(tmp_path, task):
    expected = ANY_RUN | ({task: TASKS[task]} if task else {})
    names = [name for drawn in expected.values() for tags in drawn.values() for name in tags] + UNSEEN
    events, _ = train(tmp_path, [Writes(*names), TensorBoardPage()])
    assert charts(events, names) == expected


def test_a_chart_comes_with_its_first_value_and_stays_when_the_run_is_continued(tmp_path):
    """Foreign logs val/loss, by Lightning's own `log`; it validates after the second step."""
    page = TensorBoardPage()
    options = {"limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None}
    events, _ = train(tmp_path / "a", [Writes("lr"), page], **options)
    assert charts(events, ["lr", "val/loss"]) == {
        "quality": {"validation loss": ["val/loss"]},
        "health": {"learning rate": ["lr"]},
    }
    continued = TensorBoardPage()
    continued.load_state_dict(json.loads(json.dumps(page.state_dict())))
    events, _ = train(tmp_path / "b", [Writes("grad/norm"), continued])  # does not validate
    assert {title for drawn in charts(events, []).values() for title in drawn} == {
        "validation loss",
        "learning rate",
        "gradient norm",
    }


@pytest.mark.parametrize("layers", [False, True])
def test_losses_are_first_and_layers_are_summed_up_unless_they_are_asked_for(tmp_path, layers):
    events, rows = train(tmp_path, [HealthSignals(1, layers=layers), Writes("val/loss", "train/loss", "experts/load")])
    tags = events.Tags()["scalars"]
    assert sorted(tags)[:3] == ["Loss/train", "Loss/validation", "experts/load"]  # as TensorBoard sorts groups: by code points
    assert (
        [each.value for each in events.Scalars("Loss/train")] == [each.value for each in events.Scalars("train/loss")] == [1, 1]
    )
    assert not any(tag.startswith("Loss/") for row in rows.values() for tag in row), "a name for TensorBoard alone"
    single = {tag for tag in rows[1] if re.fullmatch(r"health/\w+/(embed|head)", tag)}
    assert {tag.split("/")[1] for tag in single} == {"weight_norm", "gradient_norm", "update_norm", "update_ratio"}
    assert single & set(tags) == (single if layers else set())
    summed_up = {tag for tag in tags if tag.endswith(("/lowest", "/median", "/highest"))}
    assert len(summed_up) == (0 if layers else 12)
    for tag in summed_up:
        group, _, which = tag.rpartition("/")
        choose = {"lowest": min, "median": statistics.median, "highest": max}[which]
        expected = [choose(row[f"{group}/{layer}"] for layer in ("embed", "head")) for row in rows.values()]
        assert [each.value for each in events.Scalars(tag)] == pytest.approx(expected, rel=1e-6)  # in fp32


def test_without_tensorboard_nothing_is_laid_out(tmp_path):
    trainer = make_trainer([Writes("lr"), TensorBoardPage()], tmp_path, steps=1)
    trainer.fit(Foreign(steps=1))
    assert trainer.logger.rows == {1: {"lr": 1.0}}
