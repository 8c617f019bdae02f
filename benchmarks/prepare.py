"""Speed and memory of `python -m lit_llm prepare` beside other ways to tokenise the same JSONL (`benchmarks/prepare_ways.py`).

    python benchmarks/prepare.py [--megabytes 200] [--rounds 3] [--workers 1 2] [--ways ours datasets nanogpt megatron] [FOLDER]

The text is the Python sources and documents of the installation, or the given folders; a file is a document. A byte-level BPE
with GPT-2's words is trained on part of it once. Text and vocabulary are kept in `--cache`. In each round every way runs once,
one after the other, in a process of its own. CPU seconds include its child processes and its imports. Memory is read from
/proc ten times a second: the sum over all processes, and the largest process. "anonymous" leaves out pages of files, which the
system can drop. All ways must give the same ids. The table has medians over the rounds; "times ours" is the median ratio of CPU
seconds in the same round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import prepare_ways

SUFFIXES = {".py", ".pyi", ".rst", ".md", ".txt", ".h", ".html", ".css", ".js"}
FILES = 16  # of JSONL
LONGEST_DOCUMENT = 2**20  # bytes
TRAINING_BYTES = 2**24  # of the vocabulary
SECONDS_BETWEEN_LOOKS = 0.1
BARE = ("tiktoken", "tokenizers")


@dataclass(frozen=True)
class Cost:
    """What one run takes."""

    cpu: float
    """Processor seconds of all processes."""
    wall: float
    """Seconds from start to end."""
    memory: int
    """Largest sum of the resident bytes of all processes."""
    anonymous: int
    """Largest sum of their resident bytes that belong to no file."""
    largest: int
    """Resident bytes of the largest process."""


def documents(folders: list[Path]) -> Iterator[str]:
    """Different texts below the folders, in the order of a hash, so that each part is like the whole."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    seen = set()
    for path in sorted(set(paths), key=lambda path: hashlib.blake2b("/".join(path.parts[-3:]).encode()).digest()):
        content = path.read_bytes()
        digest = hashlib.blake2b(content).digest()
        if not content.strip() or len(content) > LONGEST_DOCUMENT or digest in seen:
            continue
        seen.add(digest)
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError:
            continue


