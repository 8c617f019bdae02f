"""While training, the planned peak is logged beside the measured one, and a difference is reported once."""

import json
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from planned_steps import peak_of

from lit_llm.callbacks import EMA, Throughput
from lit_llm.data import TextFiles
from lit_llm.models.gpt import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.optim import MuonAdamW
from lit_llm.plan import Optimizer, plan_monitor
from lit_llm.plan.measured_run import measured_run
from lit_llm.plan.plan_monitor import PlanMonitor
from lit_llm.training.language_model import LanguageModel


class Rows(Logger):
    """Keeps what is logged, by optimizer step."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


CONFIG = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "window": 24}  # sequences have 16 tokens


def fit(watch: PlanMonitor, module: LanguageModel, tmp_path, steps: int = 4, more: tuple[Callback, ...] = ()) -> Rows:
    logger = Rows()
    (tmp_path / "text.txt").write_text("a line of text, and another one\n" * 200)
    text, cache = str(tmp_path / "text.txt"), str(tmp_path / "cache")
    data = TextFiles(paths=text, cache_dir=cache, micro_batch_size=2, global_batch_size=4, block_size=16)
    trainer = Trainer(
        max_steps=steps,
        callbacks=[*more, watch],
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        log_every_n_steps=2,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=data)
    return logger


@pytest.mark.parametrize("chunk_size", [None, 8])
def test_the_planned_peak_is_that_of_the_run_and_in_every_row_from_the_second_step_on(chunk_size, tmp_path):
    watch = PlanMonitor()
    module = LanguageModel(GPTConfig(**CONFIG), partial(torch.optim.AdamW, fused=True), LossConfig(chunk_size=chunk_size))
    rows = fit(watch, module, tmp_path).rows
    expected = peak_of(
        GPTConfig(**CONFIG, vocab_size=257),
        sequences=2,
        block_size=16,
        accumulation=2,
        optimizer=Optimizer("AdamW", fused=True),
        loss=LossConfig(chunk_size=chunk_size),
        cuda=False,
    ).total
    assert watch.predicted_bytes == expected
    assert {step: row["plan/peak_gb"] for step, row in rows.items() if "plan/peak_gb" in row} == {
        2: expected / 1e9,
        4: expected / 1e9,
    }
    assert not any("plan/memory_ratio" in row for row in rows.values()), "resident memory is not compared"


def test_the_run_folder_gets_one_entry_for_each_launch_that_measured_its_speed(tmp_path):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "plan.json").write_text('{"cut')
    path, module = tmp_path / "plan.json", LanguageModel(GPTConfig(**CONFIG), partial(torch.optim.AdamW, fused=True))
    fit(PlanMonitor(), module, tmp_path, more=(Throughput(),))
    first = json.loads(path.read_text())["launches"][0]
    assert (first["first_step"], first["last_step"], first["measured"]["rows"]) == (0, 4, 2)
    assert first["parameters"] == sum(p.numel() for p in module.parameters())
    assert first["measured"]["step_seconds"] * first["measured"]["tokens_per_second"] == pytest.approx(4 * 16)
    fit(PlanMonitor(), module, tmp_path)  # without Throughput, nothing is measured
    fit(PlanMonitor(), module, tmp_path, more=(Throughput(),))
    assert [each["measured"]["rows"] for each in json.loads(path.read_text())["launches"]] == [2, 2]
    settings = measured_run(tmp_path).settings
    assert (settings.model, settings.accumulation, settings.sequence_length) == (module.config, 2, 16)
    assert settings.optimizer == Optimizer("AdamW", fused=True)


def test_a_disk_that_refuses_does_not_end_the_run_and_other_folders_stay_as_they_are(tmp_path):
    module = LanguageModel(GPTConfig(**CONFIG), torch.optim.AdamW)
    fit(PlanMonitor(), module, tmp_path, steps=1)
    assert not (tmp_path / "plan.json").exists(), "not a run folder"
    (tmp_path / "config.yaml").touch()
    (tmp_path / ".plan.json.partial").mkdir()
    with pytest.warns(UserWarning, match=r"plan\.json cannot be written: Is a directory"):
        fit(PlanMonitor(), module, tmp_path, steps=1)


def test_an_average_of_the_weights_is_planned(tmp_path):
    module = LanguageModel(GPTConfig(**CONFIG), partial(torch.optim.AdamW, fused=True))
    plain, averaged = PlanMonitor(), PlanMonitor()
    fit(plain, module, tmp_path, steps=1)
    fit(averaged, module, tmp_path, steps=1, more=(EMA(),))
    assert averaged.predicted_bytes - plain.predicted_bytes == 4 * sum(p.numel() for p in module.parameters())


def test_differences_are_reported_once_and_as_a_warning_beyond_the_tolerance():
    watch = PlanMonitor(tolerance=0.1)
    with pytest.warns(UserWarning, match=r"peak memory 11\.2 GB measured, 10 planned: \+12\.0%, beyond 10%"):
        watch._compare("peak memory", " GB", 10.0, 11.2, "")
    watch._compare("peak memory", " GB", 10.0, 20.0, "")  # said before
    watch._compare("MFU", "", 0.4, 0.41, "")  # near enough; a warning would be an error in this test
    assert watch._reported == {"peak memory", "MFU"}


class ForeignModule(LightningModule):
    """Has the attributes of a `LanguageModel`, but its memory is unknown."""


def test_a_foreign_module_gets_no_prediction_and_a_planner_that_fails_is_a_warning(tmp_path, monkeypatch):
    watch = PlanMonitor()
    watch.on_train_start(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), ForeignModule())
    assert watch.predicted_bytes is None

    def broken(*args, **kwargs):
        raise AttributeError("a bug")

    monkeypatch.setattr(plan_monitor, "peak_memory", broken)
    with pytest.warns(UserWarning, match="AttributeError: a bug"):
        rows = fit(watch, LanguageModel(GPTConfig(**CONFIG), MuonAdamW), tmp_path, steps=2).rows
    assert 2 in rows and not any("plan/" in name for name in rows[2]) and watch.predicted_bytes is None
