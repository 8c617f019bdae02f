"""Text that cannot be written is dropped where the command must go on; other errors of the output are not."""

import errno
import io
import os
import subprocess
import sys

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
    assert LossyFile(write, drop=(errno.EPIPE,)).write(b"lost") == 4


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_killed_process_has_written_its_lines(tmp_path, unbuffered):
    script = (
        "import os, signal, sys\n"
        "from lit_llm.cli.output_streams import survive_lost_output\n"
        "survive_lost_output(without_reader=True)\n"
        "print('said', file=sys.stdout if os.environ['PYTHONUNBUFFERED'] else sys.stderr)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = tmp_path / "out"
    with out.open("w") as file:
        command = [sys.executable, "-c", script]
        subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert out.read_text() == "said\n"


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["closed", "without a reader"])
def test_training_goes_on_when_nobody_reads_its_output(folder, stdout):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lit_llm", "fit", "--config", "tiny.yaml"]
    if stdout == "closed":
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs/tiny/checkpoints/last.ckpt").exists()
