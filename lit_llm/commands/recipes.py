"""`python -m lit_llm recipes`: list, show, compare and copy the shipped recipes."""

from __future__ import annotations

import json
import os
import re
import shlex
from functools import partial
from pathlib import Path

from lit_llm.commands.new_output import new_file
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config import spelling
from lit_llm.config.arguments import leaves, read
from lit_llm.config.recipe_files import SHIPPED, Header, base_of, find_recipe, hint_for, in_folder, shipped
from lit_llm.core.disk import real_path, set_aside
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import as_flag, comment, read_yaml
from lit_llm.runs.run_folder import expanded

FACTS = ("parameters", "tokens", "fits on")
CALLBACKS = SHIPPED.parent / "callbacks"
_SIBLING = re.compile(r"^\s*from \.(\w+) import", re.M)


def _parsers() -> tuple[OwnFlags, dict[str, OwnFlags]]:
    """Return (parser of the command `recipes`, {name of a subcommand: its parser})."""
    parser = OwnFlags("recipes", alone=True, description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_parser = partial(commands.add_parser, alone=True)
    add = add_parser(
        "list", help="print name, parameters, tokens, smallest hardware and title of each recipe (default command)"
    )
    add.add_argument("--json", type=bool, help="print JSON")
    add = add_parser("show", help="print every setting of one recipe, as runnable YAML")
    add.add_argument("recipe", help="a name from the list, or a file")
    add = add_parser("diff", help="print the settings that differ between two recipes")
    add.add_argument("recipes", nargs=2, metavar="RECIPE", help="a name from the list, or a file")
    add = add_parser("copy", help="copy a recipe, its base and all overlays to DIR/recipes")
    add.add_argument("recipe", help="a name from the list")
    add.add_argument("dir", type=Path, metavar="DIR", help="folder of your project")
    add.add_argument("--callbacks", metavar="NAME", help="also copy the callbacks to DIR/NAME, to import them in your code")
    add.add_argument("--only", metavar="NAMES", help="of the callbacks only these and what they import: WSD,GradientNorm")
    add.add_argument("--replace", type=bool, help="rename recipes that differ to <name>.1")
    return parser, commands.choices


def main(arguments: list[str]) -> int:
    """Run the command `recipes` with its arguments; return the exit code."""
    parser, commands = _parsers()
    own, rest = parser.parse_known_args(arguments or ["list"])
    if own.command != "show":
        commands.get(own.command, parser).refuse_unknown(rest)
    if own.command == "list":
        print(json.dumps(table(), indent=2) if own.json else _list(), end="" if not own.json else "\n")
    elif own.command == "show":
        shown = spelling.check("fit", read(["--config", str(_known(own.recipe)), *rest]))
        from lit_llm.config.resolve import resolved  # imports torch

        text = resolved(shown)
        weights = read_yaml(text).get("init_from")
        if weights is not None and expanded(weights).exists():
            print(comment(f"The model and the tokenizer are those of {weights}, which is here (init_from)."), end="")
        print(text, end="")
    elif own.command == "diff":
        _diff(*own.recipes)
    else:
        _copy(own.recipe, own.dir, callbacks=own.callbacks, only=own.only, replace=own.replace)
    return 0


def _known(name: str) -> Path:
    path = find_recipe(name)
    if not path.is_file():
        raise UserError(f"recipe not found: {name}{hint_for(name)} (python -m lit_llm recipes lists them)")
    return path


def table() -> list[dict[str, str]]:
    """Return a dict for each shipped recipe: its name, its title, and facts of its header (`FACTS`). Overlays are left out."""
    return [
        {
            "name": name,
            **{key: header.facts.get(key, "?") for key in FACTS},
            "title": header.title,
        }
        for name, header in shipped().items()
        if not header.is_overlay
    ]


def _list() -> str:
    columns = ("name", *FACTS, "title")
    rows = [dict(zip(columns, columns, strict=True)), *table()]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    text = ""
    for row in rows:
        name, parameters, tokens, fits, title = (row[column] for column in columns)
        text += f"{name:<{widths[0]}}  {parameters:>{widths[1]}}  {tokens:>{widths[2]}}  {fits:<{widths[3]}}  {title}\n"
    overlays = [name for name, header in shipped().items() if header.is_overlay]
    return f"{text}\noverlays: {', '.join(overlays)}\n"


def _diff(one: str, other: str) -> None:
    from lit_llm.config.resolve import resolved
    from lit_llm.reporting.plan_text import table_rows

    paths = [_known(name) for name in (one, other)]
    if real_path(paths[0]) == real_path(paths[1]):  # a project has a copy: then the bare name means the shipped recipe
        names = (None if name.endswith(".yaml") else in_folder(SHIPPED, name) for name in (one, other))
        paths = [name or path for name, path in zip(names, paths, strict=True)]
    a, b = (dict(leaves(read_yaml(resolved(["--config", str(path)])))) for path in paths)
    groups = list(dict.fromkeys(key.partition(".")[0] for key in [*a, *b]))
    keys = sorted(dict.fromkeys([*a, *b]), key=lambda key: groups.index(key.partition(".")[0]))
    settings = [(key, a.get(key, "–"), b.get(key, "–")) for key in keys]
    rows = [(key, as_flag(old), as_flag(new)) for key, old, new in settings if old != new]
    print(table_rows(("", one, other), rows, as_markdown=False), end="")


def _copy(name: str, project: Path, *, callbacks: str | None, only: str | None, replace: bool) -> None:
    if only is not None and callbacks is None:
        raise UserError("--only names callbacks, but none are copied: name the folder for them (--callbacks NAME)")
    recipe = in_folder(SHIPPED, name)
    if recipe is None:
        yours = _known(name)
        raise UserError(f"{yours} is not a shipped recipe: only those can be copied (python -m lit_llm recipes lists them)")
    if Header.of(recipe).is_overlay:
        raise UserError(f"{name} is an overlay: copy a recipe instead, which includes all overlays (python -m lit_llm recipes)")
    base = base_of(recipe)
    overlays = [SHIPPED / f"{overlay}.yaml" for overlay, header in shipped().items() if header.is_overlay]
    sources = [path for path in (recipe, base, *overlays) if path is not None]
    files = {project / "recipes" / path.relative_to(SHIPPED): path.read_bytes() for path in sources}
    if project.exists() and not project.is_dir():
        raise UserError(f"{project} is a file: give a folder to copy into (DIR)")
    changed = [to for to, content in files.items() if os.path.lexists(to) and not _holds(to, content)]
    if callbacks is not None:
        folder = project / callbacks
        ours = {folder / name: content for name, content in _callback_files(only).items()}
        there = sorted(folder.iterdir()) if folder.is_dir() else []
        if others := [path for path in there if path.name != "__pycache__" and not (path in ours and _holds(path, ours[path]))]:
            raise UserError(
                f"{others[0]} is not a copy of lit_llm's, so nothing was copied: name another folder (--callbacks NAME)"
            )
        files |= ours
    if changed and not replace:
        raise UserError(
            f"{', '.join(map(str, changed))} {'exists' if len(changed) == 1 else 'exist'} already, so nothing was copied: give "
            "another folder (DIR), or replace with --replace true"
        )
    for to in changed:
        if aside := set_aside(to):
            print(f"Renamed {to} to {aside.name}.")
    for to, content in files.items():
        with new_file(to, replace=True, flag="DIR") as new:
            new.write_bytes(content)
    print(f"Copied {len(files)} files to {project}. Run the recipe there:\n\n  cd {shlex.quote(str(project))}")
    print(f"  python -m lit_llm fit --config recipes/{recipe.relative_to(SHIPPED)}")


def _callback_files(only: str | None) -> dict[str, bytes]:
    """Return {file name: content} for files of the folder `callbacks`.

    Args:
        only: names of callbacks, separated by commas: take only the files that define them, the files that those import, and
            an `exports.py` with these names. None: take every file.

    Raises:
        UserError: A name in `only` is unknown.
    """
    texts = {path.name: path.read_text() for path in sorted(CALLBACKS.glob("*.py"))}
    if only is not None:
        lines = {line.split()[-1]: line for line in texts["exports.py"].splitlines() if line.startswith("from")}
        names = list(filter(None, re.split(r"[,\s]+", only)))
        if unknown := [name for name in names or [only] if name not in lines]:
            raise UserError(f"there is no callback {unknown[0]}: known are {', '.join(lines)} (--only)")
        texts["exports.py"] = "\n".join(['"""The public names of the folder."""', "", *(lines[name] for name in names), ""])
        needed = ["__init__.py", "exports.py"]
        for name in needed:  # the loop adds names
            needed += {f"{module}.py" for module in _SIBLING.findall(texts[name])} - {*needed}
        texts = {name: texts[name] for name in needed}
    return {name: text.encode() for name, text in texts.items()}


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
