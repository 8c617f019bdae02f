"""Convert a ``tokenizer.json`` to an encoding of the package tiktoken, which gives the same ids in a fifth of the time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tokenizers

from lit_llm.tokenizers.bytes import byte_symbols

# The regular expression of GPT-2's words. `ByteLevel(use_regex=True)` cuts words with it.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class NotExpressible(Exception):
    """The error for a tokenizer that tiktoken cannot express. The message gives the reason as a part of a sentence."""


class TiktokenEncoding:
    """Encodes texts with tiktoken as ``backend`` does. The caller has to check that the ids are the same.

    Args:
        backend: a tokenizer that treats the names of special tokens as text (``encode_special_tokens``).

    Raises:
        NotExpressible: tiktoken has no counterpart of a setting of the tokenizer.
        ModuleNotFoundError: tiktoken is not installed.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        import tiktoken

        content = json.loads(backend.to_str())
        self._nfc = _normalizes(content)  # False: texts are not normalised
        self._normalizer = backend.normalizer
        pattern = word_pattern(content["pre_tokenizer"])
        ranks, ids = _ranks(content)
        try:
            self._encoding = tiktoken.Encoding("tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:  # the regular expression is of another dialect
            raise NotExpressible("its regular expression means nothing to tiktoken") from error
        self._ids = np.array(ids, dtype=np.uint32)  # (ranks,): ids may have gaps and another order
        self.vocabulary = ranks.keys()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, (n,) uint32."""
        if self._nfc and not text.isascii():
            text = self._normalizer.normalize_str(text)
        return self._ids[np.array(self._encoding.encode_ordinary(text), dtype=np.intp)]


def _normalizes(content: dict[str, Any]) -> bool:
    """Whether the tokenizer with the JSON ``content`` normalises texts to NFC.

    Raises:
        NotExpressible: the tokenizer normalises texts in another way.
    """
    normalizer = content["normalizer"]
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise NotExpressible(f"it has a normalizer ({normalizer['type']})")
    return normalizer is not None


def word_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the regular expression by which the `pre_tokenizer` of a tokenizer.json cuts words.

    Raises:
        NotExpressible: the pre-tokenizer cuts words in another way than by one regular expression.
    """
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    raise NotExpressible("it does not cut words by one regular expression and then take bytes")


def require_merges(content: dict[str, Any], *, whole_words: bool = False) -> None:
    """Check that a tokenizer's ids follow from its BPE merges alone, because other programs, like tiktoken, get only merges.

    Args:
        content: the content of the tokenizer's tokenizer.json.
        whole_words: whether the other program, if a whole word is a token, returns the token's id without applying merges.

    Raises:
        NotExpressible: the ids do not follow from the merges.
    """
    model = content["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        raise NotExpressible("it is no BPE, or leaves out merges at random")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotExpressible("its tokens depend on their place in a word")
    if bool(model.get("ignore_merges")) != whole_words:
        tokens = {*byte_symbols(), *map("".join, model["merges"]), *(token["content"] for token in content["added_tokens"])}
        if model["vocab"].keys() - tokens:
            raise NotExpressible("it has tokens that no merge makes")


def _ranks(content: dict[str, Any]) -> tuple[dict[bytes, int], list[int]]:
    """(token → rank, id of each rank) for tiktoken. The rank of a single byte is its value; merged tokens follow from 256 on.

    Raises:
        NotExpressible: tiktoken cannot have such tokens or merges.
    """
    require_merges(content)
    model, vocab = content["model"], content["model"]["vocab"]
    if model.get("byte_fallback"):
        raise NotExpressible("it is not a byte-level BPE")
    if any(not token["special"] for token in content["added_tokens"]):
        raise NotExpressible("it has added tokens that are looked for in texts")
    symbols = byte_symbols()
    if not vocab.keys() >= set(symbols):
        raise NotExpressible("not every byte has a token")
    ranks = {bytes([byte]): byte for byte in range(256)}
    ids = [vocab[symbol] for symbol in symbols]
    raw = str.maketrans({symbol: chr(byte) for byte, symbol in enumerate(symbols)})
    merged = None
    for symbol in map("".join, model["merges"]):
        if symbol == merged:  # LLaMA-3 lists each way to make a token
            continue
        merged = symbol
        token = symbol.translate(raw).encode("latin-1")
        if token in ranks:
            raise NotExpressible("it makes a token by merges of different rank")
        ranks[token] = len(ids)
        ids.append(vocab[symbol])
    return ranks, ids
