"""`python -m lit_llm generate`: generate text with the model of a run folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from lit_llm.commands.new_output import REPLACE_HELP, new_file_if
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.commands.text_model import TextModel, add_flags
from lit_llm.core.disk import naming, read_text
from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import whole


def own_flags() -> OwnFlags:
    flags = OwnFlags("generate", alone=True, description="Continue a prompt, or many, with a trained model.")
    add_flags(flags, max_new_tokens=200, most_help="maximum number of new tokens")
    flags.add_argument("--prompt", default=None, help="text to continue; without it, a new document")
    flags.add_argument(
        "--prompts",
        type=Path,
        help='file with a prompt a line, or of lines {"prompt": "…"} if its name ends in .jsonl. Writes JSONL: the same, with '
        '"completion"',
    )
    flags.add_argument("--batch_size", range=whole(1, 10**6), default=16, help="prompts that are continued at once")
    flags.add_argument("--out", type=Path, help="file for the completions of --prompts; without it, standard output")
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    flags.add_argument(
        "--chat",
        type=bool,
        help="a prompt is a user's message: write it as the run's chat template does, and print the answer",
    )
    return flags


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation, token by token. Of a chat, only the answer. Of many prompts, JSONL."""
    options = own_flags().parse(arguments)
    if options.prompts is not None:
        return _complete(options)
    if options.out is not None:
        raise UserError("out is for the completions of a file of prompts: add --prompts FILE, or remove --out")
    model = TextModel.of(options, chat=options.chat)
    ids = model.prompt_ids(options.prompt or "")
    model.load()
    print("" if options.chat else options.prompt or "", end="")
    for piece in model.pieces(ids, most=options.max_new_tokens):
        print(piece, end="", flush=True)
    print()
    return 0


def _complete(options: argparse.Namespace) -> int:
    """Write the completions of a file of prompts, batch by batch."""
    if options.prompt is not None:
        raise UserError("there is a prompt and a file of prompts: remove --prompt or --prompts")
    records, size = read_prompts(options.prompts), options.batch_size
    model = TextModel.of(options, chat=options.chat)
    prompts = [model.prompt_ids(one["prompt"], where=f"prompt {i} of {options.prompts}") for i, one in enumerate(records, 1)]
    with new_file_if(options.out, replace=options.replace, flag="--out") as path:
        model.load()
        with contextlib.nullcontext(sys.stdout) if path is None else open(path, "w", encoding="utf-8") as file:
            for first in range(0, len(records), size):
                found: dict[int, list[int]] = {}
                for row, token in model.continued(prompts[first : first + size], most=options.max_new_tokens, first=first):
                    found.setdefault(row, []).append(token)
                with naming(options.out or "standard output"):
                    for row, record in enumerate(records[first : first + size]):
                        completion = {"completion": model.tokenizer.decode(found.get(row, []))}
                        file.write(json.dumps(record | completion, ensure_ascii=False) + "\n")
                    file.flush()
    return 0


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of prompts, each with the key "prompt". In plain text an empty line is an empty prompt.

    Raises:
        UserError: The file cannot be read, has no prompts, or a line of JSONL has none.
    """
    content, records = read_text(file, 2**30, mend=" (--prompts)"), []
    for number, line in enumerate(content.removesuffix("\n").split("\n") if content else [], start=1):
        if file.suffix != ".jsonl":
            records.append({"prompt": line.removesuffix("\r")})
        elif line.strip():
            try:
                record = json.loads(line)
                json.dumps(record, ensure_ascii=False).encode()  # a half of a character is no text
                assert isinstance(record["prompt"], str)
            except (ValueError, RecursionError, TypeError, KeyError, AssertionError):
                raise UserError(f'{file} line {number} must be an object with a text as "prompt" (--prompts)') from None
            records.append(record)
    if not records:
        raise UserError(f"{file} has no prompts (--prompts)")
    return records
