"""The curve of a run folder whose event files are damaged at the end, as a full disk or a kill leaves them."""

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lit_llm.runs.loaded_run import LoadedRun


def write(folder, name, purge_step, losses):
    """An event file. TensorBoard reads the files of a folder in the order of their names."""
    logger = TensorBoardLogger(folder, name="", version="", purge_step=purge_step)
    for step, loss in losses.items():
        logger.log_metrics({"train/loss": loss}, step)
    logger.finalize("success")
    (file,) = [path for path in folder.glob("events.*") if not path.name.startswith("events.out.tfevents.part")]
    return file.rename(folder / f"events.out.tfevents.part-{name}")


@pytest.mark.parametrize("tail", [b"", bytes(40), b"\xff" * 40])
def test_an_event_file_is_read_up_to_its_truncated_record_and_later_files_follow(tmp_path, tail):
    first = write(tmp_path, 1, 0, {1: 1.0, 2: 2.0, 3: 3.0})
    content = first.read_bytes()
    starts = [i - content[:i][::-1].index(b"\x00\x00\x00\x00\x00\x00\x00") - 8 for i in records(content)]
    write(tmp_path, 2, 4, {4: 40.0})  # the run was continued after step 3
    for whole, start in enumerate(starts):
        end = (*starts[1:], len(content))[whole]
        for size in range(start + 1, end, 5):
            first.write_bytes(content[:size] + tail)
            rows = {row.step: row.loss for row in LoadedRun(tmp_path, of_lit_llm=False).curve.rows}
            assert rows == {**{step: float(step) for step in range(1, whole + 1)}, 4: 40.0}


def records(content):
    """Where the tag of each row is in an event file."""
    found, position = [], content.find(b"train/loss")
    while position >= 0:
        found.append(position)
        position = content.find(b"train/loss", position + 1)
    return found
