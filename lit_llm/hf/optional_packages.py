"""The optional package that this folder needs, asked for when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from lit_llm.errors import UserError


def safetensors() -> Any:
    """The module `safetensors`.

    Raises:
        UserError: it is not installed; says what installs it.
    """
    try:
        importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise UserError("Hugging Face folders need the package safetensors: pip install safetensors") from None
    return importlib.import_module("safetensors")
