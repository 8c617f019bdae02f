"""Import the optional package of this folder when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from lit_llm.core.errors import UserError


def safetensors() -> Any:
    """The module `safetensors`.

    Raises:
        UserError: it is not installed. The message has the pip command.
    """
    try:
        importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise UserError("Hugging Face folders need the package safetensors: pip install safetensors") from None
    return importlib.import_module("safetensors")
