"""Encode many texts: choose the fastest encoder that gives the tokenizer's ids, and a way to encode documents in pieces.

tiktoken encodes a byte-level BPE several times faster than ``tokenizers``. For each tokenizer, the ids of both libraries are
compared first: on a sample of the text, on the text of every token, and on a fixed text with characters a sample may lack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from lit_llm.tokenizers.base import Tokenizer
from lit_llm.tokenizers.hugging_face import HuggingFaceTokenizer
from lit_llm.tokenizers.tiktoken_encoding import NotExpressible, TiktokenEncoding

_SAMPLE_CHARACTERS = 2**20  # the most characters of a sample that are compared
_SAMPLE_PIECE = 2**17  # the most characters of one text that are compared
_TOGETHER = 2048  # the number of tokens whose texts are encoded at once, which limits memory
_LONGEST_TEXT = 2**19  # bytes of the longest text for tiktoken, whose patterns overflow on a run of a million spaces
_JOINS_TESTED = 16  # the most cuts of each text that are tested
_SAFE_CUT = re.compile(r"\S\n(?=\S)")  # where the pieces of a document are cut, if possible

_RUN = 2**15  # far longer than any word

_LINES = (
    "It's WE'LL they've I'D you're 'tis rock'n'roll o'S 's's ’s",  # contractions, in each case
    "  two  three   four    spaces \t tabs\t\tand \u00a0 others\u2003\u3000\u200b \v\f\x1c\x85",
    "trailing space \ntrailing tab\t\n\n\n  indented\r\nCRLF\r\n\r\nCR\ralone\u2028separator\u2029",
    "1 12 123 1234 12345.678,9 0x1F ½ Ⅷ ²³ ١٢٣ १२३ 1e-5 v2.0.1",
    "snake_case camelCase SCREAMING x.y->z(a[b]) {c:d}; //!? #include <a> === ...... ---- \\n $1 100%",
    "naïve café e\u0301 a\u0308\u0323 ﬁ Å Å İi ẞß Straße",  # composed and decomposed letters
    "Ελληνικά русский עברית العربية हिन्दी ไทย 中文字符 日本語テキスト 한국어 ᄒ\u1161ᆫ 𝔘𝔫𝔦 𠀀𪜀",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪🇫🇷 ☃️ ©®™ \ufeff \ufffd\ufffd \u0000\u0001\u007f",
)
"""Lines of many kinds, which may be rare in a corpus, on which two encoders are compared."""

Join = Literal["plain", "newline", "document"]
_Encode = Callable[[bytes], np.ndarray]


@dataclass(frozen=True)
class EncoderChoice:
    """Record of which library encodes a tokenizer's texts, why, and how pieces are joined. Small: each worker gets a copy."""

    kind: Literal["tiktoken", "tokenizers", "own"]
    """The library that encodes; "own": the methods of the tokenizer's class encode."""
    reason: str
    """The reason for the choice of ``kind``, in one sentence."""
    join: Join
    """How to encode a document in pieces so that the ids are those of the whole document. plain: encode each piece alone.
    newline: encode each piece but the first after a newline, and drop the newline's ids. document: encode documents whole,
    because the ids of pieces differ."""


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str], *, try_tiktoken: bool = True) -> EncoderChoice:
    """Choose the fastest encoder that gives the tokenizer's ids, and how to encode pieces so that they give a document's ids.

    Args:
        sample: texts like those to encode. At most 2**17 characters of each text, and 2**20 in all, are compared.
        try_tiktoken: False: do not consider tiktoken. This suits short texts, as the comparison takes up to a second.
    """
    texts = [*_first(sample, _SAMPLE_CHARACTERS), *check_texts()]
    kind: Literal["tiktoken", "tokenizers", "own"] = "own"
    reason = f"{type(tokenizer).__name__} encodes by itself."
    encode: _Encode = tokenizer.encode_bytes
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.encodes_with_library:
        kind, reason = "tokenizers", "the text is short."
        if not try_tiktoken:
            return EncoderChoice(kind, reason, _join(encode, texts))
        try:
            fast = TiktokenEncoding(tokenizer.backend)
        except NotExpressible as error:
            reason = f"tiktoken cannot express this tokenizer: {error}."
        except ModuleNotFoundError:
            reason = "tiktoken, which is faster, is not installed: pip install tiktoken."
        else:
            different = _difference(tokenizer, fast, texts)
            if different is None:
                kind, encode = "tiktoken", _with_tiktoken(fast, tokenizer)
                reason = "tiktoken gives the ids of tokenizers for a sample of the text, every token and a fixed text."
            else:
                reason = f"tiktoken gives other ids than tokenizers for {different!r}."
    return EncoderChoice(kind, reason, _join(encode, texts))


