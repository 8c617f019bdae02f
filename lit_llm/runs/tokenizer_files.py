"""The tokenizer and generation files of Hugging Face folders and run folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_object, write_bytes, write_json
from lit_llm.ingest.chat import CHAT_TEMPLATE_FILE, ChatForm
from lit_llm.tokenizers import DOCUMENT_IDS_FILE, TOKENIZER_FILE, Tokenizer, TokenizerJSON, load_tokenizer
from lit_llm.tokenizers.hugging_face import TOKENIZER_CONFIG

GENERATION = "generation_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER_COMPANIONS = (
    *("tokenizer_config.json", _SPECIAL_TOKENS, "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", GENERATION, DOCUMENT_IDS_FILE),
)
"""Files next to tokenizer.json in a Hugging Face folder. Import copies them, so that export writes them unchanged."""
IMPORTED_CONFIG = "imported_config.json"
"""Name, in a run folder, of the copy of an imported config.json. Export prefers the model family that the copy names."""
COMPANIONS = (*TOKENIZER_COMPANIONS, IMPORTED_CONFIG)
"""Files that are copied into a new run folder from the run with whose weights the new run starts."""


def imported_family(run: Path) -> str | None:
    """The `model_type` in the config.json from which a run, or its initial weights, were imported; None if neither was."""
    file = run / IMPORTED_CONFIG
    return read_object(file).get("model_type") if file.is_file() else None


def copy_companions(source: Path, target: Path, names: Iterable[str] = COMPANIONS) -> None:
    """Copy the files `names`, those that exist, from the folder `source` to the folder `target`.

    Raises:
        UserError: A file is no ordinary file, or is called .json and holds no JSON object.
    """
    for name in names:
        if os.path.lexists(source / name):
            if name.endswith(".json"):
                read_object(source / name)
            write_bytes(target / name, (source / name).read_bytes())


def write_taught_ids(run: Path, tokenizer: Tokenizer, chat: ChatForm | None) -> None:
    """Write into a run folder the ids that training teaches: BOS and EOS of documents, or a conversation's end of turn.

    Changes the imported files, which have the ids of earlier training. `chat`: form of the chats; None: no conversations.
    """
    taught = tokenizer.eos_id if chat is None else chat.end_of_turn_id
    content = generation(run, eos_id=tokenizer.eos_id)
    if taught is not None and taught not in (stops := stop_ids(content)):
        content["eos_token_id"] = [taught, *stops]
    if chat is None:
        for file in (run / TOKENIZER_CONFIG, run / _SPECIAL_TOKENS):
            if file.is_file():
                write_json(read_object(file) | _document_tokens(tokenizer), file)
        content |= {} if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
    if content != generation(run, eos_id=tokenizer.eos_id):
        write_json(content, run / GENERATION)


def _document_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: tokenizer.decode([token]) for name, token in ids.items() if token is not None}


def tokenizer_config(run: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of tokenizer_config.json for an export: the run's imported file, or else a config that gives the run's ids.

    That config adds no ids to a text and changes no spaces in decoding. Without a chat template, the name of a special token in
    a text is read as text (`split_special_tokens`). A chat template writes special tokens by name, so with a template, also of
    a run that a base without a template began, names are read as tokens.
    """
    if (imported := run / TOKENIZER_CONFIG).is_file():
        config = read_object(imported)
    else:
        tokens = _document_tokens(tokenizer)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens.get("eos_token"),  # a document starts after the end of another, as in GPT-2
            **tokens,
        }
    if (older := run / _SPECIAL_TOKENS).is_file() and "added_tokens_decoder" not in config:
        config |= read_object(older)
    if (run / CHAT_TEMPLATE_FILE).is_file() and config.get("split_special_tokens"):
        config["split_special_tokens"] = False
    return config


def write_tokenizer(run: Path, out: Path, *, block_size: int) -> None:
    """Write a run's tokenizer, and the files that were imported with it, into the folder `out` of an export.

    `block_size` becomes the tokenizer's `model_max_length`, unless an imported tokenizer_config.json has a larger value.
    """
    copy_companions(run, out, (TOKENIZER_FILE, *TOKENIZER_COMPANIONS))
    config = tokenizer_config(run, load_tokenizer(run))
    write_json(config | {"model_max_length": max(block_size, config.get("model_max_length") or 0)}, out / TOKENIZER_CONFIG)


def generation(run: Path, *, eos_id: int | None) -> dict[str, Any]:
    """The content of a run's generation_config.json. Without that file, BOS and EOS are both the model's `eos_id`."""
    file = run / GENERATION
    return read_object(file) if file.is_file() else {"bos_token_id": eos_id, "eos_token_id": eos_id}


def stop_ids(content: Mapping[str, Any]) -> list[int]:
    """The ids at which generation stops, according to the content of a generation_config.json."""
    stops = content.get("eos_token_id")  # an id or a list of ids
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def write_generation_config(run: Path, out: Path, *, eos_id: int | None) -> dict[str, Any]:
    """Write a run's generation_config.json into `out`. Returns {"bos_token_id", "eos_token_id"}, which config.json repeats."""
    content = generation(run, eos_id=eos_id)
    write_json(content, out / GENERATION)
    return {"bos_token_id": content.get("bos_token_id"), "eos_token_id": content.get("eos_token_id", eos_id)}


class ExportedTokenizer(TokenizerJSON):
    """Encodes and decodes texts as transformers' `AutoTokenizer` does with the folder that `export` makes of a run.

    Args:
        run: the run folder.
        eos_id: the model's end-of-document id.
    """

    def __init__(self, run: Path, *, eos_id: int | None) -> None:
        super().__init__(str(run))
        self.stop_ids = stop_ids(generation(run, eos_id=eos_id))
        config = tokenizer_config(run, self)
        self.backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        named = [config.get(name) for name in ("bos_token", "eos_token")]
        tokens = [token.get("content") if isinstance(token, dict) else token for token in named]
        self.backend.add_special_tokens([token for token in tokens if token])
        self._bos_id, self._eos_id = (None if token is None else self.backend.token_to_id(token) for token in tokens)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = {i for i, token in added.items() if token.special}

    def decode(self, ids: Any) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))  # skips ids that the vocabulary lacks
