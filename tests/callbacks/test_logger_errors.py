"""LoggerErrors: a logger that cannot write costs its rows, not the run."""

import shutil
from types import SimpleNamespace

import pytest
from foreign import Foreign, make_trainer
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.callbacks import LoggerErrors, logger_errors

STEPS = 12


class Writer(Callback):
    """Writes a row and a text after each step, and saves. Does something before the rows of some steps."""

    def __init__(self, clock, **before):
        self.clock, self.before = clock, {int(name[1:]): do for name, do in before.items()}

    def on_train_batch_end(self, trainer, *_):
        step = trainer.global_step
        self.clock[0] = float(step)
        self.before.get(step, lambda: None)()
        for logger in trainer.loggers:
            logger.log_metrics({"a": step, "b": -step}, step=step)
            logger.save()
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("text", str(step), step)


@pytest.fixture
def clock(monkeypatch):
    """Seconds are steps here, and every third step may try again."""
    now = [0.0]
    monkeypatch.setattr(logger_errors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(logger_errors, "RETRY_SECONDS", 3.0)
    return now


def train(folder, loggers, clock, **before):
    errors = LoggerErrors()
    trainer = make_trainer([errors, Writer(clock, **before)], folder, steps=STEPS, logger=loggers)
    trainer.fit(Foreign(steps=STEPS))
    assert trainer.global_step == STEPS
    return errors


def steps_of(folder, tag):
    """As TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in events.Scalars(tag)]


def test_after_a_full_disk_the_rows_continue_in_a_new_event_file(tmp_path, clock):
    events = tmp_path / "events"

    def fill():  # the device says ENOSPC, and the file that was written so far is kept
        (file,) = events.glob("events.*")
        file.rename(tmp_path / "before")
        file.symlink_to("/dev/full")

    with pytest.warns(UserWarning) as said:
        errors = train(tmp_path, [TensorBoardLogger(events, name="", version="", purge_step=0)], clock, s5=fill)
    full, new = sorted(events.glob("events.*"), key=lambda path: not path.is_symlink())
    assert full.is_symlink() and not new.is_symlink()
    full.unlink()
    shutil.move(tmp_path / "before", full)
    for tag in ("a", "b"):
        assert steps_of(events, tag) == [1, 2, 3, 4, 8, 9, 10, 11, 12]  # tried again 3 s after step 5
    assert 2 <= errors.lost <= 3
    said = [str(warning.message) for warning in said if "TensorBoardLogger" in str(warning.message)]
    assert said == [
        "TensorBoardLogger cannot write: No space left on device. Training goes on without its rows. It is tried again every "
        "3 s: make room on the disk, or restore the folder.",
        f"TensorBoardLogger writes again. It has lost about {errors.lost} rows.",
        f"TensorBoardLogger could not write about {errors.lost} rows. The curves have gaps there.",
    ]


@pytest.mark.parametrize("restored", [True, False])
def test_a_folder_that_is_gone_is_not_made_again_but_used_when_it_is_back(tmp_path, clock, restored):
    events, away = tmp_path / "events", tmp_path / "away"
    before = {"s3": lambda: events.rename(away), "s7": lambda: away.rename(events) if restored else None}
    with pytest.warns(UserWarning, match="TensorBoardLogger cannot write: No such file or directory"):
        errors = train(tmp_path, [TensorBoardLogger(events, name="", version="")], clock, **before)
    lost = range(3, 9) if restored else range(3, STEPS + 1)  # tried at 6, and again at 9
    assert steps_of(events if restored else away, "a") == [step for step in range(1, STEPS + 1) if step not in lost]
    assert events.exists() == restored
    assert len(lost) - 1 <= errors.lost <= len(lost)


def test_other_loggers_keep_their_rows_and_their_other_errors(tmp_path, clock):
    logger = CSVLogger(tmp_path, name="", version="csv")
    file = tmp_path / "csv" / "metrics.csv"

    def fill():
        file.rename(tmp_path / "before")
        file.symlink_to("/dev/full")

    with pytest.warns(UserWarning, match="CSVLogger cannot write: No space left on device"):
        errors = train(tmp_path, [logger], clock, s5=fill, s7=file.unlink)
    written = [int(line.split(",")[-1]) for line in file.read_text().splitlines()[1:]]
    assert set(written) >= set(range(8, STEPS + 1)) and 1 <= errors.lost <= STEPS - 5

    class Broken(CSVLogger):
        def log_metrics(self, metrics, step=None):
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        train(tmp_path / "other", [Broken(tmp_path / "other")], clock)