class PieceEncoder:
    """Encodes documents that come in pieces, and counts their unknown tokens and bytes.

    Args:
        choice: the result of ``choose_encoder`` for this tokenizer.

    Attributes:
        unknown_tokens: number of ids so far that stand for unknown characters, if the tokenizer has an ``unknown_id``.
        token_bytes: number of bytes so far of all other ids, by ``Tokenizer.token_bytes``. For a class without ``unknown_id``
            that does not use ``tokenizers``: number of bytes of the texts.
    """

    def __init__(self, tokenizer: Tokenizer, choice: EncoderChoice) -> None:
        self.unknown_tokens = self.token_bytes = 0
        unknown = tokenizer.unknown_id
        counts = isinstance(tokenizer, HuggingFaceTokenizer) or unknown is not None
        self._sizes = tokenizer.token_bytes().copy() if counts else None
        if self._sizes is not None and unknown is not None:
            self._sizes[unknown] = -1
        self._encode: _Encode = tokenizer.encode_bytes
        if choice.kind == "tiktoken":
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            self._encode = _with_tiktoken(TiktokenEncoding(tokenizer.backend), tokenizer)
        self._join: Join = choice.join

    def encode(self, text: bytes, *, continues: bool = False) -> np.ndarray:
        """Return the ids (n,) of a text, of any integer type, without BOS and EOS. Adds to ``unknown_tokens``, ``token_bytes``.

        Args:
            text: UTF-8. Invalid bytes become U+FFFD, except that ``Bytes`` keeps every byte.
            continues: whether ``text`` continues the document of the previous call.
        """
        ids = _encoded(self._encode, self._join, text, continues=continues)
        sizes = np.array([len(text)]) if self._sizes is None else self._sizes[ids]
        unknown = int(np.count_nonzero(sizes < 0))
        self.unknown_tokens += unknown
        self.token_bytes += int(sizes.sum()) + unknown
        return ids


def _with_tiktoken(encoding: TiktokenEncoding, tokenizer: Tokenizer) -> _Encode:
    def encode(text: bytes) -> np.ndarray:
        if len(text) > _LONGEST_TEXT:
            return tokenizer.encode_bytes(text)
        return encoding.encode(text.decode("utf-8", errors="replace"))

    return encode


def _first(texts: Sequence[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[: min(characters, _SAMPLE_PIECE)]
        characters -= len(text)


def _difference(tokenizer: Tokenizer, fast: TiktokenEncoding, texts: list[str]) -> str | None:
    """Return a text, or its start, that ``tokenizer`` and ``fast`` encode differently; None if all ids are equal."""
    tokens = []
    for token in fast.vocabulary:
        try:
            tokens.append(token.decode("utf-8"))
        except UnicodeDecodeError:  # part of a character
            continue
    remaining = iter(tokens)
    while some := list(islice(remaining, _TOGETHER)):
        for text, ids in zip(some, tokenizer.encode_batch(some), strict=True):
            if not np.array_equal(ids, fast.encode(text)):
                return text
    mixed = "".join(tokens[::7] + tokens[3::7])  # tokens that do not usually meet
    different = (text for text in [*texts, mixed] if not np.array_equal(tokenizer.encode(text), fast.encode(text)))
    return next((text[:40] for text in different), None)


def _join(encode: _Encode, texts: list[str]) -> Join:
    """The first way ("plain", "newline" or "document") to encode ``texts`` in pieces that gives the ids of each whole text."""
    possible: list[Join] = ["plain", "newline"]
    for text in texts:
        cuts = [match.end() for match in _SAFE_CUT.finditer(text)]
        cuts = cuts[:: -(-len(cuts) // _JOINS_TESTED)] if cuts else []
        pieces = [text[start:stop].encode() for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        if not cuts:
            continue
        whole = encode(text.encode())
        for join in list(possible):
            joined = [_encoded(encode, join, piece, continues=i > 0) for i, piece in enumerate(pieces)]
            if not np.array_equal(np.concatenate(joined), whole):
                possible.remove(join)
    return possible[0] if possible else "document"


def _encoded(encode: _Encode, join: Join, text: bytes, *, continues: bool) -> np.ndarray:
    """Return the ids (n,) of a piece of a document. With ``join`` "newline", for tokenizers that put a space before every text,
    a piece that ``continues`` a document is encoded after a newline, whose ids are dropped."""
    if join == "newline" and continues:
        newline, joined = encode(b"\n"), encode(b"\n" + text)
        if np.array_equal(joined[: newline.size], newline):
            return joined[newline.size :]
    return encode(text)


def check_texts() -> list[str]:
    """Return fixed texts for comparisons: lines of many kinds, characters of every block, and long runs of one kind."""
    lines = "\n".join(_LINES)
    codes = [code for code in (*range(0x20, 0x32000, 29), *range(0xE0000, 0xE0200, 7)) if not 0xD800 <= code < 0xE000]
    between = ("", " ", "a", "1", "\n", "'", "  ")
    blocks = "".join(chr(code) + between[i % len(between)] for i, code in enumerate(codes))
    runs = ["a" * _RUN, " " * _RUN + "x", "ab" * 1000 + " " * 1000 + "\n" * 1000 + "=" * 1000 + "7" * 1000 + "語" * 1000]
    return [lines, lines[::-1], blocks, *runs]
