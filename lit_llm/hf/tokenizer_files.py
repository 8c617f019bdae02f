"""The tokenizer and generation files of Hugging Face folders and run folders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_llm.core.disk import read_object, read_ordinary, write_bytes
from lit_llm.hf.write import write_json
from lit_llm.ingest.chat import CHAT_TEMPLATE_FILE
from lit_llm.tokenizers import DOCUMENT_IDS_FILE, TOKENIZER_FILE, load_tokenizer

GENERATION = "generation_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER_COMPANIONS = (
    *("tokenizer_config.json", _SPECIAL_TOKENS, "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", GENERATION, DOCUMENT_IDS_FILE),
)
"""Files next to tokenizer.json in an imported folder. A run folder keeps them, so that export writes them unchanged."""
IMPORTED_CONFIG = "imported_config.json"
"""The config.json of an imported folder, in its run folder. Export prefers the family that it names."""
COMPANIONS = (*TOKENIZER_COMPANIONS, IMPORTED_CONFIG)
"""Files that a run takes over from the run it starts from."""


def imported_family(run: Path) -> str | None:
    """The `model_type` of the folder from which a run, or the weights that it started with, were imported; None if none was."""
    file = run / IMPORTED_CONFIG
    return read_object(file).get("model_type") if file.is_file() else None


def copy_companions(source: Path, target: Path, names: Iterable[str] = COMPANIONS) -> None:
    """Raises:
    UserError: One is no ordinary file, or is called .json and holds no JSON object.
    """
    for name in names:
        if os.path.lexists(source / name):
            if name.endswith(".json"):
                read_object(source / name)
            write_bytes(target / name, read_ordinary(source / name))


def write_tokenizer(run: Path, out: Path, *, block_size: int) -> None:
    """Write a run's tokenizer into an exported folder, so that `AutoTokenizer` gives the ids of training.

    An imported tokenizer keeps its companion files; BOS and EOS that were chosen for training replace theirs. Other
    tokenizers get a configuration that adds no ids to a text, treats the name of a special token in a text as text
    (`split_special_tokens`), and changes no spaces in decoding.
    """
    copy_companions(run, out, (TOKENIZER_FILE, *TOKENIZER_COMPANIONS))
    config = out / "tokenizer_config.json"
    imported = config.is_file()
    chosen = (run / DOCUMENT_IDS_FILE).is_file()
    if imported and not chosen:
        return
    tokenizer = load_tokenizer(run)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "split_special_tokens": not (run / CHAT_TEMPLATE_FILE).is_file(),  # a template writes them by name
        "clean_up_tokenization_spaces": False,
    }
    if imported:
        settings = read_object(config)
    tokens: dict[str, Any] = {}
    if tokenizer.eos_id is not None:
        tokens["eos_token"] = tokenizer.decode([tokenizer.eos_id])
        if not imported:
            tokens["bos_token"] = tokens["eos_token"]  # a document starts after the end of another, as in GPT-2
    if tokenizer.bos_id is not None:
        tokens["bos_token"] = tokenizer.decode([tokenizer.bos_id])
    write_json(settings | tokens, config)
    if (older := out / _SPECIAL_TOKENS).is_file():  # where older folders have it, it overrides the configuration
        write_json(read_object(older) | tokens, older)


def _generation(run: Path, eos_id: int | None) -> dict[str, Any]:
    file = run / GENERATION
    return read_object(file) if file.is_file() else {"bos_token_id": eos_id, "eos_token_id": eos_id}


def stop_ids(run: Path, *, eos_id: int | None) -> list[int]:
    """The ids at which generation stops. Arguments as in `add_stop_id`."""
    stops = _generation(run, eos_id).get("eos_token_id")  # an id or a list of ids
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


def add_stop_id(run: Path, token: int, *, eos_id: int | None) -> None:
    """Let generation with an exported model stop at ``token`` too: with a chat, at the end of an answer.

    Args:
        eos_id: the end of documents, for a run without an imported generation_config.json.
    """
    known = stop_ids(run, eos_id=eos_id)
    if token not in known:
        write_json(_generation(run, eos_id) | {"eos_token_id": [token, *known]}, run / GENERATION)


def write_generation_config(run: Path, out: Path, *, eos_id: int | None) -> dict[str, Any]:
    """Write generation_config.json (the imported one, if any). Returns its ids, which config.json repeats.

    Args:
        eos_id: of the model.
    """
    chosen, imported = (run / DOCUMENT_IDS_FILE).is_file(), (run / GENERATION).is_file()
    if imported and not chosen:
        copy_companions(run, out, (GENERATION,))
    content = _generation(run, eos_id)
    if chosen:
        tokenizer = load_tokenizer(run)
        if tokenizer.bos_id is not None:
            content["bos_token_id"] = tokenizer.bos_id
        if tokenizer.eos_id is not None and tokenizer.eos_id not in stop_ids(run, eos_id=eos_id):
            content["eos_token_id"] = tokenizer.eos_id
    if chosen or not imported:
        write_json(content, out / GENERATION)
    return {"bos_token_id": content.get("bos_token_id"), "eos_token_id": content.get("eos_token_id", eos_id)}
