"""Pairs of a chosen and a rejected answer: from JSONL to shards, blocks and batches."""

from __future__ import annotations

import ast
import json
import re

import numpy as np
import pytest
import tokenizers
from ingest import chat_templates
from prepared import prepare

from lit_llm.core.errors import UserError
from lit_llm.data import ChatFiles, TokenizerJSON, TokenShards
from lit_llm.data.batches import HeldOutOrder
from lit_llm.data.first_batch import first_batch
from lit_llm.ingest.shard_manifest import Manifest

USER = {"role": "user", "content": "What is 2 + 1?"}
BEFORE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}, USER]


def answer(text):
    return {"role": "assistant", "content": text}


ROWS = [
    {"prompt": "What is 2 + 1?", "chosen": "It is 3.", "rejected": "No idea"},
    {"prompt": BEFORE, "chosen": [answer("Three")], "rejected": "Four or five"},
    {"chosen": [*BEFORE, answer("Three, of course.")], "rejected": [*BEFORE, answer("Two")]},
    {"prompt": USER["content"], "chosen": [USER, answer("3")], "rejected": [USER, answer("7"), USER, answer("8")]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_templates.write_tokenizer("chatml", folder)
    (folder / "chat_template.jinja").write_text(chat_templates.unmarked("chatml"))
    return TokenizerJSON(str(folder))


def files(folder, tokenizer, rows, name="pairs.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ChatFiles(train=str(folder / name), val=str(folder / "val.jsonl"), tokenizer=tokenizer, block_size=64)


@pytest.fixture
def shards(tmp_path, tokenizer):
    files(tmp_path, tokenizer, ROWS[:1], "val.jsonl")
    prepare(files(tmp_path, tokenizer, ROWS * 5), tmp_path / "out", shard_tokens=101)  # pairs lie across shards
    return tmp_path / "out"


def opened(folder, **settings):
    settings = {"block_size": 128, "packing": "best_fit", "global_batch_size": 2, **settings}
    data = TokenShards(path=str(folder), **settings)
    data.setup()
    return data


def test_rows_of_all_forms_become_pairs_of_which_the_answers_are_learned(shards, tokenizer):
    manifest = Manifest.read(shards)
    assert manifest.pairs and manifest.splits["train"].documents == 40
    data = opened(shards)
    blocks, seen = data.blocks("train"), []
    batch = blocks[np.arange(len(blocks))]
    for row in range(len(blocks)):
        documents, targets = batch["documents"][row], batch["targets"][row]
        count = int((batch["pairs"][row] >= 0).sum())
        assert set(documents.unique().tolist()) <= {*range(2 * count), 128}
        for pair in range(count):
            seen.append(int(batch["pairs"][row, pair]))
            texts = []
            for document in (2 * pair, 2 * pair + 1):
                here = targets[(documents == document) & (targets >= 0)].tolist()
                texts.append(tokenizer.decode(here).replace("<|im_end|>", "").strip())
            number = data.corpus.pair_positions().tolist().index(seen[-1]) % 4
            assert texts[0] == ["It is 3.", "Three", "Three, of course.", "3"][number]
            assert texts[1].startswith(["No idea", "Four or five", "Two", "7"][number])
    assert sorted(seen) == data.corpus.pair_positions()[:20].tolist()  # each once; then that of val
    held_out = data.held_out_loader("val")
    (val,) = list(held_out)
    assert val["pairs"].tolist() == [[int(data.corpus.pair_positions()[20])]]


def test_ranks_share_whole_pairs_and_what_no_row_takes_is_left_out(shards, caplog):
    whole, data = opened(shards), opened(shards, block_size=80)  # of the longer forms, no pair fits
    blocks = data.blocks("train")
    found = blocks[np.arange(len(blocks))]["pairs"]
    assert 0 < (found >= 0).sum() < 20
    assert set(found[found >= 0].tolist()) < set(whole.corpus.pair_positions().tolist())
    ranks = [
        [blocks[each]["pairs"] for each in HeldOutOrder(blocks, micro_batch_size=2, rank=r, world_size=3)] for r in range(3)
    ]
    assert len({len(each) for each in ranks}) == 1
    together = np.concatenate([part.numpy().ravel() for each in ranks for part in each])
    assert sorted(together[together >= 0].tolist()) == sorted(found[found >= 0].tolist())
    with pytest.raises(UserError, match=r"--data.block_size"):
        opened(shards, block_size=12)


def test_pairs_need_packing_and_all_of_their_shards(shards):
    with pytest.raises(UserError, match=r"--data.packing best_fit"):
        opened(shards, packing="concatenate")
    with pytest.raises(UserError, match="name all shards"):
        TokenShards(train=str(shards / "train_000001.bin"), val=str(shards / "val_*.bin"), block_size=64).setup()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROWS[0] | {"rejected": "It is 3."}, "without a difference"),
        ({"chosen": "a", "rejected": "b"}, "no 'prompt'"),
        ({"prompt": "a", "chosen": "b"}, "nothing under 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "null under 'rejected'"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "a number under 'prompt'"),
        ({"chosen": [USER, answer("a")], "rejected": [BEFORE[0], answer("b")]}, "do not share"),
        ({"prompt": "Other", "chosen": [USER, answer("a")], "rejected": [USER, answer("b")]}, "do not share"),
        ({"chosen": [USER, answer("a")], "rejected": [USER]}, "no message of the role assistant"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(tmp_path, tokenizer, row, said):
    files(tmp_path, tokenizer, ROWS[:1], "val.jsonl")
    with pytest.raises(UserError, match=rf"pairs.jsonl line 2.*{said}"):
        prepare(files(tmp_path, tokenizer, [ROWS[0], row]), tmp_path / "out")


def test_pairs_and_conversations_are_not_mixed(tmp_path, tokenizer):
    files(tmp_path, tokenizer, ROWS[:1], "val.jsonl")
    with pytest.raises(UserError, match=r"5 pairs.*1 conversations"):
        prepare(files(tmp_path, tokenizer, [*ROWS, {"messages": [USER, answer("3")]}]), tmp_path / "out")


def test_the_first_batch_shows_both_answers_of_a_pair(shards, tokenizer):
    data = TokenShards(path=str(shards), block_size=128, packing="best_fit", global_batch_size=18)
    lines = list(first_batch(data, 18))  # all
    pairs = {line.split(":")[0].strip() for line in lines if line.startswith("  pair")}
    assert {"pair 1, chosen", "pair 1, rejected", "pair 2, chosen"} <= pairs
    at = next(i for i, line in enumerate(lines) if line.startswith("    inputs") and "Two" in line)  # of the third row
    assert "rejected" in lines[at - 1] and "chosen" in lines[at - 4] and "Three, of course." in lines[at - 3]
    prompt = lines[at].partition("Two")[0].partition("'")[2].encode().decode("unicode_escape")
    masked, answer = re.fullmatch(r"    targets  \[(\d+) masked\] (.*)", lines[at + 1]).groups()
    size = len(tokenizers.Tokenizer.from_str(tokenizer.to_json()).encode(prompt, add_special_tokens=False).ids)
    assert int(masked) == size - 1 and ast.literal_eval(answer).startswith("Two<|im_end|>")
