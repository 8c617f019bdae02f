"""The optional package that this folder needs, asked for when it is used."""

from __future__ import annotations

import importlib
from typing import Any


def safetensors() -> Any:
    """The module `safetensors`.

    Raises:
        ValueError: it is not installed; says what installs it.
    """
    try:
        importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise ValueError("Hugging Face folders need the package safetensors: pip install safetensors") from None
    return importlib.import_module("safetensors")
