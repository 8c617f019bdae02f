"""A quick start for a command that trains nothing: most of its time went into imports that it never uses."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Later:
    """A class of transformers, which is imported when something of the class is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(getattr(importlib.import_module("transformers"), self._name), attribute)


def import_lightning() -> None:
    """Import Lightning, but not yet Hugging Face's transformers, which torchmetrics would import for one of its metrics."""
    spec = None if "transformers" in sys.modules else importlib.util.find_spec("transformers")
    if spec is None:
        return
    names = ModuleType("transformers")
    names.__spec__ = spec
    names.__dict__.update({name: _Later(name) for name in ("AutoModel", "AutoTokenizer")})
    sys.modules["transformers"] = names
    try:
        importlib.import_module("lightning.pytorch")
    finally:
        del sys.modules["transformers"]
