"""Recipes as files: where they lie, what their headers say, and the base that one may stand on. No torch, no Lightning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_llm.errors import UserError

SHIPPED = Path(__file__).parents[1] / "recipes"
"""The collection, in a checkout and in an installed wheel alike."""


def find_recipe(name: str) -> Path:
    """The file that `--config` means: a YAML file of that path, else the recipe of that name (`x`, `x.yaml`, `recipes/x.yaml`).

    Recipes in the current folder's `recipes/`, copies of shipped ones perhaps, come before those of the collection. A name that
    is none of these is returned as it is: the parser says what is wrong with it.
    """
    here = Path(name)
    if here.suffix in (".yaml", ".yml", ".json") and here.is_file():
        return here
    return in_folder(Path("recipes"), name) or in_folder(SHIPPED, name) or here


def in_folder(folder: Path, name: str) -> Path | None:
    """The recipe of that name in a folder of recipes."""
    file = folder / f"{name.removeprefix('recipes/').removesuffix('.yaml')}.yaml"
    return file if file.is_file() and file.resolve().is_relative_to(folder.resolve()) else None


def base_of(recipe: Path) -> Path | None:
    """The file that a recipe's key `base` names, relative to the recipe; None without one, or where `recipe` holds no YAML.

    Raises:
        UserError: it does not exist, or has a base itself: a recipe should be read in two files at most.
    """
    named = _base_key(recipe)
    if named is None:
        return None
    base = recipe.parent / str(named)
    if not base.is_file():
        raise UserError(f"{recipe} stands on {named}, and there is no file {base} (base, in {recipe})")
    if _base_key(base) is not None:
        raise UserError(f"{base} is the base of {recipe} and has a base itself: a base stands alone (base, in {base})")
    return base


def _base_key(path: Path) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None  # told by who parses the file
    return content.get("base") if isinstance(content, dict) else None


@dataclass(frozen=True)
class Header:
    """The comment that opens a recipe: a title, then lines of a key, two or more spaces, a value."""

    title: str
    facts: dict[str, str]
    """By key; what follows a value after two or more spaces is left out."""

    @classmethod
    def of(cls, recipe: Path) -> Header:
        lines: list[str] = []
        with open(recipe, encoding="utf-8") as file:
            for line in file:
                if not line.startswith("#"):
                    break
                lines.append(line[1:].rstrip())
        facts: dict[str, str] = {}
        for line in lines[1:]:
            if found := re.match(r" (\w+(?: \w+)?) {2,}(.+?)(?: {2,}|$)", line):
                facts.setdefault(found[1], found[2])
        return cls(lines[0].strip() if lines else "", facts)

    @property
    def is_overlay(self) -> bool:
        """Overlays change a recipe and have no parameters of their own."""
        return "parameters" not in self.facts


def shipped() -> dict[str, Header]:
    """Every shipped recipe and overlay by name, such as `gpt2-124m` or `strategy/ddp`, smallest model first,
    those of any size after them, overlays last."""
    headers = {path.relative_to(SHIPPED).with_suffix("").as_posix(): Header.of(path) for path in SHIPPED.rglob("*.yaml")}
    headers = {name: header for name, header in headers.items() if not name.startswith("base/")}

    def order(item: tuple[str, Header]) -> tuple[bool, float, str]:
        name, header = item
        digits = re.sub(r"\D", "", header.facts.get("parameters", "").partition(" ")[0])
        return header.is_overlay, float(digits or "inf"), name

    return dict(sorted(headers.items(), key=order))
