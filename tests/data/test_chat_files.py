"""Conversations in files, from reading them to shards whose tokens and masks are those of the template."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from ingest import chat_templates
from ingest.chat_templates import CONVERSATIONS, messages, tool_conversation, write_tokenizer
from prepared import prepare
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from lit_llm.core.errors import UserError
from lit_llm.data import BPE, ChatFiles, TokenizerJSON, TokenShards, TokenStream
from lit_llm.ingest.chat import ChatTemplate

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
        summary = prepare(module(tokenizer, **settings), tmp_path / f"shards-{name}")
        assert summary.skipped == (name != "c")
    assert contents(tmp_path / "shards-a") == contents(tmp_path / "shards-b")
    data = TokenShards(path="shards-c", block_size=8, global_batch_size=1)
    data.setup("fit")
    assert (data.corpus.eos_id, data.every_target_counts) == (TokenizerJSON(str(tokenizer)).eos_id, False)
    found = []
    for stream in data.corpus.streams.values():
        ends = stream.layouts[0].document_ends()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            ids, mask = stream.read(int(start), int(end - start)), stream.read_mask(int(start), int(end - start))
            found.append((data.tokenizer.decode(ids), data.tokenizer.decode(ids[mask == 1])))
    template = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nSay {0} 🙂<|im_end|>\n"
    template += "<|im_start|>assistant\n{0}<|im_end|>\n"
    assert sorted(found) == sorted((template.format(i), f"{i}<|im_end|>\n") for i in range(40))
    end_of_turn = data.tokenizer.backend.token_to_id("<|im_end|>")
    assert data.chat_form == (chat_templates.unmarked("qwen"), end_of_turn)


ASIDE = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{% for one in documents or [] %}{{ one.text + '\\n' }}{% endfor %}"
    "{{ mood if mood is defined else 'calm' }}" + chat_templates.unmarked("chatml")
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"place": {"type": "string"}}}}}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"properties": {"zone": {"type": "string"}}}}}
BESIDE = [
    {"tools": [TOOL], "documents": None, "chat_template_kwargs": {"mood": "glad"}},
    {"tools": [TOOL, OTHER], "documents": [{"text": "Paper"}], "chat_template_kwargs": None},
    {"tools": None, "documents": None, "chat_template_kwargs": {"bos_token": None}},
]


def test_what_stands_beside_the_messages_reaches_the_template_in_every_format(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aside.jinja").write_text(ASIDE)
    rows = [{"id": 1, "messages": row, **beside} for row, beside in zip(ROWS, BESIDE, strict=False)]
    texts = [{key: json.dumps(one) if one and key != "messages" else one for key, one in row.items()} for row in rows]
    table = pa.Table.from_pylist(rows)
    assert "zone" in str(table.schema)  # a table gives each tool the keys of all, with null
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    pa.parquet.write_table(pa.Table.from_pylist([{"data": row} for row in texts]), tmp_path / "nested.parquet")
    with pa.OSFile("a.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "a.jsonl").write_text(lines(rows))
    (tmp_path / "text.jsonl").write_text(lines([{"data": row} for row in texts]))
    (tmp_path / "val.jsonl").write_text(lines([CHAT]))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    expected = []
    for row in rows:
        kwargs = {key: one for key, one in (row["chat_template_kwargs"] or {}).items() if one is not None}
        given = {key: row[key] for key in ("tools", "documents")}
        expected += theirs.apply_chat_template(row["messages"], chat_template=ASIDE, return_dict=False, **given, **kwargs)
    for name in ("a.parquet", "a.arrow", "a.jsonl", "nested.parquet", "text.jsonl"):
        settings = {"messages_key": "data.messages"} if name in ("nested.parquet", "text.jsonl") else {}
        data = module(tokenizer, train=name, val="val.jsonl", chat_template="aside.jinja", **settings)
        if settings:
            (tmp_path / "val.jsonl").write_text(lines([{"data": CHAT}]))
        prepare(data, tmp_path / f"out-{name}")
        stream = TokenStream([tmp_path / f"out-{name}" / "train_000000.bin"])
        assert stream.read(0, len(stream)).tolist() == expected


def test_a_content_that_is_a_list_is_its_texts(tmp_path, tokenizer):
    (tmp_path / "val.jsonl").write_text(lines([CHAT]))
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "it"}]
    for name, (asked, said) in {"list": (parts, ["ye", "s"]), "text": ("Say it", "yes")}.items():
        row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        (tmp_path / f"{name}.jsonl").write_text(lines([row]))
        files = {"train": str(tmp_path / f"{name}.jsonl"), "val": str(tmp_path / "val.jsonl")}
        prepare(module(tokenizer, **files), tmp_path / name)
    for file in ("train_000000.bin", "train_000000.mask"):
        assert contents(tmp_path / "list")[file] == contents(tmp_path / "text")[file]


CHAT = {"messages": ROWS[0]}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"id": 1, "prompt": 'Say "b"', "response": "b"}, 'Say "b"'),
        ({"question": "Which?", "answer": "b"}, "Which?"),
        ({"instruction": "Say b", "output": "b"}, "Say b"),
        ({"instruction": "Repeat", "input": "b", "output": "b"}, "Repeat\n\nb"),
        ({"instruction": "Say b", "input": "", "output": "b"}, "Say b"),
    ],
)
def test_a_question_with_its_answer_is_converted_by_the_command_of_the_message(tmp_path, monkeypatch, tokenizer, row, asked):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pr.jsonl").write_text(lines([row]))
    (tmp_path / "val.jsonl").write_text(lines([CHAT]))
    with pytest.raises(UserError, match=r"pr\.jsonl line 1 has no key 'messages', it has .*: a row needs messages") as refused:
        prepare(module(tokenizer, train="pr.jsonl", val="val.jsonl"), tmp_path / "out")
    command = re.search(r"jq .* > chats.jsonl", str(refused.value))[0]
    subprocess.run(command.replace("FILE", "pr.jsonl"), shell=True, check=True)
    expected = [{"role": "user", "content": asked}, {"role": "assistant", "content": "b"}]
    assert json.loads((tmp_path / "chats.jsonl").read_text()) == {"messages": expected}


@pytest.mark.parametrize(
    ("content", "settings", "sentence"),
    [
        (lines([CHAT, {"messages": ROWS[0][:1]}]), {}, "line 2 has no message of the role assistant"),
        (lines([{"messages": [{"role": "asistant", "content": "x"}]}]), {}, "line 1: message 1 has the role 'asistant'"),
        (
            lines([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}]),
            {},
            "message 1 has an array as content, but must have a text, or a list of texts",
        ),
        (lines([CHAT | {"system": "be nice"}]), {}, "line 1 has 'system' beside the messages"),
        (lines([CHAT | {"tools": "none"}]), {}, "line 1 has a string under 'tools', but must have an array"),
        (lines([{"text": "hello"}]), {}, r"line 1 has no key 'messages', it has text: .* \(--data.messages_key\)"),
        (lines([CHAT]) + "{]\n", {}, "line 2 is not a valid JSON object"),
        (lines([CHAT]), {"tokenizer": BPE()}, "not BPE .*--data.tokenizer TokenizerJSON"),
        (
            lines([CHAT]),
            {"chat_template": "nowhere.jinja"},
            "nowhere.jinja cannot be read: No such file or directory",
        ),
        (lines([CHAT]), {"chat_template": "empty.jinja"}, "empty.jinja writes nothing of what the assistant says"),
    ],
)
def test_what_is_no_conversation_is_one_sentence(tmp_path, monkeypatch, tokenizer, content, settings, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text(content)
    (tmp_path / "val.jsonl").write_text(lines([CHAT]))
    (tmp_path / "empty.jinja").write_text("{{ bos_token }}")
    given = {"tokenizer": TokenizerJSON(str(tokenizer)), "train": "chat.jsonl", "val": "val.jsonl"} | settings
    with pytest.raises(UserError, match=sentence) as raised:
        prepare(ChatFiles(**given), tmp_path / "out")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"messages": None}, {"messages": []}], "have 0 conversations with 0 tokens; 2 records of all data without any"),
        ([CHAT], "have 0 conversations with 0 tokens; 1 held out for validation"),
    ],
)
def test_too_few_conversations_to_choose_from_are_counted(tmp_path, tokenizer, rows, sentence):
    (tmp_path / "chat.jsonl").write_text(lines(rows))
    with pytest.raises(UserError, match=sentence):
        prepare(module(tokenizer, paths=str(tmp_path / "chat.jsonl")), tmp_path / "out")


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
        "chat_template": [
            {"name": "default", "template": "no tools\n"},
            {"name": "tool_use", "template": "\n{{ tools[0].n }}\n "},
        ],
        "eos_token": {"content": "E"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configured))
    several = ChatTemplate.find("auto", folder, TokenizerJSON(str(folder))).text
    theirs = {
        one["name"]: one["template"] for one in configured["chat_template"]
    }  # transformers takes tool_use if there are tools
    for name, tools in (("default", None), ("tool_use", [{"n": 3}])):
        written = [
            render_jinja_template([CHAT["messages"]], tools=tools, chat_template=one)[0] for one in (several, theirs[name])
        ]
        assert written[0] == written[1]
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
