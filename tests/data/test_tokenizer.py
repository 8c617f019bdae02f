"""Tokenizers: exact bytes, exact round trips, the same ids after saving, and ordinary text that looks special."""

from __future__ import annotations

import importlib
import importlib.util
import json
import linecache
import shutil
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lit_llm.tokenizers import BPE, Bytes, Characters, TokenizerJSON, load_tokenizer

TEXTS = [
    "",
    "a",
    "héllo  wörld\n\tx = 'ß€😀'\r\n",
    "<|endoftext|> is text here",
    "\x00\x7f\u0800\uffff",
    " lead\n\n\nend ",
]


@pytest.fixture(scope="module")
def bpe():
    tokenizer = BPE(300)
    tokenizer.train(["the cat and the hat and the bat\n" * 50])
    return tokenizer


def test_bytes_decodes_the_end_token_by_name_and_broken_utf8_as_replacement():
    assert Bytes().decode([104, 105, 256, 33, 256]) == "hi<|endoftext|>!<|endoftext|>"
    assert Bytes().decode([0xC3]) == "\ufffd"


def test_the_saved_bytes_tokenizer_gives_the_same_ids_in_the_library_alone(tmp_path):
    path = Bytes().save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(path))
    for text in TEXTS:
        if "<|" not in text:  # the library by itself recognises special tokens in text
            assert library.encode(text, add_special_tokens=False).ids == Bytes().encode(text).tolist()
    assert library.token_to_id("<|endoftext|>") == 256
    assert library.get_vocab_size() == 257
    assert isinstance(load_tokenizer(tmp_path), Bytes)
    as_json = TokenizerJSON(str(path))
    for text in TEXTS:
        assert as_json.encode(text).tolist() == Bytes().encode(text).tolist()
    np.testing.assert_array_equal(as_json.token_bytes(), Bytes().token_bytes())


def test_bpe_round_trips_any_text_and_never_emits_the_special_token_for_its_name(bpe):
    for text in TEXTS:
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert bpe.eos_id not in ids
    assert bpe.vocab_size <= 300
    assert bpe.decode([bpe.eos_id]) == "<|endoftext|>"
    assert [ids.tolist() for ids in bpe.encode_batch(TEXTS)] == [bpe.encode(text).tolist() for text in TEXTS]


def test_token_bytes_add_up_to_the_bytes_of_the_text(bpe, tmp_path):
    bpe.save(tmp_path)
    for tokenizer in (Bytes(), bpe, load_tokenizer(tmp_path)):
        sizes = tokenizer.token_bytes()
        assert sizes.shape == (tokenizer.vocab_size,)
        assert sizes[tokenizer.eos_id] == 0
        for text in TEXTS:
            assert sizes[tokenizer.encode(text)].sum() == len(text.encode())


def test_a_saved_bpe_is_the_same_tokenizer(bpe, tmp_path):
    bpe.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert not isinstance(loaded, Bytes)
    assert loaded.identity() == bpe.identity()
    assert (loaded.vocab_size, loaded.eos_id) == (bpe.vocab_size, bpe.eos_id)
    for text in TEXTS:
        assert loaded.encode(text).tolist() == bpe.encode(text).tolist()


def test_bytes_of_a_sentencepiece_vocabulary_are_those_of_its_text(tmp_path):
    # As in LLaMA-2: byte fallback, a word mark for the space, and a special token.
    vocab = {"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4, "é": 5} | {f"<0x{b:02X}>": 6 + b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == 1
    assert tokenizer.token_bytes()[:8].tolist() == [0, 0, 1, 1, 2, 2, 1, 1]
    text = "a aé😀 a"
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text.encode())


def test_no_end_token_is_none_and_truncation_saved_in_the_file_is_undone(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerJSON(str(tmp_path))
    assert tokenizer.eos_id is None
    assert tokenizer.vocab_size == 6  # ids have gaps
    assert tokenizer.encode("a b a b").tolist() == [0, 5, 0, 5]


def test_constructor_errors_are_explained(tmp_path):
    with pytest.raises(ValueError, match="Tokenizer not found at"):
        TokenizerJSON(str(tmp_path / "nothing.json"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="at least 257"):
        BPE(256)
    with pytest.raises(ValueError, match="not been trained"):
        BPE(300).encode("a")
    for bad in (-1, 257):
        with pytest.raises(ValueError, match=f"Token id {bad} "):
            Bytes().decode([bad])


@pytest.fixture(scope="module")
def characters():
    tokenizer = Characters(8)
    tokenizer.train(["aab\n", "bcé c\ufffd"])  # a 2, b 2, c 2, newline, space and é 1: six with U+FFFD and the end make eight
    return tokenizer


def test_characters_are_ids_in_order_and_round_trip(characters):
    assert characters.vocab_size == 8 and characters.eos_id == 7
    assert characters.encode("\n abcé").tolist() == [1, 2, 3, 4, 5, 6]
    for text in ("", "a", "bé\n\nab  c", "\ufffd"):
        assert characters.decode(characters.encode(text)) == text


def test_a_character_that_was_not_learned_is_one_unknown_id(characters):
    assert characters.encode("axb😀").tolist() == [3, 0, 4, 0]
    assert characters.decode([3, 0, 4, 0]) == "a\ufffdb\ufffd"
    name = "<|endoftext|>"
    assert characters.encode(name).tolist() == [5 if c == "c" else 0 for c in name], "text, never the special token"
    assert characters.decode([3, 7, 4]) == f"a{name}b"


def test_the_rarest_characters_are_left_out_and_ties_do_not_depend_on_the_order():
    found = []
    for texts in (["zzyyxw"], ["wx", "yyzz"]):
        tokenizer = Characters(5)
        tokenizer.train(texts)
        found.append(tokenizer.encode("wxyz").tolist())
    assert found == [[1, 0, 2, 3]] * 2


def test_saved_characters_are_the_same_tokenizer_with_the_bytes_of_each(characters, tmp_path):
    characters.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, Characters)
    text = "aé\n cb?"
    assert loaded.encode(text).tolist() == characters.encode(text).tolist() and loaded.identity() == characters.identity()
    assert loaded.token_bytes().tolist() == [3, 1, 1, 1, 1, 1, 2, 0]  # UTF-8 of U+FFFD, \n, space, a, b, c, é; the end has none
    by_library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert by_library.encode(text).ids == loaded.encode(text).tolist() == characters.encode(text).tolist()
    assert by_library.decode(by_library.encode(text).ids) == "aé\n cb\ufffd"


def test_a_tokenizer_of_a_user_is_another_one_with_other_code_in_its_file_or_that_of_its_base(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def identity(base: str, own: str) -> str:
        (tmp_path / "their_base.py").write_text(f"from lit_llm.data import Bytes\nclass Base(Bytes):\n    {base}\n")
        (tmp_path / "their_own.py").write_text(f"from their_base import Base\nclass Own(Base):\n    {own}\n")
        for name in ("their_base", "their_own"):
            sys.modules.pop(name, None)
        linecache.clearcache()
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return importlib.import_module("their_own").Own().identity()

    plain = identity("pass", "pass")
    assert identity("pass", "pass") == plain and "their_own.Own" in plain
    assert len({plain, identity("x = 1", "pass"), identity("pass", "x = 1")}) == 3
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("unlisted", tmp_path / "their_own.py"))
    module.__spec__.loader.exec_module(module)  # sys.modules does not have it
    assert "unlisted.Own" in module.Own().identity()
