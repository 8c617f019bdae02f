"""Command-line arguments before they are parsed: the shorthand `--run`, and which config files are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from lit_llm.cli.recipe_files import base_of, find_recipe
from lit_llm.data.tokenizer import TOKENIZER_FILE
from lit_llm.errors import UserError
from lit_llm.runs.run_folder import CONFIG, config_of


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Flag, value and the words they were given in; the value is None where none follows."""
    position = 0
    while position < len(arguments):
        key, equals, value = arguments[position].partition("=")
        takes_next = not equals and key in ("--run", "--config", "-c") and position + 1 < len(arguments)
        words = arguments[position : position + (2 if takes_next else 1)]
        position += len(words)
        yield key, words[1] if takes_next else value if equals else None, words


def expand_run(arguments: list[str]) -> list[str]:
    """`--run DIR` stands for the configuration of that run folder, wherever it has been moved to; `--config NAME` for the
    shipped recipe of that name where there is no such file. Flags may be written with dashes.

    Raises:
        UserError: no run folder.
    """
    expanded: list[str] = []
    for key, value, words in _pairs(arguments):
        if key == "--run":
            if value is None:
                raise UserError("--run needs a run folder, like --run runs/quickstart")
            expanded += ["--config", str(config_of(Path(value))), "--run_dir", value, *_own_tokenizer(Path(value))]
        elif key in ("--config", "-c") and value is not None:
            expanded += ["--config", str(find_recipe(value))]
        else:
            expanded += [words[0].replace(key, underscored(key), 1), *words[1:]]
    return expanded


def underscored(flag: str) -> str:
    """`--check-against` is `--check_against`: no key has a dash."""
    return "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag


def _own_tokenizer(run: Path) -> list[str]:
    """The run folder's copy of its tokenizer, where the file that the run was started with is gone."""
    try:
        config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
        path = config["data"]["init_args"]["tokenizer"]["init_args"]["path"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):  # none, or told by who parses the file
        return []
    if Path(path).exists() or not (run / TOKENIZER_FILE).is_file():
        return []
    return ["--data.tokenizer.path", str(run / TOKENIZER_FILE)]


def config_files_in(arguments: list[str]) -> list[str]:
    """The values of --config, in order."""
    return [value for key, value, _ in _pairs(arguments) if key in ("--config", "-c") and value is not None]


def with_bases(arguments: list[str]) -> list[str]:
    """Each config file after the one that its key `base` names.

    Raises:
        UserError: a base that is not there, or the key given as a flag.
    """
    expanded: list[str] = []
    for key, value, words in _pairs(arguments):
        if key == "--base":
            raise UserError("base is a key of recipe files; here, give its file first: --config BASE --config RECIPE (--base)")
        base = base_of(Path(value)) if key in ("--config", "-c") and value is not None else None
        expanded += words if base is None else ["--config", str(base), *words]
    return expanded