def write_text(folders: list[Path], megabytes: int, target: Path) -> int:
    """Write the text as JSONL, and return its bytes."""
    total = 0
    lines: list[list[str]] = [[] for _ in range(FILES)]
    for text in documents(folders):
        lines[total * FILES // (megabytes * 10**6)].append(json.dumps({"text": text}) + "\n")
        total += len(text.encode())
        if total >= megabytes * 10**6:
            break
    for number, part in enumerate(lines):
        if part:
            (target / f"{number:03d}.jsonl").write_text("".join(part))
    return total


def train_vocabulary(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],  # gets id 0, prepare_ways.EOS
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts, total = [], 0
    for path in prepare_ways.files(folder):
        with open(path) as lines:
            for line in lines:
                if total < TRAINING_BYTES:
                    texts.append(json.loads(line)["text"])
                    total += len(texts[-1])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def corpus(folders: list[Path], megabytes: int, vocabulary: int, cache: Path) -> tuple[Path, int]:
    """The folder of JSONL and tokenizer.json, made once, and the bytes of text."""
    key = hashlib.blake2b(repr((list(map(str, folders)), megabytes, vocabulary)).encode(), digest_size=6).hexdigest()
    folder = cache / key
    if not (folder / "bytes").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        total = write_text(folders, megabytes, folder)
        train_vocabulary(folder, vocabulary)
        (folder / "bytes").write_text(str(total))
    return folder, int((folder / "bytes").read_text())


def command(way: str, folder: Path, out: Path, workers: int) -> list[str]:
    if way != "ours":
        script = Path(__file__).with_name("prepare_ways.py")
        return [sys.executable, str(script), way, str(folder), str(out), str(workers)]
    (out / "val.jsonl").write_text('{"text": "Held out."}\n')
    flags = {
        "--data": "TextFiles",
        "--data.train": str(folder / "*.jsonl"),
        "--data.val": str(out / "val.jsonl"),  # so that nothing is held out of the text
        "--data.tokenizer": "TokenizerJSON",
        "--data.tokenizer.path": str(folder / "tokenizer.json"),
        "--workers": str(workers),
        "--out": str(out / "shards"),
    }
    return [sys.executable, "-m", "lit_llm", "prepare", *(word for flag in flags.items() for word in flag)]


def ids(way: str, out: Path) -> Iterator[np.ndarray]:
    if way != "ours":
        yield from prepare_ways.IDS[way](out)
        return
    for path in sorted((out / "shards").glob("train_*.bin")):
        yield np.fromfile(path, dtype=np.uint16, offset=1024)


def measure(words: list[str], log: Path) -> Cost:
    """Run a command to its end."""
    started = time.perf_counter()
    memory = anonymous = largest = 0
    with open(log, "wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            found = [resident(pid) for pid in (process.pid, *descendants(process.pid))]
            memory = max(memory, sum(total for total, _ in found))
            anonymous = max(anonymous, sum(own for _, own in found))
            largest = max(largest, *(total for total, _ in found))
            time.sleep(SECONDS_BETWEEN_LOOKS)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{log.read_text()[-3000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - started, memory, anonymous, largest)


def descendants(pid: int) -> list[int]:
    try:
        children = [
            int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [found for child in children for found in (child, *descendants(child))]


def resident(pid: int) -> tuple[int, int]:
    """Resident bytes of a process: all, and those that belong to no file."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS:", "RssAnon:"))}
    return kilobytes.get("VmRSS:", 0) * 1024, kilobytes.get("RssAnon:", 0) * 1024


def run(way: str, folder: Path, workers: int, place: Path) -> tuple[Cost, str, int]:
    """Its cost, a hash of the ids, and their number."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        out = Path(name)
        cost = measure(command(way, folder, out, workers), out / "log")
        if way in BARE:
            seconds = float((out / "log").read_text())
            return Cost(seconds, seconds, 0, 0, 0), "", 0
        digest, count = hashlib.blake2b(), 0
        for part in ids(way, out):
            digest.update(part.astype("<u4").tobytes())
            count += part.size
        return cost, digest.hexdigest(), count


def table(costs: dict[tuple[str, int], list[Cost]], size: int, tokens: int) -> None:
    heads = ("way", "workers", "MB/cpu-s", "Mtok/cpu-s", "MB/s", "wall s", "sum MB", "anonymous", "largest", "times ours")
    print(f"\n{heads[0]:12s}", *(f"{head:>10s}" for head in heads[1:]))
    for (way, workers), found in costs.items():
        cpu, wall = statistics.median(cost.cpu for cost in found), statistics.median(cost.wall for cost in found)
        memory = [max(getattr(cost, name) for cost in found) / 1e6 for name in ("memory", "anonymous", "largest")]
        ours = costs.get(("ours", workers), [])
        ratio = statistics.median(a.cpu / b.cpu for a, b in zip(found, ours, strict=True)) if ours else float("nan")
        cells = (size / cpu / 1e6, tokens / cpu / 1e6, size / wall / 1e6, wall, *memory, ratio)
        print(f"{way:12s} {workers:10d}", *(f"{cell:10.2f}" if cell < 100 else f"{cell:10.0f}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=["ours", *prepare_ways.RUN], choices=["ours", *prepare_ways.RUN])
    parser.add_argument("--bare", nargs="*", default=list(BARE), choices=BARE)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "lit_llm_benchmark_prepare")
    options = parser.parse_args()
    places = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    folder, size = corpus(options.folders or places, options.megabytes, options.vocabulary, options.cache)
    print(f"{size:,} bytes of text in {len(prepare_ways.files(folder))} files of JSONL, {folder}")
    costs: dict[tuple[str, int], list[Cost]] = {}
    hashes: dict[str, tuple[str, int]] = {}
    runs = [(way, workers) for workers in options.workers for way in options.ways] + [(way, 1) for way in options.bare]
    for number in range(options.rounds):
        for way, workers in runs:
            cost, digest, tokens = run(way, folder, workers, options.cache)
            costs.setdefault((way, workers), []).append(cost)
            if tokens:
                hashes[f"{way} with {workers}"] = digest, tokens
            print(f"round {number + 1}: {way}, {workers} workers: {cost.cpu:.1f} cpu-s, {cost.wall:.1f} s", flush=True)
    tokens = max(count for _, count in hashes.values())
    table(costs, size, tokens)
    if len(set(hashes.values())) > 1:
        raise SystemExit(f"The ids differ: {hashes}")
    print(f"\n{tokens:,} tokens; all ways gave the same ids.")


if __name__ == "__main__":
    main()
