"""Random reads of training blocks: bytes that come from the disk for each useful byte, and microseconds when all is cached.

    python benchmarks/cold_reads.py [--gigabytes 2] [--folder /tmp]

Compares a memory map, a memory map with MADV_RANDOM, and `TokenStream` (pread with POSIX_FADV_RANDOM). Blocks have 1,024
tokens of uint16 and lie at random places of one file. Before each cold part the page cache is dropped, which needs root;
without it, only the warm part runs. Bytes from the disk are those of /proc/self/io, so the folder must not be a tmpfs.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lit_llm.data import TokenStream
from lit_llm.ingest.shards import HEADER_BYTES, ShardWriter

T = 1024
COLD_BLOCKS, WARM_BLOCKS, WARM_ROUNDS = 1000, 20_000, 5


def mapped(path: Path, advice: int | None) -> Callable[[int], np.ndarray]:
    """Read blocks through a memory map."""
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if advice is not None:
        view.madvise(advice)
    tokens = np.frombuffer(view, dtype="<u2", offset=HEADER_BYTES)
    return lambda block: tokens[block * T : block * T + T + 1]


def streamed(path: Path) -> Callable[[int], np.ndarray]:
    """Read blocks as training does."""
    stream = TokenStream([path])
    return lambda block: stream.read(block * T, T + 1, random=True)


def bytes_from_disk() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def read_all(read: Callable[[int], np.ndarray], blocks: np.ndarray) -> float:
    """Copy every block, as a batch does; returns seconds."""
    row = np.empty(T + 1, dtype=np.int64)
    start = time.perf_counter()
    for block in blocks.tolist():
        row[:] = read(block)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        count = int(options.gigabytes * 1e9) // 2
        random = np.random.default_rng(0)
        with ShardWriter(name, "x", vocab_size=2**16, shard_tokens=2**31 - 1) as writer:
            for start in range(0, count, 2**24):
                writer.write(random.integers(0, 2**16, min(2**24, count - start), dtype=np.uint16))
        [path] = writer.paths
        ways = {
            "mmap": lambda: mapped(path, None),
            "mmap, MADV_RANDOM": lambda: mapped(path, mmap.MADV_RANDOM),
            "TokenStream (pread)": lambda: streamed(path),
        }
        blocks = random.permutation((count - 1) // T)
        cold(path, ways, blocks[:COLD_BLOCKS])
        warm(path, ways, blocks[:WARM_BLOCKS])


def cold(path: Path, ways: dict[str, Callable[[], Callable[[int], np.ndarray]]], blocks: np.ndarray) -> None:
    if os.geteuid() != 0:
        print("cold reads: skipped, dropping the page cache needs root (sudo)")
        return
    useful = len(blocks) * (T + 1) * 2
    for name, make in ways.items():
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        read = make()
        before = bytes_from_disk()
        seconds = read_all(read, blocks)
        amount = bytes_from_disk() - before
        del read  # pages that are still mapped would not be dropped
        print(
            f"cold  {name:20}  {amount / useful:7.1f} bytes read per useful byte  {seconds / len(blocks) * 1e6:8.0f} us a block"
        )


def warm(path: Path, ways: dict[str, Callable[[], Callable[[int], np.ndarray]]], blocks: np.ndarray) -> None:
    readers = {name: make() for name, make in ways.items()}
    np.fromfile(path, dtype=np.uint8)  # into the page cache
    times: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(WARM_ROUNDS):  # in turns, so that a busy moment of the machine meets all
        for name, read in readers.items():
            times[name].append(read_all(read, blocks))
    for name, seconds in times.items():
        print(f"warm  {name:20}  {min(seconds) / len(blocks) * 1e6:7.2f} us a block (best of {WARM_ROUNDS} rounds)")


if __name__ == "__main__":
    main()
