"""Recipes for training language models with PyTorch Lightning.

`load_recipe`, `fit`, `TrainedModel` and `Sampling` are imported from `lit_llm.api` on first use, and `callbacks` likewise,
so that `import lit_llm` alone needs no torch and no Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_llm import callbacks
    from lit_llm.api import Sampling, TrainedModel, fit, load_recipe

__all__ = ["Sampling", "TrainedModel", "callbacks", "fit", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return import_module("lit_llm.callbacks")
    if name in __all__:
        return getattr(import_module("lit_llm.api"), name)
    raise AttributeError(f"module 'lit_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
