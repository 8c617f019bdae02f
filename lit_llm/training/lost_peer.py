"""Recognises the error that gloo raises when another process of the run has ended.

PyTorch has no exception type for it: gloo raises a plain RuntimeError. So this module decides by the message. No other module
does. Its test kills a real process and passes the real error.
"""

from __future__ import annotations

# Message of a read or write on a TCP connection whose other end is gone (gloo/transport/tcp/pair.cc, errno's texts).
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is gloo's: the connection to another process is lost.

    NCCL raises no such error. Its watchdog ends the process instead.
    """
    message = str(error)
    return isinstance(error, RuntimeError) and "gloo/transport" in message and any(text in message for text in _LOST)
