"""`generate --prompts`: a file of prompts, in batches, against the same prompts one by one."""

import json
from pathlib import Path

import pytest
from commands.text_runs import base_run, chat_run

from lit_llm.__main__ import main
from lit_llm.commands.generate import read_prompts

PROMPTS = ["def ", "", "a longer prompt of several words", "xy", "é"]


def generate(capsys, *words):
    code = main(["generate", "--run", "run", "--max_new_tokens", "12", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_lines_are_continued_as_alone_whatever_the_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base_run(Path("run"))
    Path("prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    records = [{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    Path("prompts.jsonl").write_text("".join(json.dumps(record) + "\n\n" for record in records))
    batches = [generate(capsys, "--prompts", "prompts.txt", "--temperature", "0", "--batch_size", size) for size in "125"]
    assert batches[0] == batches[1] == batches[2]
    found = [json.loads(line) for line in batches[0].splitlines()]
    assert [each["prompt"] for each in found] == PROMPTS
    for each in found:
        alone = generate(capsys, "--prompt", each["prompt"], "--temperature", "0")
        assert alone == f"{each['prompt']}{each['completion']}\n"
    sampled = [
        generate(capsys, "--prompts", "prompts.jsonl", "--temperature", "1", "--seed", seed, "--batch_size", size)
        for seed, size in (("3", "1"), ("3", "4"), ("4", "4"))
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert [{key: each[key] for key in ("id", "prompt")} for each in map(json.loads, sampled[0].splitlines())] == records
    assert generate(capsys, "--prompts", "prompts.jsonl", "--temperature", "1", "--seed", "3", "--out", "done.jsonl") == ""
    assert Path("done.jsonl").read_text() == sampled[0]


def test_messages_are_written_by_the_chat_template(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat_run(Path("run"))
    Path("prompts.txt").write_text("hi\nand now something longer\n")
    lines = generate(capsys, "--chat", "--prompts", "prompts.txt", "--temperature", "0").splitlines()
    for each in map(json.loads, lines):
        assert generate(capsys, "--chat", "--prompt", each["prompt"], "--temperature", "0") == f"{each['completion']}\n"


def test_a_prompt_that_is_cut_is_refused_in_a_chat_and_noted_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, encoder = chat_run(Path("run"))
    ids = encoder.prompt_ids([{"role": "user", "content": "hi"}], where="it")
    long = "hi " * 96
    Path("prompts.txt").write_text(f"hi\n\n{long}\n")
    words = ["generate", "--run", "run", "--max_new_tokens", "1"]
    for given, where in ((["--prompt", long], "the prompt (--prompt)"), (["--prompts", "prompts.txt"], "prompts.txt line 3")):
        assert main([*words, *given, "--chat"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: {where} has ") and "the model reads 96: " in err and err.count("\n") == 1
        assert main([*words, *given]) == 0
        assert capsys.readouterr().err.startswith(f"note: {where} is cut to the last 96 of its ")

    base_run(Path("base"), block_size=len("four"))
    words[2] = "base"
    for prompt, notes in (("four", ""), ("fives", "note: the prompt (--prompt) is cut to the last 4 of its 5 tokens\n")):
        assert main([*words, "--prompt", prompt]) == 0
        assert capsys.readouterr().err == notes
    for size, code in ((len(ids), 2), (len(ids) + 1, 0)):
        chat_run(Path(f"chat-{size}"), block_size=size)
        assert main(["generate", "--run", f"chat-{size}", "--prompt", "hi", "--chat"]) == code


@pytest.mark.parametrize("name", ["prompts.ndjson", "prompts.json", "PROMPTS.JSONL"])
def test_lines_of_json_are_known_by_the_name(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "a"}\n\n{"prompt": "b", "id": 1}\n')
    assert read_prompts(tmp_path / name) == {1: {"prompt": "a"}, 3: {"prompt": "b", "id": 1}}


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ("a\n", ["--prompt", "b"], "remove --prompt or --prompts"),
        ("", [], "prompts.jsonl has no prompts (--prompts)"),
        ('{"prompt": "a"}\n{"text": "b"}\n', [], 'prompts.jsonl line 2 must be an object with a text as "prompt"'),
        ('{"prompt": "\\ud800"}\n', [], "prompts.jsonl line 1 must be an object"),
        ('{"prompt": "a", "x": [NaN]}\n', [], "prompts.jsonl line 1 must be an object"),
        ('{"prompt": "a", "x": 1e999}\n', [], "prompts.jsonl line 1 must be an object"),
        ('\n{"prompt": "a", "completion": "b"}\n', [], 'prompts.jsonl line 2 has a "completion"'),
        ('{"prompt": "a"}\n', ["--replace"], "add --out FILE, or remove --replace"),
        ('{"prompt": "a"}\n', ["--out", "run"], "run is a folder: give a file (--out)"),
        ('{"prompt": "a"}\n', ["--out", "prompts.jsonl"], "prompts.jsonl exists already"),
    ],
)
def test_a_mistake_in_prompts_is_one_sentence(tmp_path, monkeypatch, capsys, content, words, sentence):
    monkeypatch.chdir(tmp_path)
    base_run(Path("run"))
    Path("prompts.jsonl").write_text(content)
    assert main(["generate", "--run", "run", "--prompts", "prompts.jsonl", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and sentence in error
