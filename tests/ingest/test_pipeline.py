"""From files of any format to shards: the right tokens, the same bytes for any number of workers and after any kill."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import numpy as np
import pytest
import tokenizers
from ingest.corpus import write_formats
from ingest.ingest_script import run
from kill_loop import run_with_kills

from lit_llm.ingest.selection import text_hash
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.tokenizers import BPE

SCRIPT = Path(__file__).with_name("ingest_script.py")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of files, its documents by file, and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = write_formats(folder / "files")
    tokenizer = BPE(400)
    tokenizer.train(text for each in documents.values() for text in each)
    tokenizer.save(folder)
    return folder, documents


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """What one process makes of the corpus: file name → hash."""
    out = tmp_path_factory.mktemp("reference") / "out"
    run(corpus[0] / "files", out, 0)
    return contents(out)


def contents(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def read_split(out: Path, name: str) -> tuple[list[int], list[int]]:
    """Tokens and document ends of a split, read by hand: a header of 1,024 bytes, then uint16; ends as uint64."""
    tokens: list[int] = []
    ends: list[int] = []
    for path in sorted(out.glob(f"{name}_*.bin")):
        ends += (np.fromfile(path.with_suffix(".docs"), "<u8") + len(tokens)).tolist()
        tokens += np.fromfile(path, "<u2", offset=1024).tolist()
    return tokens, ends


def test_every_document_of_every_format_is_in_the_right_split_with_the_ids_of_tokenizers(corpus, tmp_path):
    folder, documents = corpus
    run(folder / "files", tmp_path / "out", 0)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = library.token_to_id("<|endoftext|>")
    wanted: dict[str, list[list[int]]] = {"train": [], "val": []}
    held_out = {text for each in documents.values() for text in each if text_hash(text.encode()) < 0.1}
    assert len(held_out) > 10
    for name in sorted(documents):
        for text in documents[name]:
            split = "val" if text in held_out else "train"
            wanted[split].append([*library.encode(text, add_special_tokens=False).ids, end])
    for split, ids in wanted.items():
        tokens, ends = read_split(tmp_path / "out", split)
        found = [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        if split == "val":
            assert found == ids
        else:  # the short ones repeat a held-out one by chance, and are left out
            left_out = [document for document in ids if document not in found]
            assert found == [document for document in ids if document in found]
            assert all(len(document) < 15 for document in left_out)
        manifest = Manifest.read(tmp_path / "out")
        assert manifest is not None
        assert (manifest.splits[split].documents, manifest.splits[split].tokens) == (len(found), sum(map(len, found)))
    assert sum(split.bytes for split in manifest.splits.values()) <= sum(
        len(text.encode()) for each in documents.values() for text in each
    )


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_workers_writes_the_same_bytes(corpus, expected, tmp_path, workers):
    run(corpus[0] / "files", tmp_path / "out", workers)
    assert contents(tmp_path / "out") == expected


def start(corpus_folder: Path, out: Path, workers: int) -> fork_server.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(corpus_folder / "files"), str(out), str(workers)]
    return fork_server.Popen(command, env=environment, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [1, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4)), 2])
def test_killed_again_and_again_it_ends_with_the_same_bytes(corpus, expected, tmp_path, workers, cases):
    folder, _ = corpus
    draw, kills = random.Random(workers), 0
    for case in range(cases):
        out = tmp_path / f"out{case}"
        kills += run_with_kills(functools.partial(start, folder, out, workers), out, draw, most=25)  # of about 120 files
        assert contents(out) == expected
    print(f"{workers} workers: {kills} kills")
    assert kills >= 3


@pytest.mark.slow
def test_a_parent_that_is_killed_takes_its_workers_with_it(corpus, expected, tmp_path):
    process = start(corpus[0], tmp_path / "out", 2)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/parts/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while time.monotonic() < deadline:
        alive = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout.split()
        if not alive:
            break
        time.sleep(0.05)
    assert not alive
    run(corpus[0] / "files", tmp_path / "out", 2)
    assert contents(tmp_path / "out") == expected
