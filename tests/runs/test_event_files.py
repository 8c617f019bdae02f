"""The order of a run's TensorBoard files when it is continued in the second in which it began."""

import time
import warnings

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from recipe_runs import curve, run

from lit_llm.callbacks.tensorboard_setup import wait_for_later_name


def write(folder, purge_step, losses):
    """Rows of a new event file, which is returned."""
    before = set(folder.glob("events.*"))
    logger = TensorBoardLogger(folder, name="", version="", purge_step=purge_step)
    for step, loss in losses.items():
        logger.log_metrics({"train/loss": loss}, step)
    logger.finalize("success")
    (file,) = set(folder.glob("events.*")) - before
    return file


def renamed(file, second):
    """The same file as a process with the last possible number would have written it in this second."""
    return file.rename(file.with_name(f"events.out.tfevents.{second}.host.9999999.0"))


def test_rows_written_in_the_second_of_an_earlier_file_are_kept(tmp_path):
    first = write(tmp_path, 0, {1: 1.0, 2: 2.0, 3: 3.0})
    first = renamed(first, int(time.time()) + 1)  # the second after this one: the machine may be slow
    wait_for_later_name(tmp_path)
    second = write(tmp_path, 3, {3: 3.5, 4: 4.0})
    assert second.name > first.name
    assert curve(tmp_path, "train/loss") == {1: 1.0, 2: 2.0, 3: 3.5, 4: 4.0}


def test_tensorboard_needs_that_order(tmp_path):
    """If this fails, `wait_for_later_name` is no longer needed."""
    renamed(write(tmp_path, 0, {1: 1.0, 2: 2.0, 3: 3.0}), int(time.time()) + 1000)
    write(tmp_path, 3, {3: 3.5, 4: 4.0})
    assert curve(tmp_path, "train/loss") == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize(
    ("names", "slept"),
    [
        ([], 0),
        (["999.host.1.0"], 0),
        (["1000.host.1.0"], 0.76),
        (["1001.host.1.0", "12.host.1.0"], 1.76),
        (["part-3", "1000"], 0),
    ],
)
def test_it_waits_for_the_next_second_and_no_longer(tmp_path, monkeypatch, names, slept):
    for name in names:
        (tmp_path / f"events.out.tfevents.{name}").touch()
    waits = []
    monkeypatch.setattr(time, "time", lambda: 1000.25)
    monkeypatch.setattr(time, "sleep", waits.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait_for_later_name(tmp_path)
    assert sum(waits) == pytest.approx(slept)


def test_a_clock_that_is_behind_is_named_and_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1600.host.1.0").touch()
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.warns(UserWarning, match=r"601 s ahead of this machine's clock.*metrics\.jsonl has them all"):
        wait_for_later_name(tmp_path)


def test_a_run_continued_in_the_same_second_has_every_row(folder, capsys):
    assert run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")[0] == 0
    (first,) = (folder / "runs/tiny").glob("events.*")
    first = renamed(first, int(time.time()))
    code, _, err = run(capsys, "fit", "--run", "runs/tiny", "--resume", "auto", "--trainer.max_steps", "4")
    assert code == 0, err
    assert sorted(curve(folder / "runs/tiny", "train/loss")) == [1, 2, 3, 4]
    assert max((folder / "runs/tiny").glob("events.*"), key=lambda file: file.name) != first
