"""Writes the tokenizer of a run as keys of GGUF: byte-level BPE, and SentencePiece's BPE (LLaMA 2, Mistral, Gemma).

llama.cpp reads no regular expression from a file: a file has the name of one that llama.cpp knows. With SentencePiece's BPE,
llama.cpp always merges the pair whose token has the highest score.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.ingest.chat import AUTO, ChatTemplate, NoChatTemplate
from lit_llm.models.gpt import GPTConfig
from lit_llm.runs.tokenizer_files import generation, stop_ids
from lit_llm.tokenizers import TOKENIZER_FILE, load_tokenizer
from lit_llm.tokenizers.tiktoken_encoding import GPT2_WORDS, NotExpressible, require_merges, word_pattern

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {GPT2_WORDS: "gpt-2", _LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
"""Regular expression by which a byte-level BPE cuts text into words → its name in llama.cpp."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_keys(run: Path, config: GPTConfig) -> tuple[dict[str, Any], list[str]]:
    """Return ({GGUF key: value} for the tokenizer and chat template of a run, notes for the user, one sentence each).

    Raises:
        UserError: GGUF cannot express the tokenizer.
    """
    file = run / TOKENIZER_FILE
    if not file.exists():
        return {"tokenizer.ggml.model": "none"}, [f"{run} has no {TOKENIZER_FILE}: the file has no tokenizer"]
    tokenizer = load_tokenizer(run)
    content = json.loads(tokenizer.to_json())
    try:
        if not content["model"].get("merges"):
            raise NotExpressible("it is no BPE with merges")
        vocab = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in content["added_tokens"]}}
        entries = _sentencepiece(content, vocab) if content["model"].get("byte_fallback") else _byte_level(content)
        if (eos := tokenizer.eos_id) is None:
            raise NotExpressible("no token ends a document")
    except NotExpressible as error:
        raise UserError(f"GGUF has no form for the tokenizer {file}: {error} (--format)") from error
    assert config.vocab_size is not None
    names = [f"[PAD{i}]" for i in range(config.vocab_size)]
    types = [_UNUSED] * config.vocab_size
    for name, token in vocab.items():
        names[token], types[token] = name, _BYTE if "scores" in entries and _is_byte(name) else _NORMAL
    for token in content["added_tokens"]:
        types[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    if (unknown := vocab.get(content["model"].get("unk_token"))) is not None:
        types[unknown] = _UNKNOWN
        entries["unknown_token_id"] = unknown
    if "scores" in entries:
        entries["scores"] = [float(entries["scores"].get(name, 0)) for name in names]
    prefix = tokenizer.prefix_token_ids or [eos if tokenizer.bos_id is None else tokenizer.bos_id]
    entries |= {"tokens": names, "token_type": types, "bos_token_id": prefix[0], "eos_token_id": eos}
    entries["add_bos_token"] = bool(tokenizer.prefix_token_ids)
    if others := [token for token in stop_ids(generation(run, eos_id=eos)) if token != eos]:
        entries["eot_token_id"] = others[0]
    keys = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    notes = []
    if (content["pre_tokenizer"] or {}).get("prepend_scheme") == "first":
        notes.append("llama.cpp puts a space before a text that starts with one, too; this tokenizer does not")
    if (content["normalizer"] or {}).get("type") == "NFC":
        notes.append("llama.cpp does not normalise texts (NFC), as this tokenizer does")
    with contextlib.suppress(NoChatTemplate):  # most runs have no template
        keys["tokenizer.chat_template"] = ChatTemplate.find(AUTO, run, tokenizer).text
    return keys, notes


def _byte_level(content: dict[str, Any]) -> dict[str, Any]:
    if (content["normalizer"] or {"type": "NFC"}) != {"type": "NFC"}:
        raise NotExpressible(f"its normalizer is {content['normalizer']['type']}")
    pattern = word_pattern(content["pre_tokenizer"])
    if pattern not in _WORDS:
        raise NotExpressible(f"llama.cpp has no name for its regular expression {pattern}")
    pre = _WORDS[pattern]
    require_merges(content, whole_words=pre == "llama-bpe")
    return {"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in content["model"]["merges"]]}


def _sentencepiece(content: dict[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    """Return {GGUF key: value} for a SentencePiece BPE. A token's score is minus the index of the first merge that makes it.

    Raises:
        NotExpressible: one score per token cannot express the order of the merges.
    """
    require_merges(content)
    added = {token["content"] for token in content["added_tokens"]}  # added tokens are cut out of texts before merges
    places: dict[str, list[int]] = {token: [] for token in content["model"]["vocab"] if token not in added}
    for place, pair in enumerate(content["model"]["merges"]):
        places.setdefault("".join(pair), []).append(place)
    for token, merges in places.items():
        splits = sum(token[:i] in vocab and token[i:] in vocab for i in range(1, len(token)))
        if len(merges) != splits or (merges and merges[-1] - merges[0] != splits - 1):
            raise NotExpressible(f"how it makes {token!r} does not depend on the token alone, as in SentencePiece")
    scores = {token: -merges[0] for token, merges in places.items() if merges}
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": _adds_space(content)}


def _adds_space(content: dict[str, Any]) -> bool:
    """Whether the tokenizer puts a space before each text.

    Raises:
        NotExpressible: the tokenizer does not replace spaces by ▁, or cuts texts into words.
    """
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    uncut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    match content["normalizer"], content["pre_tokenizer"]:
        case {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, last]}, None if last == space:
            return True
        case last, cut if last == space and cut in (None, uncut):
            return False
        case None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}:
            return bool(scheme != "never")
    raise NotExpressible("it neither takes bytes of words nor replaces spaces by ▁ in uncut texts")


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")
