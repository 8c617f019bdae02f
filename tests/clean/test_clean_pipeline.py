"""Documents in, documents out: the right ones, in their order."""

from __future__ import annotations

import json

from clean.clean_runs import run, write

from lit_llm.__main__ import main
from lit_llm.clean.rules import Removed, Step


def test_equal_documents_are_kept_once_wherever_they_are(tmp_path):
    first = write(tmp_path / "a.jsonl", ["one  two", "", None, "three", "one two\n"])
    second = write(tmp_path / "b.jsonl", ["Three", "caf\u00e9", "three", "cafe\u0301"])
    found = run([first, second], tmp_path / "out", exact_duplicates=True)
    assert [(one["text"], one["source"]) for one in found] == [
        ("one  two", f"{first}:1"),
        ("three", f"{first}:4"),  # records without text are counted
        ("Three", f"{second}:1"),
        ("caf\u00e9", f"{second}:2"),
    ]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["without_text"] == 2
    assert report["read"] == {"documents": 7, "bytes": 8 + 5 + 8 + 5 + 5 + 5 + 6}
    assert report["kept"] == {"documents": 4, "bytes": 8 + 5 + 5 + 5}
    assert report["steps"]["exact_duplicates"]["removed"] == {"exact_duplicates": {"documents": 3, "bytes": 8 + 5 + 6}}
    samples = [json.loads(line) for line in (tmp_path / "out/removed.jsonl").read_text().splitlines()]
    assert sorted((one["source"], one["detail"]) for one in samples) == [
        (f"{first}:5", f"equals {first}:1"),
        (f"{second}:3", f"equals {first}:4"),
        (f"{second}:4", f"equals {second}:2"),
    ]


def test_bytes_that_are_not_utf8_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain text " * 100 + b"\xff")
    (tmp_path / "b.txt").write_bytes("t\u00e9xt".encode())
    found = run([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out")
    assert [one["text"][-5:] for one in found] == ["ext \ufffd", "t\u00e9xt"]
    assert json.loads((tmp_path / "out/report.json").read_text())["not_utf8"] == 1


def test_rules_change_and_remove_documents_in_their_order(tmp_path, monkeypatch):
    def shout(text: str) -> str | Removed:
        return Removed("loud/short", f"{len(text)} letters") if len(text) < 3 else text.upper()

    def only_letters(text: str) -> str:
        return "".join(filter(str.isalpha, text))

    steps = [Step("loud", shout), Step("letters", only_letters)]
    monkeypatch.setattr("lit_llm.clean.clean_pipeline.steps_of", lambda settings: steps)
    path = write(tmp_path / "a.jsonl", ["hello", "hi", "123", "X1Y", "ABC"])
    assert [one["text"] for one in run([path], tmp_path / "out")] == ["HELLO", "XY", "ABC"]
    counts = json.loads((tmp_path / "out/report.json").read_text())["steps"]
    assert {name: (one["changed"], one["removed"]) for name, one in counts.items() if name != "read"} == {
        "loud": (1, {"loud/short": {"documents": 1, "bytes": 2}}),
        "letters": (1, {"letters/nothing_left": {"documents": 1, "bytes": 3}}),
    }
    samples = [json.loads(line) for line in (tmp_path / "out/removed.jsonl").read_text().splitlines()]
    assert samples[1] == {"rule": "loud/short", "detail": "2 letters", "source": f"{path}:2", "excerpt": "hi"}


def test_settings_come_from_a_file_and_from_flags_that_override_it(tmp_path, capsys):
    write(tmp_path / "a.jsonl", ["one\r\ntwo", "one two"])
    config = tmp_path / "clean.yaml"
    config.write_text(f"data: {{paths: {tmp_path}/a.jsonl}}\nnormalise: true\nexact_duplicates: true\n")
    words = ["--config", str(config), "--exact_duplicates", "false", "--out", str(tmp_path / "out")]
    assert main(["clean", *words]) == 0
    lines = (tmp_path / "out/part-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one\ntwo", "one two"]
    config.write_text("normalize: true\nexact_duplicates: 1\n")
    assert main(["clean", "--config", str(config), "--out", str(tmp_path / "more")]) == 2
    assert f"error: {config}: unknown flag --normalize; did you mean --normalise?" in capsys.readouterr().err
    config.write_text("exact_duplicates: 1\n")
    assert main(["clean", "--config", str(config), "--out", str(tmp_path / "more")]) == 2
    assert f"error: {config}: --exact_duplicates is '1', it must be true or false" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
