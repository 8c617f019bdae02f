"""A worker process: takes tasks from a pipe, and answers with reports and results.

``workers.py`` starts it with ``python -c``. A fresh process imports no torch and inherits no thread, so it is small. It ends
when its parent does, because the pipe breaks.
"""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from lit_llm.core.errors import UserError


class Progress(NamedTuple):
    """Bytes of sources and of text that were read since the last message."""

    source: int
    text: int


class Done(NamedTuple):
    result: Any


class Failed(NamedTuple):
    """The task raised ``error``. ``trace`` is the traceback of an error that is not the user's."""

    error: Exception
    trace: str = ""


def main(descriptor: int) -> None:
    """Run tasks until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends its workers
    pipe = Connection(descriptor)

    def send(message: object) -> None:
        try:
            pipe.send(message)
        except ConnectionError:  # the parent is gone
            os._exit(1)

    try:
        run = pipe.recv()
        while True:
            arguments = pipe.recv()
            try:
                send(Done(run(*arguments, lambda source, text: send(Progress(source, text)))))
            except (UserError, OSError) as error:
                send(Failed(error))
            except Exception as error:
                send(Failed(RuntimeError(f"{type(error).__name__}: {error}"), traceback.format_exc()))
    except (EOFError, ConnectionError):
        return
