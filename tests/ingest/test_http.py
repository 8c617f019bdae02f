"""Files over HTTP: Python's own server, and one whose answers fail."""

import subprocess
import sys
import time
import urllib.request

import pytest
from http_server import CONTENT, serving
from ports import free_port

from lit_llm.core.errors import UserError
from lit_llm.ingest import open_source as opening
from lit_llm.ingest import progress
from lit_llm.ingest.open_source import open_source
from lit_llm.ingest.paths import list_sources


@pytest.fixture(scope="module")
def server():
    with serving() as address:
        yield address


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(opening, "_FIRST_PAUSE", 0.001)


def one(url):
    (source,), problems = list_sources(url, flag="--data.paths")
    assert problems == []
    return source


def problem(url):
    sources, (said,) = list_sources(url, flag="--data.paths")
    assert sources == []
    return said


def test_files_folders_and_globs_of_pythons_server(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "sub" / "b c.txt").write_bytes(b"b")
    (tmp_path / "sub" / "none.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"h")
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            at = f"http://127.0.0.1:{port}"
            for _ in range(500):
                try:
                    urllib.request.urlopen(at).close()
                    break
                except OSError:
                    time.sleep(0.01)
            every = [(f"{at}/a.txt", len(CONTENT)), (f"{at}/sub/b%20c.txt", 1)]
            for pattern, expected in ((f"{at}/", every), (f"{at}/**/*.txt", every), (f"{at}/sub", every[1:])):
                sources, problems = list_sources(pattern, flag="--data.paths")
                assert (sorted((source.path, source.size) for source in sources), problems) == (expected, [])
            assert "Last-Modified" in sources[0].version
            with open_source(sources[0]) as file:
                assert file.read() == b"b"
            with open_source(one(f"{at}/a.txt")) as file:  # more than one buffer, from a server without ranges
                assert (file.read(10), file.tell(), file.seekable()) == (CONTENT[:10], 10, False)
                assert (file.read(), file.tell()) == (CONTENT[10:], len(CONTENT))
        finally:
            process.terminate()


def test_a_broken_connection_is_continued_at_the_same_byte(server):
    source = one(f"{server}/ranges/a.txt")
    assert source.size == len(CONTENT) > 2 * 3_000_000
    with open_source(source) as file:
        assert file.read() == CONTENT


def test_without_ranges_a_broken_connection_is_one_sentence(server):
    with open_source(one(f"{server}/whole/a.txt")) as file, pytest.raises(UserError) as error:
        file.read()
    said = str(error.value)
    assert said.startswith(f"{server}/whole/a.txt cannot be read: the connection broke after ")
    assert said.endswith(" bytes, and the server does not continue a transfer; download the file first.")


def test_a_file_that_changes_while_it_is_read_is_refused(server):
    with (
        open_source(one(f"{server}/changes/a.txt")) as file,
        pytest.raises(UserError, match="has changed since this command started"),
    ):
        file.read()


def test_progress_needs_no_length(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    for total, known in ((0, False), (3_000_000, False), (10_000_000, True)):
        with progress.ProgressLog(tmp_path / "log").stage("Reading", total=total) as report:
            report(5_000_000, 7_000_000)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("Reading: 50.0 %, 7.0 MB of text in " if known else "Reading: 7.0 MB of text in ")
        assert line.endswith("s left" if known else "MB/s")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, "it does not exist"),
        (403, "access is denied (status 403)"),
        (503, "the server cannot be reached or does not answer (status 503)"),
        (400, "the server refuses the request (status 400)"),
    ],
)
def test_each_status_is_one_sentence(server, status, reason):
    url = f"{server}/status/{status}"
    said = problem(url)
    assert said.startswith(f"{url} cannot be read: {reason}") and said.endswith("(--data.paths).")


def test_a_password_or_a_signature_is_used_and_not_shown(server):
    host = server.removeprefix("http://")
    for url in (f"http://me:secret@{host}/private/a.txt", f"{server}/private/a.txt?key=secret"):
        source = one(url)
        with open_source(source) as file:
            assert file.read(4) == b"line"
        assert "secret" not in source.name + repr(source)
    assert "secret" not in problem(f"http://you:secret@{host}/private/a.txt")
    assert "secret" not in problem(f"{server}/status/403?key=secret")


def test_a_host_that_cannot_be_reached_is_one_sentence():
    closed = f"127.0.0.1:{free_port()}"
    for host in (closed, "no-such-host.invalid"):
        assert problem(f"http://{host}/a.txt").startswith(f"http://{host}/a.txt cannot be read: the server cannot be reached")


def test_a_server_without_a_listing_is_one_sentence(server):
    for url in (f"{server}/plain/*.txt", f"{server}/plain/"):
        assert problem(url) == f"{url}: the server lists no files; give the URL of each file (--data.paths)."
