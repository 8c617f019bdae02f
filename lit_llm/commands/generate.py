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
from lit_llm.commands.text_model import TextModel, add_flags, for_output
from lit_llm.core.disk import naming, read_text
from lit_llm.core.errors import UserError, refuse, report
from lit_llm.core.number_domain import whole

_BATCH = 16


def own_flags() -> OwnFlags:
    flags = OwnFlags("generate", alone=True, description="Continue a prompt, or many, with a trained model.")
    add_flags(flags, max_new_tokens=200, most_help="maximum number of new tokens")
    flags.add_argument("--prompt", help="text to continue; without it, a new document")
    flags.add_argument(
        "--prompts",
        type=Path,
        help='file with a prompt a line, or of lines {"prompt": "…"} if its name ends in .jsonl, .ndjson or .json. Writes '
        'JSONL: the same, with "completion"',
    )
    flags.add_argument(
        "--batch_size", range=whole(1, 10**6), help=f"prompts that are continued at once; if not given, {_BATCH}"
    )
    flags.add_argument("--out", type=Path, help="file for the completions of --prompts; without it, standard output")
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    flags.add_argument(
        "--chat",
        type=bool,
        help="a prompt is a user's message: write it as the run's chat template does, and print the answer",
    )
    return flags


def main(arguments: list[str]) -> int:
    """Print the continuation of a prompt, or write those of the prompts in the file of --prompts; return the exit code 0."""
    options = own_flags().parse(arguments)
    if options.prompts is not None:
        return _complete(options)
    given = [name for name in ("out", "batch_size", "replace") if getattr(options, name)]
    refuse(f"{name} is for a file of prompts: add --prompts FILE, or remove --{name}" for name in given)
    model = TextModel.of(options, chat=options.chat)
    (ids,) = _all_ids(model, {"the prompt (--prompt)": options.prompt or ""})
    model.load()
    print("" if options.chat else for_output(options.prompt or ""), end="")
    for piece in model.pieces(ids, most=options.max_new_tokens):
        print(for_output(piece), end="", flush=True)
    print()
    return 0


def _complete(options: argparse.Namespace) -> int:
    """Write the completions of all prompts in the file of --prompts, batch by batch; return the exit code."""
    if options.prompt is not None:
        raise UserError("there is a prompt and a file of prompts: remove --prompt or --prompts")
    if options.replace and options.out is None:
        raise UserError("replace is for a file of completions: add --out FILE, or remove --replace")
    lines, size = read_prompts(options.prompts), options.batch_size or _BATCH
    records = list(lines.values())
    model = TextModel.of(options, chat=options.chat)
    prompts = _all_ids(model, {f"{options.prompts} line {line}": one["prompt"] for line, one in lines.items()})
    with new_file_if(options.out, replace=options.replace, flag="--out") as path:
        model.load()
        with contextlib.nullcontext(sys.stdout) if path is None else open(path, "w", encoding="utf-8") as file:
            for first in range(0, len(records), size):
                tokens: dict[int, list[int]] = {}
                for row, token in model.continued(prompts[first : first + size], most=options.max_new_tokens, first=first):
                    tokens.setdefault(row, []).append(token)
                with naming(options.out or "standard output"):
                    for row, record in enumerate(records[first : first + size]):
                        completion = {"completion": model.tokenizer.decode(tokens.get(row, []))}
                        file.write(for_output(json.dumps(record | completion, ensure_ascii=False), file) + "\n")
                    file.flush()
    return 0


def _all_ids(model: TextModel, prompts: dict[str, str]) -> list[list[int]]:
    """Return the token ids of each prompt; print a note on each that will be cut. `prompts`: {name in notes: text}."""
    texts, block = {where: model.prompt_ids(prompt, where=where) for where, prompt in prompts.items()}, model.config.block_size
    cut = [f"{name} is cut to the last {block:,} of its {len(ids):,} tokens" for name, ids in texts.items() if len(ids) > block]
    report("\n".join(cut), kind="note")
    return list(texts.values())


def read_prompts(file: Path) -> dict[int, dict[str, Any]]:
    """Return {line number: object with the key "prompt"} of a file of prompts: JSONL, or text with a prompt in each line.

    Raises:
        UserError: The file cannot be read or has no prompts; or a line of JSONL has no "prompt", or has a "completion" or NaN.
    """
    content, records = read_text(file, mend=" (--prompts)"), dict[int, dict[str, Any]]()
    for number, line in enumerate(content.removesuffix("\n").split("\n") if content else [], start=1):
        if file.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
            records[number] = {"prompt": line.removesuffix("\r")}
        elif line.strip():
            try:
                record = json.loads(line)
                json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # a half of a character is no text
                assert isinstance(record["prompt"], str)
            except (ValueError, RecursionError, TypeError, KeyError, AssertionError):
                wanted = 'an object with a text as "prompt", and without NaN or an infinite number'
                raise UserError(f"{file} line {number} must be {wanted} (--prompts)") from None
            if "completion" in record:
                raise UserError(f'{file} line {number} has a "completion", which would be lost: rename that key (--prompts)')
            records[number] = record
    if not records:
        raise UserError(f"{file} has no prompts (--prompts)")
    return records
