"""Recognises the error that gloo raises when another process of the run has ended.

PyTorch has no exception type for it: gloo raises a plain RuntimeError. So this module tests the message. It is the only
module that does. Its test kills a real process and uses the real error.
"""

from __future__ import annotations

# Messages of a read or write on a TCP connection closed by the other end (gloo/transport/tcp/pair.cc, errno's texts).
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is gloo's error for a lost connection to another process.

    NCCL does not raise one: its watchdog ends the process.
    """
    message = str(error)
    return isinstance(error, RuntimeError) and "gloo/transport" in message and any(text in message for text in _LOST)
