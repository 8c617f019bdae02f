"""`clean` on the command line: what it prints, mistakes before anything runs, and its output as the input of others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from clean.clean_runs import write

from lit_llm.__main__ import main
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.removal_report import Tally, write_report
from lit_llm.ingest.paths import list_sources


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw/a.jsonl", ["one two", "one  two", "three", None])
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["clean", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_output_is_what_prepare_reads_and_the_table_says_what_is_gone(project, capsys):
    code, out, _ = run(capsys, "--data.paths", "raw", "--exact_duplicates", "true", "--out", "cleaned")
    assert code == 0 and sorted(os.listdir()) == [".cleaned.log", "cleaned", "raw"]
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines()[1:4]}
    assert rows == {"read": ["3", "0.00"], "exact_duplicates": ["-1", "0.00"], "kept": ["2", "0.00"]}
    assert "skipped: 1 records without text" in out
    assert out.splitlines()[-1] == "samples of what was removed: cleaned/removed.jsonl"
    for pattern in ("cleaned", "cleaned/*", "cleaned/*.jsonl"):  # nothing that `clean` wrote beside them
        assert [Path(source.path).name for source in list_sources(pattern, flag="--data.paths")[0]] == ["part-00000.jsonl"]
    assert [json.loads(line) for line in Path("cleaned/part-00000.jsonl").read_text().splitlines()] == [
        {"text": "one two", "source": "raw/a.jsonl:1"},
        {"text": "three", "source": "raw/a.jsonl:3"},
    ]


def test_the_report_has_no_password_of_a_url(tmp_path):
    secret = ("https://me:secret@host/x.jsonl?signature=secret",)
    write_report(tmp_path, CleanSettings(paths=secret, against=secret), Tally())
    settings = json.loads((tmp_path / "report.json").read_text())["settings"]
    assert settings["paths"] == settings["against"] == ["https://host/x.jsonl?…"]


def test_a_run_without_steps_says_so_and_unchanged_documents_are_not_counted(project, capsys):
    Path("raw/b.txt").write_text("x = 1\n")
    code, out, err = run(capsys, "--data.paths", "raw", "--out", "copied")
    assert code == 0 and "removed" not in out
    (note,) = (line for line in err.splitlines() if line.startswith("note: "))
    assert note.startswith("note: No step is on, so every document is copied as it is: switch one on (--fix_encoding, ")
    assert note.endswith("--exact_duplicates, --near_duplicates).")
    code, out, err = run(capsys, "--data.paths", "raw", "--normalise", "true", "--out", "cleaned")
    assert code == 0 and "changed" not in out and "removed" not in out and "note: " not in err
    assert json.loads(Path("cleaned/part-00000.jsonl").read_text().splitlines()[-1])["text"] == "x = 1\n"


MISTAKES = {
    "--near_duplicates 0.1": "near_duplicates is 0.1, but must be at least 0.3",
    "--near_ngram 3": "near_ngram is 3, but near_duplicates is off: switch it on (--near_duplicates)",
    "--workers 2": "workers is 2, but executor is off: switch it on (--executor)",
    "--normalize true": "unknown flag --normalize; did you mean --normalise?",
    "--data.format xml": "format is 'xml', but must be auto, text",
    "--data.text_key body": "raw/a.jsonl line 1 has no key 'body', it has text: name the key",
    "--out raw/cleaned": "raw/cleaned lies in raw, which is read: give a place outside of it (--out)",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_nothing(project, capsys, words):
    given = ["--data.paths", "raw", "--out", "cleaned", *words.split()]
    code, _, err = run(capsys, *given)
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(said) == 1 and MISTAKES[words] in said[0], err
    assert set(os.listdir()) <= {"raw", ".cleaned.log"} and os.listdir("raw") == ["a.jsonl"]


def test_paths_without_documents_and_a_missing_package_are_sentences(project, capsys, monkeypatch):
    code, _, err = run(capsys, "--out", "cleaned")
    assert (code, err) == (2, "error: No documents: give files, folders, globs or URLs (--data.paths).\n")
    code, _, err = run(capsys, "--data.paths", "nothing/*", "--out", "cleaned")
    assert (code, err) == (2, "error: No non-empty file matches nothing/* (--data.paths).\n")
    write(project / "raw/a.jsonl", [None, ""])
    code, _, err = run(capsys, "--data.paths", "raw", "--out", "cleaned")
    assert code == 2 and "error: None of 0 documents is left: use fewer or weaker rules." in err
    write(project / "raw/a.jsonl", ["Write to mine@example.org"])
    code, _, err = run(capsys, "--data.paths", "raw", "--emails", "remove", "--out", "cleaned")
    assert code == 2 and "error: None of 1 documents is left (emails/found removed 1)" in err
    monkeypatch.setitem(sys.modules, "rensa", None)
    code, _, err = run(capsys, "--data.paths", "raw", "--near_duplicates", "0.7", "--out", "cleaned")
    assert (code, err) == (2, "error: near_duplicates needs the package rensa: pip install rensa.\n")
