"""Text that does not fit on the disk is dropped; other errors of the output are not."""

import io
import os

import pytest

from lit_llm.cli.output_streams import LossyFile


def test_a_full_disk_drops_text_and_a_closed_pipe_is_an_error(tmp_path):
    full = io.TextIOWrapper(io.BufferedWriter(LossyFile(os.open("/dev/full", os.O_WRONLY))), line_buffering=True)
    print("lost", file=full)
    full.flush()
    file = io.TextIOWrapper(io.BufferedWriter(LossyFile(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))))
    print("kept", file=file, flush=True)
    assert (tmp_path / "out").read_text() == "kept\n" and not file.isatty()
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        LossyFile(write).write(b"x")
