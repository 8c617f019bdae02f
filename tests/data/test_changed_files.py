"""Files of tokens that hold something else than they did, at equal size and time: each is named, and a copy is not."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from prepared import prepared
from recipe_runs import RECIPE, run

from lit_llm.data import Mixture, MixturePhase, MixtureSource, TokenShards, stored_files
from lit_llm.data.stored_files import BackgroundCheck, StoredFile, StoredFiles, hash_of
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.ingest.shards import ShardWriter

SIZES = {"block_size": 16, "global_batch_size": 4}
LINE = "resume: comparing hashes of {} of the data"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    splits = {"train": np.arange(4000) % 249, "val": np.arange(300) % 200}
    prepared(tmp_path / "shards", splits, shard_tokens=1500)
    Path("tiny.yaml").write_text(re.sub(r"data:\n(  .*\n)+", "", RECIPE))
    return tmp_path / "shards"


def put(path: Path, content: bytes) -> None:
    """Other content of equal size and time."""
    status = path.stat()
    assert len(content) == status.st_size and content != path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    put(path, bytes(content))


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    put(one, second)
    put(other, first)


def named(problems) -> list[str]:
    return [problem.partition(" has changed: its blake2b is ")[0].rpartition("/")[2] for problem in problems]


@pytest.mark.parametrize(
    ("damage", "files"),
    [
        (lambda f: flip(f / "train_000001.bin", 1024), ["train_000001.bin"]),
        (lambda f: flip(f / "train_000000.bin", 0), ["train_000000.bin"]),
        (lambda f: put(f / "val_000000.bin", (f / "val_000000.bin").read_bytes()[:1024] + bytes(600)), ["val_000000.bin"]),
        (lambda f: flip(f / "train_000002.docs", 0), ["train_000002.docs"]),
        (lambda f: swap(f / "train_000000.bin", f / "train_000001.bin"), ["train_000000.bin", "train_000001.bin"]),
    ],
    ids=["first token", "magic", "zeroed", "document end", "swapped"],
)
def test_each_damage_of_listed_shards_is_named(folder, damage, files):
    damage(folder)
    for data in (
        TokenShards(path=str(folder), **SIZES),
        Mixture(sources={"a": MixtureSource(path=str(folder))}, phases=[MixturePhase(weights={"a": 1})], **SIZES),
    ):
        data.setup()
        assert named(data.opened.files.problems()) == files


def test_a_mask_is_compared_with_its_hash(tmp_path):
    with ShardWriter(tmp_path, "train", vocab_size=257, shard_tokens=60, masked=True) as writer:
        writer.write(np.arange(100), np.arange(100, dtype=np.uint8) % 2)
        writer.end_document()
    prepared(tmp_path / "other")
    meta = json.loads((tmp_path / "other/meta.json").read_text())
    split = meta["splits"]["train"]
    split |= {"tokens": 100, "targets": 50, "mask_blake2b": writer.mask_blake2b, "tokens_blake2b": writer.tokens_blake2b}
    split["shards"] = [vars(shard) for shard in writer.shards]
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"splits": {"train": split}}))
    manifest = Manifest.read(tmp_path)
    assert manifest is not None
    flip(tmp_path / "train_000001.mask", 7)
    data = TokenShards(train=str(tmp_path / "train_*.bin"), val=str(tmp_path / "other/val_*.bin"), **SIZES)
    data.setup()
    assert named(data.opened.files.problems()) == ["train_000001.mask"]


def test_a_run_ends_at_a_changed_shard_and_a_resume_does_not_begin_with_one(folder, capsys):
    words = ["--config", "tiny.yaml", "--data", "TokenShards", "--data.path", "shards"]
    words += ["--data.micro_batch_size", "2", "--data.global_batch_size", "4", "--trainer.max_steps", "4"]
    assert run(capsys, "fit", *words, "--run_dir", "run")[0] == 0
    whole = (folder / "train_000001.bin").read_bytes()
    flip(folder / "train_000001.bin", 2000)
    # A new run hashes in the background: of so many steps, it makes those until then.
    for more in (
        ["--run_dir", "new", "--trainer.max_steps", "1000"],
        ["--run_dir", "run", "--resume", "auto", "--trainer.max_steps", "8"],
    ):
        for accept in ([], ["--accept_changes", "true"]) if "--resume" in more else ([],):
            code, out, err = run(capsys, "fit", *words, *more, *accept)
            assert code == 2 and named([err.strip()]) == ["train_000001.bin"]
            assert "step 5/8" not in out
    code, out, err = run(capsys, "check", *words)  # the background check, or the line of the checklist after three steps
    assert code in (1, 2) and "train_000001.bin" in err + re.sub(r"[\s│]", "", out)
    put(folder / "train_000001.bin", whole)  # the content of before, in another state
    code, out, _ = run(capsys, "fit", *words, "--run_dir", "run", "--resume", "auto", "--trainer.max_steps", "6")
    assert code == 0 and LINE.format("1 file") in out
    shutil.copytree(folder, "elsewhere")  # as on another machine: other paths, ctimes and inodes
    words[words.index("shards")] = "elsewhere"
    code, out, _ = run(capsys, "fit", *words, "--run_dir", "run", "--resume", "auto", "--trainer.max_steps", "8")
    assert code == 0 and LINE.format("8 files") in out
    code, out, _ = run(capsys, "fit", *words, "--run_dir", "run", "--resume", "auto", "--trainer.max_steps", "9")
    assert code == 0 and "files of the data" not in out, "nothing has changed since"
    code, out, _ = run(capsys, "check", *words)
    sizes = sum(file.stat().st_size for file in Path("elsewhere").iterdir() if file.suffix in (".bin", ".docs"))
    assert f"{sizes:,} bytes hashed" in out


@pytest.mark.parametrize("hashed", [True, False], ids=["all hashed", "the run was too short"])
def test_shards_that_nothing_lists_are_compared_with_the_checkpoint(folder, capsys, monkeypatch, hashed):
    # Hash before the first step or never: a machine's speed does not decide what the checkpoint knows.
    monkeypatch.setattr(BackgroundCheck, "start", lambda check: all(check._files.problems()) if hashed else None)
    (folder / "meta.json").unlink()
    words = ["--config", "tiny.yaml", "--data", "TokenShards", "--data.train", "shards/train_*.bin", "--data.vocab_size", "257"]
    words += ["--data.val", "shards/val_*.bin", "--data.micro_batch_size", "2", "--data.global_batch_size", "4"]
    assert run(capsys, "fit", *words, "--run_dir", "run", "--trainer.max_steps", "4")[0] == 0
    flip(folder / "train_000002.docs", 0)  # no token has changed
    resume = ["--run_dir", "run", "--resume", "auto", "--trainer.max_steps", "6"]
    code, out, err = run(capsys, "fit", *words, *resume)
    if hashed:
        assert code == 2 and named([err.strip()]) == ["train_000002.docs"] and "--accept_changes true" in err
        assert run(capsys, "fit", *words, *resume, "--accept_changes", "true")[0] == 0
    else:
        assert code == 0 and "a hash of 1 file of these: accepted" in out
    (folder / "train_000002.docs").unlink()
    code, _, err = run(capsys, "fit", *words, *resume)
    assert code == 2 and "train_000002.docs is gone" in err


def test_what_stands_beside_shards_is_not_made_from_changed_ones(folder, capsys):
    flip(folder / "train_000002.docs", 0)
    words = ["--data", "TokenShards", "--data.path", "shards", "--data.packing", "best_fit"]
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *words, "--run_dir", "run")
    assert code == 2 and named([err.strip()]) == ["train_000002.docs"] and not list(folder.glob("*_pack-*"))


def test_the_background_takes_two_percent_and_ends_when_it_is_told(tmp_path, monkeypatch):
    file = tmp_path / "large"
    file.write_bytes(bytes(2**26))
    files = StoredFiles([StoredFile(str(file))])
    started, processor = time.perf_counter(), time.process_time()
    check = BackgroundCheck(files)
    while check.is_alive() and time.perf_counter() - started < 2:
        time.sleep(0.1)
    share = (time.process_time() - processor) / (time.perf_counter() - started)
    check.stop()
    check.join(5)
    assert not check.is_alive() and share < 0.1
    assert files.seen[str(file)][1] in ("", hash_of(str(file)))


@pytest.mark.slow
def test_a_process_ends_while_files_are_hashed(tmp_path):
    (tmp_path / "large").write_bytes(bytes(2**27))
    script = (
        "import sys; from lit_llm.data.stored_files import *\n"
        "check = BackgroundCheck(StoredFiles([StoredFile(sys.argv[1])])); assert check.is_alive(); print('end', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "large")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("first", [OSError(errno.EBADF, "Bad file descriptor"), "0" * 32])
def test_a_descriptor_that_another_thread_closes_by_mistake_is_no_changed_file(tmp_path, monkeypatch, first):
    """The first read fails, or has another file's bytes."""
    file = tmp_path / "tokens.bin"
    file.write_bytes(b"tokens")
    stored, hashed = StoredFile(str(file), hash_of(str(file))), iter([first, hash_of(str(file))])

    def once(*arguments):
        if isinstance(found := next(hashed), OSError):
            raise found
        return found

    monkeypatch.setattr(stored_files, "hash_of", once)
    assert list(StoredFiles([stored]).problems()) == []
