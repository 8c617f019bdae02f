"""BPE learned by rustbpe, against `tokenizers` and counts by hand."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import tokenizers
from ingest.tokenizer_kinds import pages
from tokenizers import decoders, models, pre_tokenizers, trainers

from lit_llm.tokenizers import BPE
from lit_llm.tokenizers import bpe as module


def by_tokenizers(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer=trainer)
    return backend


def learned(texts: list[str], vocab_size: int) -> BPE:
    tokenizer = BPE(vocab_size)
    tokenizer.train(texts)
    return tokenizer


def test_the_file_is_that_of_tokenizers_where_no_pairs_are_equally_frequent() -> None:
    # Each word has letters of its own and another count: ab 40 times, cde 39 times, and so on.
    words = ["ab", "cde", "fghi", "jk", "lmn", "óß"]
    texts = [" ".join([word] * (40 - 2 * i)) + "\n" for i, word in enumerate(words)]
    expected = by_tokenizers(texts, 262)
    assert learned(texts, 262).to_json() == expected.to_str(pretty=True)


def test_real_text_gives_the_vocabulary_of_tokenizers_up_to_ties() -> None:
    ours, theirs = learned([pages()], 500), by_tokenizers([pages()], 500)
    assert ours.vocab_size == 500
    common = ours.backend.get_vocab().keys() & theirs.get_vocab().keys()
    assert len(common) >= 495  # the last tokens are equally frequent
    lengths = [len(ours.encode(pages())), len(theirs.encode(pages(), add_special_tokens=False).ids)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.001)


def test_the_result_depends_on_neither_order_nor_threads_nor_process() -> None:
    lines = pages().splitlines(keepends=True)
    shuffled = random.Random(1).sample(lines, len(lines))
    expected = learned(lines, 700).to_json()
    assert learned(shuffled, 700).to_json() == expected
    program = (
        "import sys; from ingest.tokenizer_kinds import pages; from lit_llm.tokenizers import BPE\n"
        "b = BPE(700); b.train(reversed(pages().splitlines(keepends=True))); sys.stdout.write(b.to_json())"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout == expected


@pytest.mark.parametrize("unit", ["a", " ", "\n", "=", "7", "語"])
def test_no_word_is_longer_than_a_thousand_characters(unit: str) -> None:
    # Learning takes the square of a word's length: 40,000 of a letter took a minute.
    tokenizer = learned([f"{unit * 5000} and {unit * 700}"], 300)
    assert 256 <= max(tokenizer.token_bytes()) <= 1000 * len(unit.encode())
    given = [f"{unit * 5000} and {unit * 700}\n", "", "a b c"]
    assert ["".join(module._parts_of(text)) for text in given] == given  # nothing is lost
