"""Text files: the split into training and held-out text, lossless pieces, and the token cache."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from prepared import prepare

from lit_llm.core.errors import UserError
from lit_llm.data import BPE, Bytes, PythonStdlib, TextFiles, TokenizerJSON, TokenShards, stored_files
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.readers import interface as pieces_file
from lit_llm.ingest.selection import hold_out
from lit_llm.ingest.shard_pipeline import ingest


def text_files(tmp_path, **arguments):
    defaults = {"cache_dir": str(tmp_path / "cache"), "block_size": 4, "global_batch_size": 2}
    return TextFiles(**(defaults | arguments))


def opened(datamodule):
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule


def tokens(datamodule, split):
    stream = datamodule.corpus.streams[split]
    return stream.read(0, len(stream))


def held_out(files, fraction):
    """The training and the held-out parts."""
    parts = hold_out([Input.of_file(path, "train") for path in files], fraction)
    return [[part for part in parts if part.split == name] for name in ("train", "val")]


# ---- What is held out ---------------------------------------------------------------------------------------------


def test_the_end_of_a_single_file_is_held_out_from_a_line_end_on(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100, 200))  # 100 lines of 9 bytes
    (tmp_path / "my.txt").write_text(text)
    data = opened(text_files(tmp_path, paths=str(tmp_path / "my.txt"), val_fraction=0.105))
    train, val = bytes(tokens(data, "train")[:-1].tolist()), bytes(tokens(data, "val")[:-1].tolist())
    # 806 bytes of training text would end within a line, which goes on to byte 810.
    assert (train + val).decode() == text
    assert len(train) == 810
    assert tokens(data, "train")[-1] == tokens(data, "val")[-1] == data.eos_id == 256


def test_ten_files_are_held_out_whole_and_the_choice_does_not_depend_on_where_they_lie(tmp_path):
    chosen = []
    for place in ("a", "b/c/d"):
        folder = tmp_path / place / "corpus"
        folder.mkdir(parents=True)
        for i in range(40):
            (folder / f"{i}.txt").write_text("x" * 100)
        train, val = held_out(sorted(folder.iterdir()), 0.1)
        assert len(val) == 4
        assert len(train) == 36
        assert all(part.size == 100 for part in train + val)
        assert not {part.source.path for part in train} & {part.source.path for part in val}
        chosen.append({Path(part.source.path).name for part in val})
    assert chosen[0] == chosen[1]


def test_train_val_and_test_given_apart_are_used_whole(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text")
    files = {name: str(tmp_path / f"{name}.txt") for name in ("train", "val", "test")}
    data = opened(text_files(tmp_path, **files))
    for name in files:
        assert data.tokenizer.decode(tokens(data, name)) == f"the {name} text<|endoftext|>"
    assert len(data.test_dataloader()) == 2  # 13 targets are 4 blocks of 4


# ---- Which files ------------------------------------------------------------------------------------------------


def test_globs_folders_and_lists_find_each_visible_file_once(tmp_path):
    folder = tmp_path / "corpus"
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md", ".git/e.txt", "deep/.f.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}\n")
    (folder / "empty.txt").touch()

    def found(*patterns):
        data = text_files(tmp_path, train=[str(folder / p) for p in patterns], val=str(folder / ".git/e.txt"))
        assert data.problems() == []
        return [Path(one.source.path).relative_to(folder).as_posix() for one in data.inputs() if one.split == "train"]

    assert found("*.txt") == ["a.txt", "b.txt"]
    assert found("**/*.txt") == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert found("") == ["a.txt", "b.txt", "deep/d.md", "deep/er/c.txt"]
    assert found("b.txt", "*.txt", "deep") == ["b.txt", "a.txt", "deep/d.md", "deep/er/c.txt"]


def test_everything_wrong_with_the_sources_is_reported_together(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "t.txt").write_text("some text")
    data = text_files(
        tmp_path,
        train=[str(tmp_path / "missing.txt"), str(tmp_path / "empty.txt"), str(tmp_path / "t.txt")],
        val=str(tmp_path / "t.txt"),
        paths=str(tmp_path / "*.nothing"),
        val_fraction=1.5,
        micro_batch_size=0,
    )
    problems = data.problems()
    for words in (
        "(--data.micro_batch_size)",
        "data.val_fraction is 1.5",
        "cannot be combined with --data.train",
        "missing.txt (--data.train)",
        "empty.txt is empty: give a file with content (--data.train)",
        "*.nothing (--data.paths)",
        "t.txt is in both --data.train and --data.val",
    ):
        assert sum(words in problem for problem in problems) == 1, words
    assert len(problems) == 7
    with pytest.raises(ValueError) as error:
        data.prepare_data()
    assert str(error.value) == "\n".join(problems)
    assert text_files(tmp_path).problems() == ["No training text: give --data.paths, or --data.train and --data.val."]


# ---- Tokenising -------------------------------------------------------------------------------------------------


def test_bytes_of_any_file_come_back_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_file, "PIECE_BYTES", 1000)
    monkeypatch.setattr("lit_llm.ingest.token_parts._FLUSH_TOKENS", 5000)
    raw = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8).tobytes()  # not UTF-8
    for i, part in enumerate((raw[:7], raw[7:15_000], raw[15_000:])):
        (tmp_path / f"{i}.bin").write_bytes(part)
    (tmp_path / "val.txt").write_text("val")
    files = {"train": str(tmp_path / "*.bin"), "val": str(tmp_path / "val.txt")}
    assert all("--data.format text" in problem for problem in text_files(tmp_path, **files).problems())
    data = opened(text_files(tmp_path, **files, format="text"))
    found = tokens(data, "train")
    ends = np.flatnonzero(found == 256)
    assert ends.tolist() == [7, 15_001, 20_002]
    assert bytes(found[found < 256].tolist()) == raw
    assert data.token_bytes.tolist() == [1] * 256 + [0]


def test_a_bpe_learns_from_the_training_text_alone(tmp_path):
    (tmp_path / "train.txt").write_text("alpha beta gamma " * 200)
    (tmp_path / "val.txt").write_text("zyzzyva quixotic " * 200)
    files = {"train": str(tmp_path / "train.txt"), "val": str(tmp_path / "val.txt")}
    asked = BPE(300)
    data = opened(text_files(tmp_path, tokenizer=asked, **files))
    reference = BPE(300)
    reference.train(["alpha beta gamma " * 200])
    assert data.tokenizer.identity() == reference.identity()
    assert not asked.trained  # or its place in the cache would change
    assert len(data.tokenizer.encode(" gamma")) == 1
    assert len(data.tokenizer.encode(" quixotic")) == 9
    assert data.tokenizer.decode(tokens(data, "val")) == "zyzzyva quixotic " * 200 + "<|endoftext|>"


# ---- The cache --------------------------------------------------------------------------------------------------


def cached(tmp_path):
    return {folder.name for folder in (tmp_path / "cache" / "tokens").iterdir()}


def test_the_cache_is_used_again_until_text_tokenizer_or_split_changes(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("first line\n" * 60)
    arguments = {"paths": str(path)}
    first = opened(text_files(tmp_path, **arguments))
    [key] = cached(tmp_path)
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "cache" / "tokens" / key).iterdir()}
    again = opened(text_files(tmp_path, **arguments, block_size=7, global_batch_size=3, seed=5))
    assert cached(tmp_path) == {key}
    assert {f: f.stat().st_mtime_ns for f in written} == written
    assert again.opened.fingerprint() == first.opened.fingerprint()

    opened(text_files(tmp_path, **arguments, tokenizer=BPE(300)))
    opened(text_files(tmp_path, **arguments, tokenizer=BPE(280)))
    opened(text_files(tmp_path, **arguments, val_fraction=0.2))
    assert len(cached(tmp_path)) == 4
    path.write_text("other line\n" * 60)  # the same size
    os.utime(path, ns=(1, 1))
    changed = opened(text_files(tmp_path, **arguments))
    assert len(cached(tmp_path)) == 5
    assert changed.opened.fingerprint() != first.opened.fingerprint()


def test_a_file_of_equal_size_and_time_is_hashed_once_where_its_ctime_or_inode_differs(tmp_path, monkeypatch):
    path, other = tmp_path / "t.txt", tmp_path / "other.txt"
    path.write_text("first line\n" * 60)
    hashed = []
    hash_of = stored_files.hash_of
    monkeypatch.setattr(stored_files, "hash_of", lambda path, *rest: hashed.append(Path(path).name) or hash_of(path, *rest))
    first = opened(text_files(tmp_path, paths=str(path)))

    def put(text: str) -> list[str]:
        """Replace the file with its time kept; what the next start hashes of it, and the one after that."""
        other.write_text(text)
        os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
        os.replace(other, path)
        found = []
        for _ in range(2):
            hashed.clear()
            found.append(opened(text_files(tmp_path, paths=str(path))))
            found.append([name for name in hashed if name == "t.txt"])
        assert found[0].opened.fingerprint() == found[2].opened.fingerprint()
        return [found[0].opened.fingerprint(), found[1], found[3]]

    assert put("first line\n" * 60) == [first.opened.fingerprint(), ["t.txt"], []]
    with pytest.warns(UserWarning, match=r"its text has changed.*t\.txt has changed.*: the cache has its former text\.$"):
        fingerprint, *_, last = put("other line\n" * 60)
    assert fingerprint != first.opened.fingerprint() and last == []
    assert len(cached(tmp_path)) == 1


def test_a_process_that_comes_second_uses_what_the_first_wrote(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    data, rival = (text_files(tmp_path, paths=str(tmp_path / "t.txt")) for _ in range(2))

    def slow_ingest(*args, **kwargs):
        monkeypatch.undo()
        rival.prepare_data()  # finishes while the other is still running
        return ingest(*args, **kwargs)

    monkeypatch.setattr("lit_llm.data.text.ingest", slow_ingest)
    opened(data)
    assert len(cached(tmp_path)) == 1  # and no temporary folder
    assert data.opened.fingerprint() == opened(rival).opened.fingerprint()


def test_a_failed_build_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    data = text_files(tmp_path, paths=str(tmp_path / "t.txt"))
    monkeypatch.setattr(Bytes, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match=r"disk full \(--data.cache_dir"):
        data.prepare_data()
    assert cached(tmp_path) == set()


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: (cache / "meta.json").write_text("{"),
        lambda cache: (cache / "meta.json").write_text('{"splits": 3, "vocab_size": 257}'),
        lambda cache: (cache / "meta.json").unlink(),
        lambda cache: (cache / "tokenizer.json").unlink(),
        lambda cache: os.truncate(cache / "val_000000.bin", 1030),
        lambda cache: (cache / "train_000000.bin").write_bytes((cache / "train_000000.bin").read_bytes()[:-2] + b"\xff\xff"),
    ],
)
def test_a_damaged_cache_is_made_again_with_a_note(tmp_path, damage):
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    first = opened(text_files(tmp_path, paths=str(tmp_path / "t.txt")))
    (cache,) = (tmp_path / "cache" / "tokens").iterdir()
    damage(cache)
    again = text_files(tmp_path, paths=str(tmp_path / "t.txt"))
    with pytest.raises(UserError, match=f"damaged: delete the folder {cache}"):
        again.setup()
    with pytest.warns(UserWarning, match=f"The token cache {cache} is damaged"):
        again.prepare_data()
    again.setup()
    assert again.opened.fingerprint() == first.opened.fingerprint()
    assert cached(tmp_path) == {cache.name}


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["t.txt", ""], "A path is ''"),
        ([], "The list of files is empty"),
        (["t.txt", "t.txt"], "t.txt is given twice"),
        (["t.txt", "*.txt"], None),  # a glob may match a file that is also named
        (["t.txt", "link"], "t.txt and link are the same file"),
    ],
)
def test_paths_that_name_nothing_or_a_file_twice_are_problems(tmp_path, monkeypatch, paths, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    (tmp_path / "link").symlink_to("t.txt")
    problems = text_files(tmp_path, paths=paths).problems()
    assert [words in problem and "(--data.paths)" in problem for problem in problems] == [True] * (words is not None)


def test_a_file_is_not_trained_on_and_held_out_under_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    os.link("t.txt", "u.txt")
    assert text_files(tmp_path, train="t.txt", val="u.txt").problems() == [
        "u.txt is in both --data.train and --data.val: remove it from one of them."
    ]
    assert text_files(tmp_path, paths="t.txt", test="u.txt").problems() == [
        "u.txt is in both --data.paths and --data.test: remove it from one of them."
    ]


def test_the_cache_folder_comes_from_the_environment_when_not_given(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("some line\n" * 60)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "elsewhere"))
    opened(text_files(tmp_path, paths=str(tmp_path / "t.txt"), cache_dir=None))
    assert len(list((tmp_path / "elsewhere" / "tokens").iterdir())) == 1


# ---- The standard library ---------------------------------------------------------------------------------------


def test_the_standard_library_is_split_by_file_into_94_4_2():
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for one in PythonStdlib().inputs():
        paths[one.split].add(Path(one.source.path).relative_to(root).as_posix())
    total = sum(map(len, paths.values()))
    assert total > 300
    assert len(set().union(*paths.values())) == total  # no file twice
    for name, share in (("train", 0.94), ("val", 0.04), ("test", 0.02)):
        assert abs(len(paths[name]) / total - share) < 4 * (share * (1 - share) / total) ** 0.5
    everything = set().union(*paths.values())
    assert {"argparse.py", "json/decoder.py"} <= everything
    assert not [p for p in everything if {"site-packages", "test", "__pycache__"} & set(p.split("/"))]


def test_a_file_of_the_standard_library_is_in_the_same_split_on_every_machine():
    root = PythonStdlib().root
    paths = {Path(one.source.path): one.split for one in PythonStdlib().inputs()}
    where = {path.name: split for path, split in paths.items() if path.parent == root}
    # blake2b(name, 8 bytes) / 2**64: below 0.04 val, below 0.06 test. A change would mix the splits of saved runs.
    assert PINNED.items() <= where.items()


PINNED = {"argparse.py": "train", "pprint.py": "val", "tarfile.py": "test", "gzip.py": "test"}


# ---- prepare ----------------------------------------------------------------------------------------------------


def test_prepared_shards_train_like_the_text_they_came_from(tmp_path):
    (tmp_path / "t.txt").write_text("a line of text\n" * 100)
    text = text_files(tmp_path, paths=str(tmp_path / "t.txt"), tokenizer=BPE(300))
    manifest = prepare(text, tmp_path / "out", shard_tokens=100).manifest
    opened(text)
    shards = TokenShards(
        train=str(tmp_path / "out" / "train_*.bin"),
        val=str(tmp_path / "out" / "val_*.bin"),
        tokenizer=TokenizerJSON(str(tmp_path / "out")),
        block_size=4,
    )
    shards.setup("fit")
    assert shards.opened.fingerprint() == text.opened.fingerprint()
    assert shards.vocab_size == text.vocab_size == manifest.vocab_size
    counts = {name: (split.documents, split.bytes, split.tokens) for name, split in manifest.splits.items()}
    assert counts == {"train": (1, 1350, text.train_tokens), "val": (1, 150, text.val_tokens)}
    assert len(list((tmp_path / "out").glob("train_*.bin"))) == -(-text.train_tokens // 100)
    assert (tmp_path / "out" / "train_000000.bin").is_file()
