"""Conversations in files, from reading them to shards whose tokens and masks are those of the template."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from ingest import chat_templates
from ingest.chat_templates import CONVERSATIONS, messages, tool_conversation, write_tokenizer

from lit_llm.data import BPE, ChatFiles, TokenizerJSON, TokenShards, TokenStream
from lit_llm.data.prepare import prepare
from lit_llm.errors import UserError

ROWS = [[{"role": "user", "content": f"Say {i} 🙂"}, {"role": "assistant", "content": f"{i}"}] for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer("qwen", folder)
    (folder / "chat_template.jinja").write_text(chat_templates.unmarked("qwen"))
    return folder


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def module(tokenizer, **settings):
    return ChatFiles(tokenizer=TokenizerJSON(str(tokenizer)), **settings)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_conversations_become_documents_with_the_template_s_tokens_in_every_format(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [*ROWS, tool_conversation()]
    named = {"user": "human", "assistant": "gpt", "tool": "observation"}
    (tmp_path / "a.jsonl").write_text("\n" + lines([{"id": 1, "messages": row} for row in rows]) + lines([{"messages": []}]))
    table = pa.table({"id": list(range(len(rows) + 1)), "data": [{"chat": row} for row in [*rows, None]]})
    pa.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    (tmp_path / "c.jsonl").write_text(
        lines([{"conversations": [{"from": named[m["role"]], "value": m["content"]} for m in row]} for row in ROWS])
    )
    for name, settings in {
        "a": {"paths": "a.jsonl"},
        "b": {"paths": "b.parquet", "messages_key": "data.chat"},
        "c": {"paths": "c.jsonl", "messages_key": "conversations"},
    }.items():
        summary = prepare(module(tokenizer, **settings), tmp_path / f"shards-{name}", workers=0)
        assert summary.skipped == (name != "c")
    assert contents(tmp_path / "shards-a") == contents(tmp_path / "shards-b")
    data = TokenShards(path="shards-c", block_size=8, global_batch_size=1)
    data.setup("fit")
    assert (data.corpus.eos_id, data.every_target_counts) == (TokenizerJSON(str(tokenizer)).eos_id, False)
    found = []
    for stream in data.corpus.streams.values():
        ends = stream.document_ends(0)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            ids, mask = stream.read(int(start), int(end - start)), stream.read_mask(int(start), int(end - start))
            found.append((data.tokenizer.decode(ids), data.tokenizer.decode(ids[mask == 1])))
    template = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nSay {0} 🙂<|im_end|>\n"
    template += "<|im_start|>assistant\n{0}<|im_end|>\n"
    assert sorted(found) == sorted((template.format(i), f"{i}<|im_end|>\n") for i in range(40))
    end_of_turn = data.tokenizer.backend.token_to_id("<|im_end|>")
    assert data.chat_form == (chat_templates.unmarked("qwen"), end_of_turn)


def test_a_conversation_longer_than_a_piece_and_one_of_many_turns(tmp_path, tokenizer):
    long = [{"role": "user", "content": "word " * 60_000}, {"role": "assistant", "content": "yes"}]
    many = [message for i in range(150) for message in ROWS[i % 40]]
    (tmp_path / "a.jsonl").write_text(lines([{"messages": row} for row in (long, many)]))
    (tmp_path / "b.jsonl").write_text(lines([{"messages": ROWS[0]}]))
    settings = {"train": str(tmp_path / "a.jsonl"), "val": str(tmp_path / "b.jsonl")}
    prepare(module(tokenizer, **settings), tmp_path / "out", workers=0)
    stream = TokenStream([tmp_path / "out" / "train_000000.bin"])
    decode = TokenizerJSON(str(tokenizer)).decode
    learned = decode(stream.read(0, len(stream))[stream.read_mask(0, len(stream)) == 1])
    assert learned == "yes<|im_end|>\n" + "".join(f"{i % 40}<|im_end|>\n" for i in range(150))


CHAT = {"messages": ROWS[0]}


@pytest.mark.parametrize(
    ("content", "settings", "sentence"),
    [
        (lines([CHAT, {"messages": ROWS[0][:1]}]), {}, "line 2 has no message of the role assistant"),
        (lines([{"messages": [{"role": "asistant", "content": "x"}]}]), {}, "line 1: message 1 has the role 'asistant'"),
        (lines([{"messages": [{"role": "user"}]}]), {}, "line 1: message 1 has no content"),
        (lines([{"messages": [{"role": "user", "content": 3}]}]), {}, "message 1 has a number as content"),
        (lines([{"messages": "hello"}]), {}, "line 1 has a string under 'messages'"),
        (lines([{"messages": ["hello"]}]), {}, "message 1 is a string, but must be an object"),
        (lines([{"text": "hello"}]), {}, r"line 1 has no key 'messages', it has text: .* \(--data.messages_key\)"),
        (lines([CHAT]) + "{]\n", {}, "line 2 is not a valid JSON object"),
        ("", {}, r"chat.jsonl is empty: give a file with content \(--data.train\)"),
        ("hello\n", {}, "chat.jsonl line 1 is not a valid JSON object"),
        (lines([CHAT]), {"tokenizer": BPE()}, "not BPE .*--data.tokenizer TokenizerJSON"),
        (lines([CHAT]), {"chat_template": "nowhere.jinja"}, "Chat template nowhere.jinja cannot be read: No such file"),
        (lines([CHAT]), {"chat_template": "empty.jinja"}, "empty.jinja writes no assistant turn"),
        (lines([CHAT]), {"messages_key": ""}, r"messages_key is empty.*--data.messages_key"),
    ],
)
def test_what_is_no_conversation_is_one_sentence(tmp_path, monkeypatch, tokenizer, content, settings, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text(content)
    (tmp_path / "val.jsonl").write_text(lines([CHAT]))
    (tmp_path / "empty.jinja").write_text("{{ bos_token }}")
    given = {"tokenizer": TokenizerJSON(str(tokenizer)), "train": "chat.jsonl", "val": "val.jsonl"} | settings
    with pytest.raises(UserError, match=sentence) as raised:
        prepare(ChatFiles(**given), tmp_path / "out", workers=0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"messages": None}, {"messages": []}], "have no conversation: 2 records have no messages"),
        ([CHAT], "its only conversation was held out for validation"),
    ],
)
def test_too_few_conversations_to_choose_from_are_counted(tmp_path, tokenizer, rows, sentence):
    (tmp_path / "chat.jsonl").write_text(lines(rows))
    with pytest.raises(UserError, match=sentence):
        prepare(module(tokenizer, paths=str(tmp_path / "chat.jsonl")), tmp_path / "out", workers=0)


def test_a_split_without_conversations_is_named(tmp_path, tokenizer):
    for name, row in (("train", {"messages": []}), ("val", CHAT)):
        (tmp_path / f"{name}.jsonl").write_text(lines([row]))
    data = module(tokenizer, **{name: str(tmp_path / f"{name}.jsonl") for name in ("train", "val")})
    with pytest.raises(UserError, match="The train data have no conversation: 1 records"):
        prepare(data, tmp_path / "out", workers=0)


def test_a_tokenizer_without_a_template_asks_for_one(tmp_path, tokenizer):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "chat.jsonl").write_text(lines([CHAT] * 2))
    data = ChatFiles(tokenizer=TokenizerJSON(str(folder)), paths=str(tmp_path / "chat.jsonl"))
    assert data.problems() == [
        f"The tokenizer in {folder} has no chat template: name a file with one (--data.chat_template FILE.jinja)."
    ]
    configured = {
        "chat_template": [{"name": "default", "template": chat_templates.unmarked("qwen")}],
        "eos_token": {"content": "E"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configured))
    data = ChatFiles(tokenizer=TokenizerJSON(str(folder)), paths=str(tmp_path / "chat.jsonl"))
    assert data.problems() == []
    assert data.chat_template.special_tokens["eos_token"] == "E"
    assert data.chat_template.text == chat_templates.unmarked("qwen")


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes_and_a_run_trains_on_the_cache(tmp_path, tokenizer):
    rows = [{"messages": messages(name) if name in CONVERSATIONS else name} for name in CONVERSATIONS]
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_text(lines([CHAT | {"n": i}, *rows] * 20))
    paths = [str(tmp_path / f"{i}.jsonl") for i in range(3)]
    for workers in (0, 3):
        prepare(module(tokenizer, paths=paths), tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "0") == contents(tmp_path / "3")
    data = module(tokenizer, paths=paths, cache_dir=str(tmp_path / "cache"), block_size=64, global_batch_size=2)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert np.any(batch["targets"].numpy() == -100)
    assert not data.every_target_counts
