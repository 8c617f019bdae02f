"""Range checks of optimizer options. The messages name the flag."""

from __future__ import annotations

import math

from lit_llm.core.errors import UserError


def check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value < math.inf:
            rule = "must be finite" if value == math.inf else "must not be negative"
            raise UserError(f"{name} is {value}, but {rule} (--optimizer.{name}).")


def check_below_one(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value < 1:
            raise UserError(f"{name} is {value}, but must be in [0, 1) (--optimizer.{name.split('[')[0]}).")
