"""A process that copies its input to its output and to an open file: `python copy_output.py DESCRIPTOR`.

It leaves the process that started it and its session at once. So neither Ctrl-C nor the end of that process interrupts it:
it ends when nobody has its input open any more.
"""

from __future__ import annotations

import os
import signal
import sys


def copy(targets: list[int]) -> None:
    """Copy descriptor 0 to the targets until its end. A closed terminal or a full disk ends the copies to it."""
    while data := os.read(0, 65536):
        for target in list(targets):
            try:
                rest = data
                while rest:
                    rest = rest[os.write(target, rest) :]
            except OSError:
                targets.remove(target)


if __name__ == "__main__":
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):  # which a scheduler sends to every process of a job
            signal.signal(number, signal.SIG_IGN)
        copy([1, int(sys.argv[1])])
    os._exit(0)
