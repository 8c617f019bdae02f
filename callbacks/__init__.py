"""Lightning callbacks for pretraining, and one logger. Each file has one concern.

This folder can be copied into another project, under any name: it imports only torch, lightning, numpy and itself, and
lm_eval if a run names one of its tasks. The docstring of a callback lists what it logs and what it does in each hook. The
x-axis of every row is the number of optimizer steps made. Rows are written at step 1 and at multiples of
`Trainer(log_every_n_steps)`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exports import *  # noqa: F403


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        """Import all public names when one is first used, so that `errors` and `files` can be imported without Lightning."""
        if find_spec(f"{__name__}.{name}"):  # `from callbacks import errors` asks for the name before it imports the file
            raise AttributeError(name)
        public = {name: thing for name, thing in vars(import_module(f"{__name__}.exports")).items() if name[0] != "_"}
        globals().update(public, __all__=list(public))
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
