"""Conversations against the answers to their whole text, computed anew; what is typed; a terminal."""

import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import sys
import time
from pathlib import Path

import fork_server
import pytest
from commands.text_runs import base_run, chat_run

from lit_llm.__main__ import main
from lit_llm.commands import text_model
from lit_llm.models.generation import Sampling, generate, prompt_ids, text_pieces
from lit_llm.models.gpt import GPT
from lit_llm.tokenizers import Bytes, load_tokenizer


def chat(monkeypatch, capsys, typed, *words):
    """Exit code, standard output and standard error of lines through a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    capsys.readouterr()
    code = main(["chat", "--run", "run", *words])
    return code, *capsys.readouterr()


def user(text):
    return {"role": "user", "content": text}


def answered(*turns):
    """The conversation of (question, answer) pairs."""
    return [one for question, answer in turns for one in (user(question), {"role": "assistant", "content": answer})]


def test_every_answer_is_that_to_the_whole_conversation_and_the_transcript_is_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, encoder = chat_run(Path("run"))
    tokenizer, end = load_tokenizer(Path("run")), encoder.end_of_turn_id()

    def answer(messages):
        ids = encoder.prompt_ids(messages, where="it")
        greedy = generate(
            model,
            ids,
            max_new_tokens=5,
            sampling=Sampling(0.0),
            stop_id=end,
            vocab_size=tokenizer.vocab_size,
            use_cache=False,
        )
        return tokenizer.decode(list(greedy))

    sizes, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, ids, **more: sizes.append(ids.size(1)) or forward(self, ids, **more))
    typed = ["hi", "more", "/retry", "/edit  less ", "/undo", "/system Be short.", "why?", "/save saved.jsonl", "/clear", "hi"]
    flags = ["--temperature", "0", "--max_new_tokens", "5", "--transcript", "kept.jsonl"]
    code, out, err = chat(monkeypatch, capsys, "".join(f"{line}\n" for line in typed), *flags)
    given = [size for size in sizes if size > 1]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)

    system = {"role": "system", "content": "Be short."}
    first = answered(("hi", answer([user("hi")])))
    more, less = (answer([*first, user(text)]) for text in ("more", "less"))
    why = answer([system, user("why?")])
    alone = answer([system, user("hi")])
    assert code == 0 and out == "".join(f"{text}\n" for text in (first[1]["content"], more, more, less, why, alone))
    assert err.count("the answer ends here: it has 5 tokens (--max_new_tokens)") == 6
    kept = [json.loads(line)["messages"] for line in Path("kept.jsonl").read_text().splitlines()]
    assert kept == [first, [system, *answered(("why?", why))], [system, *answered(("hi", alone))]]
    assert [json.loads(line)["messages"] for line in Path("saved.jsonl").read_text().splitlines()] == kept[1:2]
    # The second question costs its own tokens and a few of the turn's ends, not those of the conversation before.
    whole = len(encoder.prompt_ids([*first, user("more")], where="it"))
    assert given[0] == len(encoder.prompt_ids([user("hi")], where="it")) and 1 < given[1] < whole - given[0]

    read_by = ["--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "run"]
    data = ["--data.train", "kept.jsonl", "--data.val", "saved.jsonl", "--out", "shards"]
    assert main(["prepare", "--chat_template", "auto", *data, *read_by]) == 0
    assert "train: 3 documents" in capsys.readouterr().out


def test_the_seed_determines_a_conversation_and_another_try_is_another_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat_run(Path("run"))
    typed, flags = "hi\n/retry\nmore\n", ["--max_new_tokens", "6", "--top_k", "0", "--temperature", "1"]
    outs = [chat(monkeypatch, capsys, typed, *flags, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]
    one, other, _ = outs[0].split("\n", 2)
    assert one != other
    assert main(["generate", "--run", "run", "--chat", "--prompt", "hi", *flags, "--seed", "1"]) == 0
    assert capsys.readouterr().out.split("\n", 1)[0] == one  # the first answer is that of `generate`


def test_a_model_without_a_template_continues_the_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = base_run(Path("run"), block_size=64)
    flags = ["--temperature", "0", "--max_new_tokens", "8", "--transcript", "kept.jsonl"]
    code, _, err = chat(monkeypatch, capsys, "ab\n\n/system x\nc\n", *flags)
    notes = err.splitlines()
    assert notes[0] == "note: run has no chat template: what you type is continued as text"
    assert code == 2 and notes[1:] == ["error: a system message needs a chat template (/system)"]
    text = ""
    for typed in ("ab", "", "\nc"):
        text += typed
        ids = prompt_ids(Bytes(), text)
        greedy = generate(model, ids, max_new_tokens=8, sampling=Sampling(0.0), stop_id=256, vocab_size=257, use_cache=False)
        text += Bytes().decode(list(greedy))
    assert [json.loads(line) for line in Path("kept.jsonl").read_text().splitlines()] == [{"text": text}]


def test_a_full_context_is_one_sentence_and_what_fits_is_answered_afterwards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, encoder = chat_run(Path("run"), block_size=40)
    code, out, err = chat(monkeypatch, capsys, f"{'word ' * 40}\n/nonsense\n/undo\nhi\n", "--system", "S", "--temperature", "0")
    too_long, unknown, nothing, *rest = err.splitlines()
    assert code == 2 and "and the model reads 40: the message is left out; /undo" in too_long
    assert "there is no /nonsense" in unknown and "there is no message for /undo" in nothing
    assert out.count("\n") >= 1
    left = 40 - len(encoder.prompt_ids([{"role": "system", "content": "S"}, user("hi")], where="it"))
    assert rest == [f"note: the answer ends here: it has {left} tokens, and the model reads 40 in all"]


def test_a_transcript_has_one_writer_and_what_cannot_be_done_loses_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat_run(Path("run"))
    flags = ["--max_new_tokens", "1", "--top_k", "0", "--system", ""]
    typed = "/save new.jsonl\nhi\n/save kept.jsonl\n/save\n/edit \n/save other.jsonl\n/save other.jsonl\n"
    code, _, err = chat(monkeypatch, capsys, typed, *flags, "--transcript", "kept.jsonl")
    no_message, ends, locked, *nothing = err.splitlines()
    assert code == 2 and "no message for /save" in no_message and "kept.jsonl is the transcript of a chat" in locked
    assert ends == "note: the answer ends here: it has 1 token (--max_new_tokens)"
    assert [line.split(":")[1] for line in nothing] == [f" there is nothing after {one}" for one in ("/save", "/edit")]
    (line,) = Path("kept.jsonl").read_text().splitlines()
    assert [one["role"] for one in json.loads(line)["messages"]] == ["user", "assistant"]
    assert Path("other.jsonl").read_text().splitlines() == [line, line] and not Path("new.jsonl").exists()

    with open("kept.jsonl") as file:  # another chat
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = chat(monkeypatch, capsys, "hi\n", *flags, "--transcript", "kept.jsonl")
    assert code == 2 and "another file (--transcript)" in err and Path("kept.jsonl").read_text() == f"{line}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


COPIES = "\x1b]52;c;aGk=\x07"
"""Puts "hi" into the clipboard of a terminal, if it is sent to it."""


@pytest.mark.parametrize("out", [io.StringIO, _Terminal])
@pytest.mark.parametrize(
    "words", [["chat", "--run", "run"], ["generate", "--run", "run"], ["generate", "--run", "run", "--prompts", "prompts.txt"]]
)
def test_what_a_model_writes_does_nothing_to_a_terminal(out, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base_run(Path("run"))
    Path("prompts.txt").write_text("hi\n")
    text = f"{COPIES}\x9bm\x7f\tç\u3000"
    monkeypatch.setattr(text_model, "text_pieces", lambda tokenizer, ids: iter(text))
    monkeypatch.setattr(Bytes, "decode", lambda self, ids: text)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    monkeypatch.setattr(sys, "stdout", out())
    assert main(words) == 0
    written = sys.stdout.getvalue()
    as_it_is = json.dumps({"prompt": "hi", "completion": text}, ensure_ascii=False) if "--prompts" in words else text
    if out is io.StringIO:
        assert written == f"{as_it_is}\n"
    else:
        assert not {*map(chr, range(32)), *map(chr, range(127, 160))} & set(written) - {"\t", "\n"}
        assert r"]52;c;aGk=" in written and written.endswith((f"{text[-3:]}\n", 'ç\u3000"}\n')) and r"\x9bm\x7f" in written


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run", "nowhere"], "there is no run folder nowhere"),
        (["--run", "run", "--system", "x"], "has no chat template"),
        (["--run", "run", "--max_new_tokens", "97"], "max_new_tokens is 97, but the model reads 96 (--max_new_tokens)"),
        (["--run", "run", "--transcript", "."], ". cannot be written: Is a directory (--transcript)"),
        (
            ["--run", "run", "--transcript", "run/config.yaml"],
            "lies in run, which is read: give a place outside of it (--transcript)",
        ),
        (["--run", "run", "--transcript", "none/kept.jsonl"], "none/kept.jsonl cannot be written: No such file"),
    ],
)
def test_a_mistake_is_one_sentence_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    base_run(Path("run"))
    monkeypatch.setattr(text_model, "load_model", None)
    assert main(["chat", *words]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert error.startswith("error: ") and sentence in error


def test_characters_are_written_whole():
    ids = [*"aé🙂".encode(), 0xFF]
    assert list(text_pieces(Bytes(), ids)) == ["a", "", "é", "", "", "", "🙂", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_an_answer_and_at_the_prompt_the_program(tmp_path):
    chat_run(tmp_path / "run", block_size=8192)
    ours, theirs = pty.openpty()
    words = ["chat", "--run", "run", "--transcript", "kept.jsonl", "--top_k", "0", "--temperature", "1.5"]
    seen = b""

    def read_until(wanted, more=0):
        """What is on the screen until `wanted`, and so many characters more."""
        nonlocal seen
        while wanted not in seen or len(seen.partition(wanted)[2]) < more:
            seen += os.read(ours, 4096)
        seen, before = seen.partition(wanted)[2], seen.partition(wanted)[0]
        return before

    screen = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": os.environ | {"TERM": "dumb"}}
    command = [sys.executable, "-m", "lit_llm", *words]
    with fork_server.Popen(command, cwd=tmp_path, start_new_session=True, **screen) as process:
        os.close(theirs)
        for typed in (b"hi\n", b"more\n"):
            read_until(b"\n> ")
            os.write(ours, typed)
            read_until(b"\n", more=30)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, also to the process that writes the template
        read_until(b"\n> ")
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal has lost its last process
            while os.read(ours, 4096):
                pass
        assert process.wait(60) == 130
    os.close(ours)
    (line,) = (tmp_path / "kept.jsonl").read_text().splitlines()
    messages = json.loads(line)["messages"]
    assert [one["content"] for one in messages if one["role"] == "user"] == ["hi", "more"]
    assert len(messages) == 4 and all(one["content"] for one in messages)
