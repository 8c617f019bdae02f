"""The tokenizer and generation files of Hugging Face folders and run folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lit_llm.hf.read import read_json
from lit_llm.hf.write import write_json
from lit_llm.tokenizers import TOKENIZER_FILE, load_tokenizer

GENERATION = "generation_config.json"
COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", GENERATION),
)
"""Files next to tokenizer.json in an imported folder. A run folder keeps them, so that export writes them unchanged."""


def copy_companions(source: Path, target: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_tokenizer(run: Path, out: Path, *, block_size: int) -> None:
    """Write a run's tokenizer into an exported folder, so that `AutoTokenizer` gives the ids of training.

    An imported tokenizer keeps its companion files. Other tokenizers get a configuration that adds no ids to a text, treats
    the name of a special token in a text as text (`split_special_tokens`), and changes no spaces in decoding.
    """
    shutil.copyfile(run / TOKENIZER_FILE, out / TOKENIZER_FILE)
    copy_companions(run, out)
    if (out / "tokenizer_config.json").is_file():
        return
    tokenizer = load_tokenizer(run)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eos_id is not None:
        end = tokenizer.decode([tokenizer.eos_id])
        settings |= {"bos_token": end, "eos_token": end}  # a document starts after the end of another, as in GPT-2
    write_json(settings, out / "tokenizer_config.json")


def write_generation_config(run: Path, out: Path, *, eos_id: int | None) -> dict[str, Any]:
    """Write generation_config.json (the imported one, if any). Returns its ids, which config.json repeats."""
    if (run / GENERATION).is_file():
        shutil.copyfile(run / GENERATION, out / GENERATION)
    else:
        write_json({"bos_token_id": eos_id, "eos_token_id": eos_id}, out / GENERATION)
    content = read_json(out / GENERATION)
    return {"bos_token_id": content.get("bos_token_id"), "eos_token_id": content.get("eos_token_id", eos_id)}
