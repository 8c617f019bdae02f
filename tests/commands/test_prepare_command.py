"""`prepare`: what it says, what a mistake costs, and that it goes on where it stopped."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import numpy as np
import pytest
import tokenizers

from lit_llm.__main__ import main
from lit_llm.ingest import inputs
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.ingest.token_parts import read_part
from lit_llm.tokenizers import BPE, Bytes

PREPARE = (
    "prepare",
    "--data",
    "TextFiles",
    "--data.paths",
    "corpus",
    "--data.tokenizer",
    "BPE",
    "--data.tokenizer.vocab_size",
    "300",
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A corpus of three files of JSONL, each a job of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "JOB_BYTES", 1)
    (tmp_path / "corpus").mkdir()
    for name in "abc":
        lines = (json.dumps({"text": f"{name}: {i} is not {i * i}.\n" * 5}) + "\n" for i in range(20))
        (tmp_path / f"corpus/{name}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_paths_alone_are_text_files_and_fit_names_that_class(project, capsys):
    assert run(capsys, *PREPARE, "--out", "named")[0] == run(capsys, "prepare", *PREPARE[3:], "--out", "alone")[0] == 0
    assert Path("alone/train_000000.bin").read_bytes() == Path("named/train_000000.bin").read_bytes()
    Path("chats.yaml").write_text("data: {class_path: ChatFiles, init_args: {chat_template: chatml}}\n")
    code, _, err = run(capsys, "prepare", "--config", "chats.yaml", "--data.paths", "corpus", "--out", "chats")
    assert code == 2 and "onversations" in err  # a recipe's own class stays
    code, _, err = run(capsys, "fit", "--data.paths", "corpus")
    assert code == 2 and "--data TextFiles" in err and "--data.paths" in err
    for config in ("gpt2-124m", "speed-124m"):
        code, _, err = run(capsys, "fit", "--config", config, "--trainer.accelerator", "cpu", "--trainer.devices", "1")
        assert code == 2 and "hf download kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir data/fineweb10B" in err


def test_data_without_text_and_text_that_is_not_there_are_sentences(project, capsys):
    assert run(capsys, *PREPARE, "--out", "shards")[0] == 0
    shards = "TokenShards", "--data.path", "shards"
    for words, said in ((shards, "TokenShards has no text"), (("TextFiles",), "No training text")):
        code, _, err = run(capsys, "prepare", "--out", "out", "--data", *words)
        assert code == 2 and said in err and not (project / "out").exists()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.slow
def test_a_damaged_file_costs_nothing_but_a_repetition(project, capsys):
    assert run(capsys, *PREPARE, "--out", "whole")[0] == 0
    good = (project / "corpus/b.jsonl.gz").read_bytes()
    times = (project / "corpus/b.jsonl.gz").stat()
    (project / "corpus/b.jsonl.gz").write_bytes(good[:-20])
    code, out, err = run(capsys, *PREPARE, "--out", "shards")
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "corpus/b.jsonl.gz is truncated" in said[0]
    assert not (project / "shards").exists()
    (project / "corpus/b.jsonl.gz").write_bytes(good)
    os.utime(project / "corpus/b.jsonl.gz", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(capsys, *PREPARE, "--out", "shards")[0] == 0
    assert contents(project / "shards") == contents(project / "whole")
    assert sorted(os.listdir()) == [".shards.log", ".whole.log", "corpus", "shards", "whole"]


def test_the_report_counts_documents_bytes_and_tokens(project, capsys):
    (project / "corpus/d.jsonl").write_text('{"text": ""}\n{"text": null}\n{"text": "the last one"}\n')
    code, out, _ = run(capsys, *PREPARE, "--out", "shards", "--workers", "2")
    assert code == 0
    found = dict(re.findall(r"^(train|val): ([\d,]+) documents", out, re.M))
    left_out = re.search(r"left out of training: ([\d,]+)", out)
    total = sum(int(count.replace(",", "")) for count in found.values()) + (int(left_out[1]) if left_out else 0)
    assert total == 3 * 20 + 1
    assert "skipped: 2 documents without text" in out
    assert "begin with their text and end with id 0" in out
    log = (project / ".shards.log").read_text()
    assert re.search(r"Tokenising: finished, [\d.,]+ MB of text in [\d.]+ s, [\d.]+ MB/s", log)
    assert all(f"finished corpus/{name}.jsonl" in log for name in "abcd")


def test_the_size_of_the_vocabulary_is_said_and_that_the_text_gives_no_more(project, capsys):
    (project / "abc.txt").write_text("abcab" * 9)
    words = ["prepare", "--data.paths", "abc.txt", "--data.val_fraction", "0.5", "--data.tokenizer", "Characters"]
    ids = 3 + 2  # the letters, U+FFFD and the end of text
    for size, fewer in ((ids, ""), (1000, " (1,000 asked for: the text gives no more)")):
        code, out, _ = run(capsys, *words, "--data.tokenizer.vocab_size", str(size), "--out", f"of-{size}")
        assert code == 0 and f"vocabulary: {ids} ids{fewer}\n" in out
    code, out, _ = run(capsys, *words[:-2], "--out", "bytes")
    assert code == 0 and f"vocabulary: {Bytes().vocab_size} ids\n" in out


def test_a_wrong_key_names_those_that_are_there(project, capsys):
    code, _, err = run(capsys, *PREPARE, "--out", "shards", "--data.text_key", "body")
    assert code == 2 and "corpus/a.jsonl.gz line 1 has no key 'body', it has text:" in err
    assert "--data.text_key" in err and sorted(os.listdir()) == [".shards.log", "corpus"]


def test_a_tokenizer_without_an_end_of_document_is_asked_for_one(project, capsys):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.add_special_tokens(["<|im_end|>"])
    backend.save("tokenizer.json")
    flags = ("prepare", "--data", "TextFiles", "--data.paths", "corpus", "--data.tokenizer", "TokenizerJSON")
    flags = (*flags, "--data.tokenizer.path", "tokenizer.json", "--out", "shards")
    code, _, err = run(capsys, *flags)
    assert code == 2 and "<|im_end|>" in err and "eos_token" in err
    assert run(capsys, *flags, "--data.tokenizer.eos_token", "<|im_end|>")[0] == 0
    assert json.loads((project / "shards/meta.json").read_text())["eos_id"] == 2


@pytest.mark.slow
def test_what_another_call_has_written_is_not_published(project, capsys, monkeypatch):
    """Killed while it wrote small shards, then called with larger ones."""

    def stop(*_args, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", stop)  # every shard is written by then
        assert main([*PREPARE, "--out", "shards", "--shard_tokens", "100"]) == 130
    assert len(list(project.glob(".shards.partial/train_*.bin"))) > 5
    assert run(capsys, *PREPARE, "--out", "shards")[0] == 0
    assert run(capsys, *PREPARE, "--out", "whole")[0] == 0
    assert contents(project / "shards") == contents(project / "whole")
    assert not list(project.glob(".*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing", [pytest.param(name, marks=pytest.mark.slow) for name in ("*.val.docs", "*.json")] + ["*.train.bin"]
)
def test_parts_that_were_partly_deleted_are_made_again(project, capsys, monkeypatch, missing):
    def stop(*_args, **_more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", stop)
        assert main([*PREPARE, "--out", "shards"]) == 130
    for path in list(project.glob(f".shards.partial/parts/{missing}"))[:2]:
        path.unlink()
    assert run(capsys, *PREPARE, "--out", "shards")[0] == 0
    assert run(capsys, *PREPARE, "--out", "whole")[0] == 0
    assert contents(project / "shards") == contents(project / "whole")


@pytest.mark.slow
def test_a_split_without_text_and_an_output_inside_the_input_are_refused(project, capsys):
    (project / "one.jsonl").write_text('{"text": "a single document"}\n')
    only = ("prepare", "--data", "TextFiles", "--data.paths", "one.jsonl", "--out", "shards")
    code, _, err = run(capsys, *only)
    assert code == 2 and "error: The train data have 0 documents with 0 tokens; 1 held out for validation: give more" in err
    assert "Mend the error, then repeat the command" in err  # repeating it as it is does not help
    (project / "one.jsonl").write_text('{"text": "the same document"}\n' * 50)
    code, _, err = run(capsys, *only)
    assert code == 2 and "0 documents with 0 tokens; 50 held out for validation" in err
    code, _, err = run(capsys, *PREPARE, "--out", "corpus/shards")
    assert code == 2 and "corpus/shards lies in corpus, which is read" in err
    assert not list(project.glob("*/shards")) and not (project / "shards").exists()


def test_a_class_of_the_users_own_has_an_identity_of_its_own():
    class Upper(Bytes):
        def __init__(self, shift: int) -> None:
            self.shift = shift

    class Own(BPE):
        pass

    known = [Bytes(), Upper(0), Upper(1), BPE(300), Own(300)]
    assert len({tokenizer.identity() for tokenizer in known}) == len(known)
    assert Bytes().identity() == "bytes" and Upper(1).identity() == Upper(1).identity()


def test_ctrl_c_while_parts_are_joined_is_a_keyboard_interrupt(tmp_path):
    """Numpy's fromfile turns a tenth of them into a TypeError, which would end `prepare` with a traceback."""
    ends = np.arange(30, 60_001, 30, dtype="<u8")
    (tmp_path / "part.bin").write_bytes(np.zeros(60_000, dtype="<u2").tobytes())
    (tmp_path / "part.docs").write_bytes(ends.tobytes())
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(200):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    for _ in read_part(tmp_path / "part", np.dtype("<u2")):
                        pass
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process(project, capsys):
    assert run(capsys, *PREPARE, "--out", "whole")[0] == 0
    lines = (json.dumps({"text": f"{i} plus {i} is {2 * i}. " * 40}) + "\n" for i in range(8_000))
    (project / "corpus/z.jsonl").write_text("".join(lines))
    command = [sys.executable, "-m", "lit_llm", *PREPARE, "--out", "shards", "--workers", "2"]
    process = fork_server.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(project.glob(".shards.partial/parts/*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Repeat the command to continue." in err and "Traceback" not in err
    # Python's resource tracker ends by itself, a moment after the process that it belongs to.
    deadline = time.monotonic() + 30
    while alive := subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    (project / "corpus/z.jsonl").unlink()
    assert run(capsys, *PREPARE, "--out", "shards")[0] == 0
    assert contents(project / "shards") == contents(project / "whole")


@pytest.mark.slow
def test_names_of_files_need_not_be_utf_8(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for i in range(12):  # of ten plain files or more, whole ones are held out by a hash of their names
        Path(os.fsdecode(b"texts/\xff%d.txt" % i)).write_text(f"text {i}\n")
    assert (
        run(capsys, "prepare", "--data", "TextFiles", "--data.paths", "texts", "--data.tokenizer", "Bytes", "--out", "s")[0]
        == 0
    )
    splits = json.loads(Path("s/meta.json").read_text())["splits"]
    assert [sum(split[key] for split in splits.values()) for key in ("documents", "bytes")] == [12, 10 * 7 + 2 * 8]
    assert run(capsys, "clean", "--data.paths", "texts/*", "--normalise", "true", "--out", "cleaned")[0] == 0
    assert run(capsys, "clean", "--data.paths", "cleaned", "--normalise", "true", "--out", "again")[0] == 0
    assert json.loads(Path("again/report.json").read_text())["kept"]["documents"] == 12
