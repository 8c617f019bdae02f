"""Finds private names of other packages in our source, by reading it: `python tests/contracts/private_names.py`.

Private is a name with one leading underscore that no file of ours defines: as an attribute, an import, or a part of an imported
module's path. Attributes that only look private (`os._exit` is documented) are listed in PUBLIC.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PUBLIC = {"_fields", "_asdict", "_replace", "_make", "_exit", "_current_frames"}  # of namedtuple, os and sys: documented


class Use(NamedTuple):
    path: str
    line: int
    name: str  # `_x`, or the module and name of an import
    imported: bool


def sources() -> list[Path]:
    folders = [ROOT / "callbacks", *(p for p in sorted((ROOT / "lit_llm").iterdir()) if p.is_dir() and not p.is_symlink())]
    return sorted([*(ROOT / "lit_llm").glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a file defines: functions, classes, variables, and attributes set on self, cls or a new object."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            yield node.attr


def is_foreign(node: ast.Attribute) -> bool:
    """Whether an attribute is another package's although we define one of its name: `super()._x`."""
    return ast.unparse(node.value) == "super()"


def uses(path: Path, ours: set[str]) -> Iterator[Use]:
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and (is_foreign(node) or node.attr not in ours | PUBLIC):
            yield Use(name, node.lineno, node.attr, False)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module and not node.module.startswith("lit_llm"):
            for alias in node.names:
                if any(is_private(part) for part in (*node.module.split("."), alias.name)):
                    yield Use(name, node.lineno, f"{node.module}.{alias.name}", True)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(is_private(part) for part in alias.name.split(".")):
                    yield Use(name, node.lineno, alias.name, True)


def found() -> list[Use]:
    ours = {name for path in sources() for name in defined(ast.parse(path.read_text())) if is_private(name)}
    return [use for path in sources() for use in uses(path, ours)]


if __name__ == "__main__":
    everything = found()
    for use in everything:
        print(f"{use.path}:{use.line}: {use.name}")
    print(
        f"{len(everything)} uses of {len({use.name for use in everything})} names"
        f" in {len({use.path for use in everything})} files"
    )
    for path, count in Counter(use.path for use in everything).most_common():
        print(f"{count:4} {path}")
    sys.exit(0)
