"""The argument names of a class, read from its source without importing it. Importing torch and Lightning takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_OURS = Path(__file__).parents[1]


def arguments_of(class_path: str) -> set[str] | None:
    """Names of the arguments of a class of lit_llm or Lightning; None if its source does not tell them all.

    Follows re-exports, base classes and `**kwargs`. May contain arguments of base classes that the class does not accept.
    """
    module, _, name = class_path.rpartition(".")
    return _arguments(module, name)


@cache
def _arguments(module: str, name: str) -> set[str] | None:
    tree = _tree(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _arguments_of_class(module, node)
    origin = _imported_from(module, tree, name)
    return None if origin is None else _arguments(*origin)


def _arguments_of_class(module: str, node: ast.ClassDef) -> set[str] | None:
    found: set[str] = set()
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        arguments = init.args
        found = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]} - {"self"}
        if arguments.kwarg is None:
            return found
    elif any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        found = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    for base in node.bases:
        if not isinstance(base, ast.Name):
            return None
        if base.id in ("ABC", "object"):
            continue
        inherited = _arguments(module, base.id)
        if inherited is None:
            return None
        found |= inherited
    return found


def _imported_from(module: str, tree: ast.Module, name: str) -> tuple[str, str] | None:
    """The module that `name` is imported from, and its name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in (name, "*"):
                    if not node.level:
                        return node.module or "", name if alias.name == "*" else alias.name
                    file = _file(module)
                    depth = node.level - (file is not None and file.name == "__init__.py")
                    package = ".".join(module.split(".")[: -depth or None])
                    return (f"{package}.{node.module}" if node.module else package), name if alias.name == "*" else alias.name
    return None


@cache
def _tree(module: str) -> ast.Module | None:
    file = _file(module)
    try:
        return None if file is None else ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _file(module: str) -> Path | None:
    """The source file of a module, found without importing its package."""
    top, _, rest = module.partition(".")
    if top == "lit_llm":
        folder = _OURS
    elif top == "lightning":
        spec = importlib.util.find_spec(top)  # imports nothing: it is a top-level name
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    else:
        return None
    path = folder.joinpath(*rest.split(".")) if rest else folder
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
