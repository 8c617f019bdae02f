"""Reads the texts in a TensorBoard event file. Its scalars, of which it may have millions, are skipped."""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import unpack_from
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

FRAME = 16
"""Bytes of a record in addition to its content: its length and two checksums, which are not compared."""
_FIRST = 2
"""Number of records at the start of a file that are kept: the version, and the step from which the launch was resumed."""


class EventFile(NamedTuple):
    """The events of a file, and how much of it could be read.

    Attributes:
        events: the first events, and the events with text.
        read: bytes of whole records. The bytes after them cannot be read.
    """

    events: list[Event]
    read: int
    size: int


def read_events(path: Path) -> EventFile:
    """Read the events with text in a file, and stop at the first record that is damaged or incomplete."""
    events = list[Event]()
    size = path.stat().st_size
    if not size:
        return EventFile(events, 0, 0)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        at, count, text = 0, 0, data.find(b"text")
        while at + FRAME < size:
            end = at + FRAME + unpack_from("<Q", data, at)[0]
            if end > size or end == at + FRAME:
                break
            count += 1
            if count <= _FIRST or at < text < end:
                try:
                    events.append(Event.FromString(data[at + 12 : end - 4]))
                except DecodeError:
                    break
            if at < text < end:
                text = data.find(b"text", end)
            at = end
    return EventFile(events, at, size)
