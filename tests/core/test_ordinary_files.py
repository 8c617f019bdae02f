"""Files that somebody else may have replaced: opened if they are ordinary, read up to a limit, not written through links."""

import os

import pytest

from lit_llm.callbacks import ordinary_files
from lit_llm.core import disk
from lit_llm.core.errors import UserError
from lit_llm.ingest.progress import ProgressLog


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: os.mkfifo(path), "pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "device"),
        (lambda path: path.mkdir(), "folder"),
        (lambda path: path.write_bytes(b"12345"), "larger than 4"),
    ],
)
def test_what_is_no_small_ordinary_file_is_refused_at_once(make, word, tmp_path):
    make(tmp_path / "file")
    with pytest.raises(disk.UnusableFile, match=word) as raised:
        disk.read_ordinary(tmp_path / "file", 4)
    assert isinstance(raised.value, OSError) and isinstance(raised.value, UserError), "either handler says it in a sentence"
    assert str(tmp_path / "file") in str(raised.value)


def test_a_file_of_the_kernel_that_has_nothing_to_read_yet_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "file")  # such as /proc/kmsg, which says that it is an ordinary file
    monkeypatch.setattr(ordinary_files.stat, "S_ISREG", lambda mode: True)
    other_end = os.open(tmp_path / "file", os.O_RDWR)
    with pytest.raises(disk.UnusableFile, match="no content"):
        disk.read_ordinary(tmp_path / "file")
    os.close(other_end)


def test_a_file_of_the_limit_is_read_and_deep_json_is_a_value_error(tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    assert disk.read_ordinary(tmp_path / "file", 4) == b"1234" and disk.read_json(tmp_path / "file") == 1234
    (tmp_path / "file").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="deep"):
        disk.read_json(tmp_path / "file")


def test_a_link_is_refused_where_it_would_be_followed_and_replaced_where_a_file_is_written(tmp_path):
    target, link, partial = tmp_path / "target", tmp_path / "link", tmp_path / ".text.partial"
    target.write_text("kept")
    for each in (link, partial):
        each.symlink_to(target)
    with pytest.raises(disk.UnusableFile, match="link"):
        disk.open_ordinary(link, os.O_RDWR | os.O_NOFOLLOW)
    with disk.new_file(link) as file:
        file.write(b"new")
    disk.write_text(tmp_path / "text", "content")
    assert target.read_text() == "kept" and link.read_text() == "new" and not link.is_symlink()
    assert (tmp_path / "text").read_text() == "content" and not os.path.lexists(partial)


def test_a_log_is_not_appended_through_a_link_or_to_a_pipe(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            ProgressLog(tmp_path / name).note("line")
    assert (tmp_path / "target").read_text() == "kept"
