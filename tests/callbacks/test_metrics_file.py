"""MetricsFile: one JSON line a row, whatever happens to the run or the disk."""

import json
import resource
import struct
from types import SimpleNamespace

import pytest
import torch
from foreign import Foreign, make_trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.callbacks import Cosine, GradientNorm, MetricsFile, ValidateEvery, metrics_file


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The time of each call is 1.0, 2.0, …"""
    now = [0.0]

    def time():
        now[0] += 1
        return now[0]

    monkeypatch.setattr(metrics_file, "time", SimpleNamespace(time=time))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new" / "metrics.jsonl"


def strict(line):
    """JSON has no NaN; Python's reader accepts it unless told not to."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def rows(file):
    return [strict(line) for line in file.read_text().splitlines()]


def test_the_values_of_a_step_are_one_line_that_every_json_reader_reads(file):
    logger = MetricsFile(file)
    logger.log_metrics({"lr": 0.5, "count": 3, "flag": True}, step=1)
    logger.log_metrics({"loss": float("nan"), "up": float("inf"), "down": -float("inf"), "lr": 0.25}, step=1)
    assert not file.exists(), "the line may not be complete"
    logger.log_metrics({"text": "no number", "picture": object(), "step": 9.0, "time": 9.0, "loss": 2.0}, step=2)
    assert rows(file) == [
        {"step": 1, "time": 1.0, "lr": 0.25, "count": 3, "flag": 1, "loss": "NaN", "up": "Infinity", "down": "-Infinity"}
    ]
    logger.save()
    logger.save()
    logger.log_metrics({"val": 1.0}, step=2)
    logger.log_metrics({"val": 0.5})  # without a step: of the last one
    logger.finalize("failed")
    assert rows(file)[1:] == [{"step": 2, "time": 2.0, "loss": 2.0}, {"step": 2, "time": 3.0, "val": 0.5}]


def test_lightnings_default_checkpoints_are_beside_the_file(file, tmp_path):
    """As the only logger, it says where they go: save_dir / name / version / checkpoints."""
    trainer = make_trainer([GradientNorm()], tmp_path, steps=2, logger=MetricsFile(file), enable_checkpointing=True)
    trainer.fit(Foreign(2))
    assert [path.suffix for path in (file.parent / "checkpoints").iterdir()] == [".ckpt"]
    assert [row["step"] for row in rows(file)]


ROWS = [{"step": step, "time": 1.0, "loss": 1.0 / step} for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("step", "kept"),
    [(2, [1, 2]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (0, []), (-1, []), (None, [1, 2, 3, 4])],
)
@pytest.mark.parametrize("tail", [b"", b'{"step": 5, "ti', b"\xff\x00"])
def test_rows_after_the_resumed_step_and_a_half_line_are_removed_before_the_first_row(file, step, kept, tail):
    file.parent.mkdir()
    before = "".join(json.dumps(row) + "\n" for row in ROWS).encode() + tail
    file.write_bytes(before)
    logger = MetricsFile(file, step)
    logger.save()
    assert file.read_bytes() == before, "a run that ends before its first row changes nothing"
    logger.log_metrics({"loss": 7.0}, step=10)
    logger.save()
    assert [row["step"] for row in rows(file)] == [*kept, 10]
    assert list(file.parent.iterdir()) == [file]


class RestoresLate(SingleDeviceStrategy):
    """As FSDP: Lightning sets the Trainer's ckpt_path after it has called the loggers."""

    restore_checkpoint_after_setup = True


def test_a_trainer_that_begins_at_step_0_renames_the_file_of_an_earlier_run_and_a_resumed_one_continues_it(tmp_path, file):
    def fit(steps, resume_step=None, strategy="auto", **options):
        logger = MetricsFile(file, resume_step)
        trainer = make_trainer([GradientNorm()], tmp_path, steps=steps, logger=logger, strategy=strategy)
        trainer.fit(Foreign(9), **options)
        return trainer

    def named():
        return {path.name: [row["step"] for row in rows(path)] for path in file.parent.iterdir()}

    trainer = fit(3)
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(trainer.model)
    assert named() == {file.name: [1, 2, 3, 4]}
    fit(5, ckpt_path=tmp_path / "3.ckpt", weights_only=True)
    assert named() == {file.name: [1, 2, 3, 4, 4, 5]}, "every row is kept without resume_step"
    for older, steps in enumerate([2, 1], start=1):
        with pytest.warns(UserWarning, match=rf"earlier run, which are now in .*{file.name}\.{older}:"):
            fit(steps)
    assert named() == {file.name: [1], f"{file.name}.1": [1, 2, 3, 4, 4, 5], f"{file.name}.2": [1, 2]}
    fit(5, ckpt_path=tmp_path / "3.ckpt", weights_only=True, strategy=RestoresLate(torch.device("cpu")))
    assert named()[file.name] == [1, 4, 5] and len(named()) == 3
    fit(2, resume_step=-1)
    assert named()[file.name] == [1, 2] and len(named()) == 3, "a run that says where it begins"


def test_a_module_that_knows_nothing_of_it_gets_the_rows_that_tensorboard_gets(tmp_path, file):
    module = Foreign(steps=5)
    training_step = module.training_step

    def logging_step(batch, batch_idx):
        loss = training_step(batch, batch_idx)
        module.log("train_loss", loss)
        return loss

    module.training_step = logging_step
    loggers = [TensorBoardLogger(tmp_path, name="", version="events"), MetricsFile(file)]
    parts = [Cosine(total_steps=5), GradientNorm(0.5), ValidateEvery(2)]
    make_trainer(parts, tmp_path, steps=5, every=2, logger=loggers, limit_val_batches=1.0).fit(module)
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0}).Reload()
    drawn = {(e.step, tag): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    names = [(row["step"], tag, row[tag]) for row in rows(file) for tag in row.keys() - {"step", "time"}]
    written = {(step, tag): struct.unpack("f", struct.pack("f", value))[0] for step, tag, value in names}
    assert written == drawn and {"train_loss", "val/loss", "lr", "grad/norm"} <= {tag for _, tag in drawn}
    assert len({(step, tag) for step, tag, _ in names if tag != "epoch"}) == sum(tag != "epoch" for _, tag, _ in names)


def test_a_line_that_the_disk_took_a_part_of_is_removed_when_there_is_room_again(file):
    logger = MetricsFile(file)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    size = file.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    logger.log_metrics({"loss": 2.0}, step=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            logger.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.stat().st_size == size + 10
    logger.log_metrics({"loss": 3.0}, step=3)
    logger.save()
    assert [row["step"] for row in rows(file)] == [1, 2, 3]
