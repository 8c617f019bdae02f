"""Reads the texts in a TensorBoard event file, and skips the scalars, of which a file may have millions."""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import unpack_from
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

FRAME = 16
"""Bytes of a record in addition to its content: 8 for the length, and 4 for each of two checksums, which are not compared."""
_FIRST = 2
"""Number of records that are always read: the first has the format version, the second the step of a resumed launch."""


class EventFile(NamedTuple):
    """Record of the texts in an event file, and of the number of bytes that could be read.

    Attributes:
        events: the first `_FIRST` events, and all events with text.
        read: size in bytes of the intact records at the start of the file. The bytes after them cannot be read.
        size: size of the file in bytes.
    """

    events: list[Event]
    read: int
    size: int


def read_events(path: Path) -> EventFile:
    """Read the first `_FIRST` events and all events with text from the TensorBoard file `path`, up to the first record that is
    damaged or incomplete."""
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
