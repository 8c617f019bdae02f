"""Find recipe files, and read their settings, headers and bases. This module imports neither torch nor Lightning."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_llm.core.disk import real_path
from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import InvalidYaml, read_yaml_file
from lit_llm.runs.run_folder import CONFIG, default_run_dir

SHIPPED = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes that are part of lit_llm, in a checkout and in an installed wheel."""


def find_recipe(name: str) -> Path:
    """Return the file for a value of `--config`: an existing YAML file, or a recipe's name (`x`, `x.yaml`, `recipes/x.yaml`).

    Recipes in `recipes/` of the current folder come before lit_llm's recipes. If no file is found, return `name` as a path,
    whose reader reports the error.
    """
    here = Path(name)
    if here.suffix in (".yaml", ".yml", ".json") and os.path.isfile(here):
        return here
    return in_folder(Path("recipes"), name) or in_folder(SHIPPED, name) or here


def in_folder(folder: Path, name: str) -> Path | None:
    """Return the file of the recipe `name` in the folder `folder`; None if the folder has no such recipe."""
    file = folder / f"{name.removeprefix('recipes/').removesuffix('.yaml')}.yaml"
    return file if os.path.isfile(file) and real_path(file).is_relative_to(real_path(folder)) else None


def content_of(recipe: Path) -> dict[str, Any]:
    """Return the content of a recipe file: its settings, and the key `base` if it has one.

    Raises:
        UserError: The file cannot be read, is not YAML, or has no settings.
    """
    try:
        content = read_yaml_file(recipe)
    except InvalidYaml as error:
        raise UserError(f"config file {recipe} {error} (--config)") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"config file {str(recipe)[:200]} cannot be read: {why}{_hint(recipe)} (--config)") from None
    if not isinstance(content, dict):
        raise UserError(f"config file {recipe} has no settings; write `key: value` lines (--config)")
    return content


def _hint(recipe: Path) -> str:
    return hint_for(recipe.name.removesuffix(".yaml")) or "; `python -m lit_llm recipes` lists the shipped ones"


def hint_for(name: str) -> str:
    """Return the end of an error's sentence, "; did you mean X?", for an unknown recipe name. X is a recipe of a
    similar family and the same size; else X are up to four of the same family; else the most similar name. "" without any.
    """
    headers = shipped()
    family, _, size = name.partition("-")
    sized = [
        each for each, header in headers.items() if size and (each.endswith(f"-{size}") or f'"{size}"' in header.title.lower())
    ]
    families = {each.partition("-")[0]: each for each in reversed(sized)}
    near = [families[each] for each in difflib.get_close_matches(family, families, n=1)]
    for start in (name.replace("-", ""), family):  # gpt-2 is gpt2
        near = near or [each for each in headers if start and each.replace("-", "").startswith(start)][:4]
    stems = {Path(each).stem: each for each in headers}
    near = near or [stems[each] for each in difflib.get_close_matches(name, stems, n=1)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def with_base(recipe: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return [(file, settings)] of the base that a recipe names, if any, and of the recipe, whose settings override the base's.

    The key `base` is a path relative to the recipe, or else a name as in `--config`.

    Raises:
        UserError: A file cannot be read, or the base has a base itself, which is refused so that two files explain a recipe.
    """
    content = content_of(recipe)
    named = content.pop("base", None)
    if named is None:
        return [(recipe, content)]
    if not isinstance(named, str):
        raise UserError(f"base is {named!r}, but must be the name of a recipe (base, in {recipe})")
    base = recipe.parent / named
    if not os.path.isfile(base) and not os.path.isfile(base := find_recipe(named)):
        raise UserError(f"base recipe not found: {recipe.parent / named} (base: {named}, in {recipe}){_hint(base)}")
    settings = content_of(base)
    if "base" in settings:
        raise UserError(f"{base} is the base of {recipe}, so it must not have a base itself (base, in {base})")
    return [(base, settings), (recipe, content)]


def base_of(recipe: Path) -> Path | None:
    """Return the file of the base that a recipe names; None if the recipe names no base.

    Raises:
        UserError: A file cannot be read, or the base has a base itself.
    """
    files = with_base(recipe)
    return files[0][0] if len(files) == 2 else None


@dataclass(frozen=True)
class Header:
    """Record of the comment at the top of a recipe: a title, then lines with a key, two or more spaces, and a value."""

    title: str
    facts: dict[str, str]
    """{key: value} of the header's lines. Text that follows a value after two or more spaces is left out."""

    @classmethod
    def of(cls, recipe: Path) -> Header:
        """Read the header of a recipe file; without a comment at the top, the title is "" and `facts` is empty."""
        lines: list[str] = []
        with open(recipe, encoding="utf-8") as file:
            for line in file:
                if not line.startswith("#"):
                    break
                lines.append(line[1:].rstrip())
        facts: dict[str, str] = {}
        for line in lines[1:]:
            if fact := re.match(r" (\w+(?: \w+)?) {2,}(.+?)(?: {2,}|$)", line):
                facts.setdefault(fact[1], fact[2])
        return cls(lines[0].strip() if lines else "", facts)

    @property
    def is_overlay(self) -> bool:
        """Whether the file is an overlay, which changes settings of other recipes: its header has no number of parameters."""
        return "parameters" not in self.facts


def shipped() -> dict[str, Header]:
    """Return {name: header} of every recipe and overlay of lit_llm, with names such as `gpt2-124m` or `strategy/ddp`.

    The smallest model comes first. Recipes without a fixed size follow, then overlays.
    """
    headers = {path.relative_to(SHIPPED).with_suffix("").as_posix(): Header.of(path) for path in SHIPPED.rglob("*.yaml")}
    headers = {name: header for name, header in headers.items() if not name.startswith("base/")}

    def order(item: tuple[str, Header]) -> tuple[bool, float, str]:
        name, header = item
        digits = re.sub(r"\D", "", header.facts.get("parameters", "").partition(" ")[0])
        return header.is_overlay, float(digits or "inf"), name

    return dict(sorted(headers.items(), key=order))


def reference_curve(named: str, config_files: list[str]) -> Path:
    """Return the file of the recorded loss curve for a value of `--check_against`: a path, or "auto" for lit_llm's curve of the
    first recipe in `config_files`.

    Raises:
        UserError: lit_llm has no curve of the recipe.
    """
    if named != "auto":
        return Path(named)
    first = Path(config_files[0]) if config_files else Path()
    # For the config.yaml of a run folder, the folder's name is the recipe's name.
    recipe = first.absolute().parent.name if first.name == CONFIG else default_run_dir(config_files).name
    path = SHIPPED / "evidence" / f"{recipe}.csv"
    if not path.is_file():
        available = ", ".join(sorted(each.stem for each in path.parent.glob("*.csv")))
        raise UserError(f"no curve is shipped for {recipe}, only for {available} (--check_against FILE)")
    return path
