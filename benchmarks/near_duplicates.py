"""Near-duplicates of held-out documents: share of copies that are found, wrongly dropped documents, memory and speed.

    python benchmarks/near_duplicates.py                       # Python files of the standard library and the installed packages
    python benchmarks/near_duplicates.py --text corpus --held_out 200

Recall: the share of found copies of held-out documents with a part of their words replaced, alone and within a text three times
as long. Real text: how many training files are dropped, and how many of these have less than a fifth of their lines in common
with each held-out file. For comparison, the same with containment alone, as if SHARE were 0.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.ingest.near_duplicates import CONTAINED, SHARE, SHINGLE_BYTES, Checker, HeldOutIndex, Sketcher
from lit_llm.ingest.readers.interface import PIECE_BYTES

EDITS = (0.0, 0.02, 0.08, 0.2)
COMMON_LINES = 0.2


def sketch(text: bytes) -> np.ndarray:
    sketcher = Sketcher()
    for start in range(0, len(text), PIECE_BYTES):
        sketcher.add(text[start : start + PIECE_BYTES])
    return sketcher.sketch()


def check(index: HeldOutIndex, text: bytes) -> Checker:
    checker = Checker(index)
    for start in range(0, len(text), PIECE_BYTES):
        checker.add(text[start : start + PIECE_BYTES])
    return checker


def edited(text: bytes, share: float, words: Sequence[bytes], generator: random.Random) -> bytes:
    """Return a copy of `text` with the share `share` of its words replaced by random `words`; spaces and line ends stay."""
    parts = text.split(b" ")
    for i in generator.sample(range(len(parts)), round(share * len(parts))):
        parts[i] = generator.choice(words)
    return b" ".join(parts)


def lines(text: bytes) -> set[bytes]:
    return {line.strip() for line in text.splitlines()} - {b""}


def documents(folders: Sequence[Path], most: int) -> list[bytes]:
    """Return at most `most` different texts of the Python files below `folders`, in a random order."""
    paths = sorted(path for folder in folders for path in folder.rglob("*.py") if path.is_file())
    random.Random(0).shuffle(paths)
    found: dict[bytes, None] = {}
    for path in paths:
        if len(found) == most:
            break
        found[path.read_bytes()] = None
    found.pop(b"", None)
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    parser.add_argument("--text", nargs="*", default=installed, help="folders with Python files")
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--held_out", type=int, default=200)
    arguments = parser.parse_args()
    texts = documents([Path(folder) for folder in arguments.text], arguments.documents)
    held_out, training = texts[: arguments.held_out], texts[arguments.held_out :]
    started = time.process_time()
    index = HeldOutIndex([sketch(text) for text in held_out])
    size = sum(map(len, held_out)) / 1e6
    print(f"shingles of {SHINGLE_BYTES} bytes; {CONTAINED:.0%} of the held-out text; {SHARE:.0%} of the training text")
    print(f"index of {len(held_out)} documents, {size:.1f} MB: {size / (time.process_time() - started):.0f} MB per cpu-second")
    memory = sum(array.nbytes for array in vars(index).values() if isinstance(array, np.ndarray))
    print(
        f"memory: {(memory - index.table.nbytes) / len(held_out):.0f} bytes a document, and a table of {index.table.nbytes:,}"
    )

    generator = random.Random(1)
    words = [word for text in training[:200] for word in text.split(b" ") if word.strip()]
    print("\nshare of words replaced | found alone | found within a text three times as long")
    for share in EDITS:
        alone = within = 0
        for text in held_out:
            copy = edited(text, share, words, generator)
            around = generator.choice(training)
            around = (around * (1 + 2 * len(text) // len(around)))[: 2 * len(text)]
            alone += check(index, copy).duplicate
            within += check(index, around[: len(text)] + copy + around[len(text) :]).duplicate
        print(f"{share:23.0%} | {alone / len(held_out):11.0%} | {within / len(held_out):.0%}")

    started = time.process_time()
    checkers = [check(index, text) for text in training]
    dropped = [i for i, checker in enumerate(checkers) if checker.duplicate]
    seconds = time.process_time() - started
    total = sum(map(len, training)) / 1e6
    print(f"\nchecked {len(training)} training documents, {total:.1f} MB: {total / seconds:.0f} MB per cpu-second")
    by_containment = [i for i, checker in enumerate(checkers) if checker.equal or np.any(checker.contained()[1] >= CONTAINED)]
    known = [lines(text) for text in held_out]
    for name, found in (("dropped", dropped), ("with containment alone", by_containment)):
        wrong = 0
        for i in found:
            own = lines(training[i])
            wrong += max(len(own & other) for other in known) < COMMON_LINES * len(own)
        part = sum(len(training[i]) for i in found) / 1e6
        print(
            f"{name}: {len(found)} documents, {part:.2f} MB; {wrong} have less than {COMMON_LINES:.0%} of their lines in common"
        )


if __name__ == "__main__":
    main()
