"""Small tokenizers of the kinds in use, trained on text that comes with Python."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lit_llm.tokenizers import END_OF_TEXT, TokenizerJSON

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
KINDS = ("gpt2", "llama3", "qwen", "llama2", "gemma", "metaspace", "collapsing", "bert")


@lru_cache
def pages() -> str:
    """Pages of Python's reference, and letters of several scripts: about 150 KB."""
    extra = "\nGrüße, naïve café – Ελληνικά, русский, 中文字符 und 日本語テキスト 🙂🎉.\nl’été 1984 12345\n" * 20
    return "\n".join(topics[name] for name in sorted(topics))[:150_000] + extra


def write(kind: str, folder: Path, *, vocab_size: int = 1500) -> TokenizerJSON:
    """A tokenizer like that of the named family, read from a file."""
    special = ["<unk>", "<s>", "</s>"] if kind in ("llama2", "gemma", "metaspace", "collapsing", "bert") else [END_OF_TEXT]
    backend, trainer = globals()[f"_{kind}"](vocab_size, special)
    if trainer is not None:
        backend.train_from_iterator(pages().splitlines(keepends=True), trainer=trainer)
    if kind == "llama2":
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return TokenizerJSON(str(folder))


def _bytes_of(words: str | None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    if words is not None:
        byte_level = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), behavior="isolated"), byte_level])
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_trainer(vocab_size: int, special: list[str]) -> trainers.BpeTrainer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)


def _gpt2(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.BpeTrainer]:
    return _bytes_of(None), _byte_trainer(vocab_size, special)


def _llama3(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.BpeTrainer]:
    backend = _bytes_of(_LLAMA3_WORDS)
    backend.model.ignore_merges = True
    return backend, _byte_trainer(vocab_size, special)


def _qwen(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.BpeTrainer]:
    backend = _bytes_of(_QWEN_WORDS)
    backend.normalizer = normalizers.NFC()
    return backend, _byte_trainer(vocab_size, special)


def _sentence_piece_bpe(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.BpeTrainer]:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    return backend, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=tokens, limit_alphabet=200, show_progress=False, max_token_length=16
    )


def _llama2(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.BpeTrainer]:
    backend, trainer = _sentence_piece_bpe(vocab_size, special)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend, trainer


def _gemma(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.BpeTrainer]:
    backend, trainer = _sentence_piece_bpe(vocab_size, special)
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend, trainer


def _metaspace(vocab_size: int, special: list[str]) -> tuple[Tokenizer, None]:
    """The frequent words and all letters. The library's trainer gives another vocabulary each time."""
    words = Counter("▁" + word for word in pages().split()).most_common(vocab_size)
    letters = Counter("▁" + pages()).most_common(200)
    scores = {token: math.log(count / len(pages())) for token, count in [*words, *letters]}
    backend = Tokenizer(models.Unigram([(name, 0.0) for name in special] + list(scores.items()), unk_id=0))
    backend.add_special_tokens(special)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend, None


def _collapsing(vocab_size: int, special: list[str]) -> tuple[Tokenizer, None]:
    backend, _ = _metaspace(vocab_size, special)
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")  # as T5: a line end is a space
    return backend, None


def _bert(vocab_size: int, special: list[str]) -> tuple[Tokenizer, trainers.WordPieceTrainer]:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
