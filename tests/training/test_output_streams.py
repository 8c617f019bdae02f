"""Text that cannot be written is dropped, and the command goes on. At its end a full disk is an error, a closed pipe is not."""

import errno
import io
import os
import subprocess
import sys

import pytest

from lit_llm.training.output_streams import LossyFile


def test_a_full_disk_and_a_closed_pipe_drop_text_and_other_errors_do_not(tmp_path):
    raw = LossyFile(os.open("/dev/full", os.O_WRONLY))
    full = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    print("lost", file=full)
    full.flush()
    assert raw.lost == os.strerror(errno.ENOSPC)
    file = io.TextIOWrapper(io.BufferedWriter(LossyFile(os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT))))
    print("kept", file=file, flush=True)
    assert (tmp_path / "out").read_text() == "kept\n" and not file.isatty()
    read, write = os.pipe()
    os.close(read)
    pipe = LossyFile(write)
    assert pipe.write(b"lost") == 4 and pipe.lost is None
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        pipe.write(b"x")


@pytest.mark.parametrize("command", ["--help", "--version", "recipes"])
def test_a_command_whose_output_is_lost(command):
    """Without a reader, as after `| head -1`, it has said enough; on a full disk, its result is incomplete."""
    words = [sys.executable, "-m", "lit_llm", command]
    read, write = os.pipe()
    os.close(read)
    unread = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    os.close(write)
    assert (unread.returncode, unread.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        lost = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert lost.returncode == 2
    assert lost.stderr == f"error: standard output cannot be written: {os.strerror(errno.ENOSPC)}\n"


def test_characters_that_the_encoding_lacks_are_escaped():
    words = [sys.executable, "-c", "from lit_llm.training.bounded_exit import run_and_end as f; f(lambda: print('a…') or 0)"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, b"a\\u2026\n"), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_killed_process_has_written_its_lines(tmp_path, unbuffered):
    script = (
        "import os, signal, sys\n"
        "from lit_llm.training.output_streams import survive_lost_output\n"
        "survive_lost_output()\n"
        "print('said', file=sys.stdout if os.environ['PYTHONUNBUFFERED'] else sys.stderr)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = tmp_path / "out"
    with out.open("w") as file:
        command = [sys.executable, "-c", script]
        subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert out.read_text() == "said\n"


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["closed", "without a reader", "full"])
def test_training_goes_on_when_nobody_reads_its_output(folder, stdout):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lit_llm", "fit", "--config", "tiny.yaml"]
    if stdout == "closed":
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
    if stdout == "full":
        write = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert ("warning: standard output cannot be written: No space left" in done.stderr) is (stdout == "full")
    assert (folder / "runs/tiny/checkpoints/last.ckpt").exists()
