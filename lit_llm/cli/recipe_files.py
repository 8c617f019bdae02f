"""Recipes as files: where they are, what their headers say, and which base they have. No torch, no Lightning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_llm.errors import UserError

SHIPPED = Path(__file__).parents[1] / "recipes"
"""The shipped recipes, in a checkout and in an installed wheel."""


def find_recipe(name: str) -> Path:
    """The file that `--config` names: a YAML file with that path, or a recipe's name (`x`, `x.yaml`, `recipes/x.yaml`).

    Recipes in `recipes/` of the current folder come before the shipped ones. Any other name is returned unchanged, and whoever
    reads the file reports it.
    """
    here = Path(name)
    if here.suffix in (".yaml", ".yml", ".json") and here.is_file():
        return here
    return in_folder(Path("recipes"), name) or in_folder(SHIPPED, name) or here


def in_folder(folder: Path, name: str) -> Path | None:
    """The recipe with that name in a folder of recipes; None if there is none."""
    file = folder / f"{name.removeprefix('recipes/').removesuffix('.yaml')}.yaml"
    return file if file.is_file() and file.resolve().is_relative_to(folder.resolve()) else None


def base_of(recipe: Path) -> Path | None:
    """The file that a recipe's key `base` names, relative to the recipe; None without that key, or if `recipe` is not YAML.

    Raises:
        UserError: The base does not exist, or has a base itself. A reader should need two files at most.
    """
    named = _base_key(recipe)
    if named is None:
        return None
    base = recipe.parent / str(named)
    if not base.is_file():
        raise UserError(f"base recipe not found: {base} (base: {named}, in {recipe})")
    if _base_key(base) is not None:
        raise UserError(f"{base} is the base of {recipe}, so it must not have a base itself (base, in {base})")
    return base


def _base_key(path: Path) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None  # reported by whoever reads the file
    return content.get("base") if isinstance(content, dict) else None


@dataclass(frozen=True)
class Header:
    """The comment at the top of a recipe: a title, then lines with a key, two or more spaces, and a value."""

    title: str
    facts: dict[str, str]
    """Values by key. Text behind two or more spaces after a value is left out."""

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
        """Whether this changes other recipes instead of describing a model, so that it states no parameter count."""
        return "parameters" not in self.facts


def shipped() -> dict[str, Header]:
    """Headers of every shipped recipe and overlay by name, such as `gpt2-124m` or `strategy/ddp`.

    The smallest model comes first. Recipes for any size follow, then overlays.
    """
    headers = {path.relative_to(SHIPPED).with_suffix("").as_posix(): Header.of(path) for path in SHIPPED.rglob("*.yaml")}
    headers = {name: header for name, header in headers.items() if not name.startswith("base/")}

    def order(item: tuple[str, Header]) -> tuple[bool, float, str]:
        name, header = item
        digits = re.sub(r"\D", "", header.facts.get("parameters", "").partition(" ")[0])
        return header.is_overlay, float(digits or "inf"), name

    return dict(sorted(headers.items(), key=order))
