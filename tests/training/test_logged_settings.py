"""The settings of a run in its loggers, and runs with loggers other than TensorBoard's."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from recipe_runs import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lit_llm.checkpoint.io import FolderCheckpointIO
from lit_llm.runs import load
from lit_llm.training.save_config import log_settings, shown

SETTINGS = {
    "model.n_layer": 2,
    "model.bias": False,
    "model.window": None,
    "optimizer": "lit_llm.optim.Lion",
    "optimizer.betas": [0.9, 0.95],
    "data.paths": "text.txt",
    "trainer.max_steps": 8,
    "trainer.accelerator": "cpu",
    "samples.top_k": 50,
}
DECISIVE = {
    "model.n_layer": 2,
    "model.bias": False,
    "optimizer": "lit_llm.optim.Lion",
    "optimizer.betas": "[0.9, 0.95]",
    "data.paths": "text.txt",
    "trainer.max_steps": 8,
}


def plugin_data(folder):
    """What TensorBoard's plugin for hyper-parameters reads from the event files of a folder."""
    events = EventAccumulator(str(folder)).Reload()
    content = events.PluginTagToContent("hparams")
    return {tag: HParamsPluginData.FromString(value) for tag, value in content.items()}


def test_tensorboard_has_the_settings_that_change_the_result_in_the_runs_own_file(tmp_path):
    assert shown(SETTINGS) == DECISIVE
    for _ in range(2):  # a run and its continuation
        logger = TensorBoardLogger(tmp_path, name="", version="")
        log_settings(logger, SETTINGS, "a: 1\n", 0)
        logger.finalize("success")
    start = plugin_data(tmp_path)["_hparams_/session_start_info"].session_start_info
    kinds = {"bool_value", "number_value", "string_value"}
    found = {key: next(getattr(value, kind) for kind in kinds if value.HasField(kind)) for key, value in start.hparams.items()}
    assert found == DECISIVE
    experiment = plugin_data(tmp_path)["_hparams_/experiment"].experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["val/loss", "val/bits_per_byte", "train/loss"]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "no folder of its own"
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert tags["scalars"] == [] and tags["tensors"] == ["settings/config.yaml/text_summary"]


TEXTS = (
    "--samples",
    "TextSamples",
    "--samples.prompts",
    '["line"]',
    "--samples.every_n_steps",
    "2",
    "--trainer.max_steps",
    "4",
)


def fit(capsys, logger: dict, *more: str) -> None:
    Path("logger.yaml").write_text(yaml.dump({"trainer": {"logger": logger}}))
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--config", "logger.yaml", *TEXTS, *more)
    assert code == 0, err


def of(logger: str, /, **arguments) -> dict:
    return {"class_path": f"lightning.pytorch.loggers.{logger}", "init_args": arguments}


@pytest.mark.slow
def test_a_csv_logger_has_the_rows_and_the_settings_and_no_text(folder, capsys):
    fit(capsys, of("CSVLogger", save_dir="logs", name="", version=""))
    with open("logs/metrics.csv") as file:
        losses = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    loaded = load("runs/tiny")
    rows = loaded.scalars["train/loss"]
    assert len(losses) == 4 and losses == dict(zip(rows.steps, rows.values, strict=True)) and loaded.texts == {}
    assert yaml.safe_load(Path("logs/hparams.yaml").read_text())["trainer.max_steps"] == 4
    # A version that is set is begun anew by a resumed run; without one, there is a new folder. metrics.jsonl has all steps.
    for arguments, file in (({"version": ""}, "metrics.csv"), ({}, "version_0/metrics.csv")):
        steps = len(load("runs/tiny").scalars["train/loss"].steps) + 2
        flags = ["--resume", "auto", "--trainer.max_steps", str(steps)]
        fit(capsys, of("CSVLogger", save_dir="logs", name="", **arguments), *flags)
        with open(Path("logs") / file) as rows_of_this_launch:
            assert [int(row["step"]) for row in csv.DictReader(rows_of_this_launch) if row["train/loss"]] == [steps - 1, steps]
        assert list(load("runs/tiny").scalars["train/loss"].steps) == [*range(1, steps + 1)]
    assert Path("logs/metrics.csv").is_file()


@pytest.mark.slow
def test_mlflow_has_the_rows_the_settings_and_the_samples_and_a_continued_run_adds_to_them(folder, capsys):
    mlflow = pytest.importorskip("mlflow")
    store = "sqlite:///mlflow.db"
    fit(capsys, of("MLFlowLogger", experiment_name="e", tracking_uri=store))
    client = mlflow.MlflowClient(store)
    (found,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert found.data.params["model.n_layer"] == "1"
    again = of("MLFlowLogger", experiment_name="e", tracking_uri=store)
    fit(capsys, again, "--resume", "auto", "--trainer.max_steps", "6")
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(metric.step for metric in losses) == [1, 2, 3, 4, 5, 6]
    rows = load("runs/tiny").scalars["train/loss"]
    assert {metric.step: metric.value for metric in losses} == dict(zip(rows.steps, rows.values, strict=True))
    names = [file.path for file in client.list_artifacts(found.info.run_id, "samples/line")]
    assert names == [f"samples/line/step-{step:08d}.txt" for step in (2, 4, 6)]


@pytest.mark.slow
def test_wandb_offline_has_the_settings_the_samples_and_the_histograms(folder, capsys, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    counted = "--histograms", "Histograms", "--histograms.every_n_steps", "4", "--histograms.parameters", "embedding"
    fit(capsys, of("WandbLogger", project="p", save_dir="logs", offline=True), *counted)
    summary, config, (made,) = dict(wandb.run.summary), dict(wandb.run.config), Path("logs/wandb").glob("offline-run-*")
    wandb.finish()
    rows = load("runs/tiny").scalars
    assert config["model.n_layer"] == 1
    assert summary["train/loss"] == rows["train/loss"].values[-1] and summary["trainer/global_step"] == 4
    assert summary["samples/line"]["_type"] == "table-file"
    (table,) = [path for path in made.glob("files/media/table/samples/line_*.json") if "4" in path.read_text()[:60]]
    assert json.loads(table.read_text())["columns"] == ["step", "text"]
    (before,) = Path("runs/tiny/checkpoints").glob("*step*3.ckpt")
    weights = FolderCheckpointIO().load_checkpoint(before)["state_dict"]["model.embedding.weight"]
    counts, edges = np.histogram(weights.double(), 64)
    logged = summary["weights/model.embedding.weight"]
    assert logged["values"] == counts.tolist() and logged["bins"] == pytest.approx(edges.tolist(), rel=1e-12)
    assert sum(summary["gradients/model.embedding.weight"]["values"]) == weights.numel()
    wandb.teardown()
    fit(capsys, of("WandbLogger", project="p", save_dir="logs", offline=True), "--resume", "auto", "--trainer.max_steps", "5")
    assert {path.name.rpartition("-")[2] for path in Path("logs/wandb").glob("offline-run-*")} == {wandb.run.id}
    wandb.finish()
