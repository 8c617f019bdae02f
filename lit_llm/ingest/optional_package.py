"""Import a package that only some formats need."""

from __future__ import annotations

import importlib
from types import ModuleType

from lit_llm.core.errors import UserError


def need(module: str, *, extra: str, what: str) -> ModuleType:
    """Import ``module``.

    Args:
        extra: the extra of lit_llm that installs its package.
        what: what needs it, as the subject of a sentence: "Parquet".

    Raises:
        UserError: The package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # a package that is installed but incomplete keeps its traceback
            raise
        raise UserError(f"{what} needs the package {package}: pip install 'lit_llm[{extra}]'.") from error
