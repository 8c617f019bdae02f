"""Best-fit packing against consecutive blocks: share of cut documents, padding, time to read a row, and time of a step.

    OMP_NUM_THREADS=1 python benchmarks/packing.py                     # Python sources and the documentation of this machine
    OMP_NUM_THREADS=1 python benchmarks/packing.py --lengths 1024 4096 --megabytes 100 FOLDER …

A file is a document. Each folder has its own byte-level BPE tokenizer, trained on a part of it. A row (sequence) is read as a
batch of one, in the order of training, from files in the page cache. A step is forward and backward of a model of 2 blocks of
width 256 on packed rows, with and without masking documents; the ratio is the median of pairs. Times are processor time.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.data.blocks import Blocks, PackedBlocks, TrainBlocks
from lit_llm.data.document_ends import Documents
from lit_llm.data.order import sample_index
from lit_llm.data.pack_plan import PackPlan, write_plan
from lit_llm.data.packing import POOL, pack
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import ShardWriter
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.tokenizers import BPE

SUFFIXES = {"Python sources": {".py"}}
OTHERS = {".py", ".txt", ".md", ".rst", ".html", ".gz", ""}
VOCABULARY, TRAINING_BYTES = 8192, 2**22
ROWS = 200
COLUMNS = (
    "T",
    "cut: concatenate",
    "cut: best_fit",
    "apart: concatenate",
    "apart: best_fit",
    "padding",
    "row",
    "row with documents",
    "best_fit row with documents",
    "step with documents / without",
)


def texts(folder: Path, suffixes: set[str], most: int) -> list[str]:
    """Return different texts of the files below `folder`, about `most` bytes together, in a random order."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    random.Random(0).shuffle(paths)
    found: dict[str, None] = {}
    size = 0
    for path in paths:
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError, EOFError):
            continue
        if text and "\0" not in text and text not in found:
            found[text], size = None, size + len(content)
        if size >= most:
            break
    return list(found)


def write_shards(folder: Path, documents: Sequence[str]) -> TokenStream:
    tokenizer, size, sample = BPE(VOCABULARY), 0, []
    for text in documents:
        if size < TRAINING_BYTES:
            sample.append(text)
            size += len(text)
    tokenizer.train(sample)
    with ShardWriter(folder, "train", vocab_size=VOCABULARY, shard_tokens=10**8) as writer:
        for text in documents:
            writer.write(np.append(np.asarray(tokenizer.encode(text)), tokenizer.eos_id))
            writer.end_document()
    return TokenStream(writer.paths)


def seconds_a_row(blocks: Blocks) -> float:
    order = sample_index(np.arange(2 * ROWS), samples=len(blocks), seed=0)
    for block in order[ROWS:]:  # opens the files
        blocks.rows(np.array([block]))
    start = time.process_time()
    for block in order[:ROWS]:
        blocks.rows(np.array([block]))
    return (time.process_time() - start) / ROWS


def paired_ratio(first: Callable[[], None], second: Callable[[], None], pairs: int) -> float:
    """Return the median over pairs of the processor time of `first` divided by the time of `second`."""

    def seconds(step: Callable[[], None]) -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    first(), second()
    ratios = []
    for i in range(pairs):
        if i % 2:
            b, a = seconds(second), seconds(first)
        else:
            a, b = seconds(first), seconds(second)
        ratios.append(a / b)
    return median(ratios)


def step_ratio(blocks: Blocks, length: int, pairs: int) -> float:
    """Return the time of a step that masks the documents of rows, divided by the time of a step without masking."""
    config = GPTConfig(2, 4, n_embd=256, block_size=length, vocab_size=VOCABULARY, mask_documents=True, eos_id=None)
    model = GPT(config)
    batches = [blocks[np.array([block])] for block in sample_index(np.arange(8), samples=len(blocks), seed=1)]

    def step(masked: bool) -> None:
        for batch in batches[: max(1, 2048 // length)]:
            documents = batch["documents"] if masked else None
            model(batch["input_ids"], batch["targets"], documents=documents).loss.backward()
        model.zero_grad()

    return paired_ratio(lambda: step(True), lambda: step(False), pairs)


def rows_of(name: str, folder: Path, lengths: Sequence[int], most: int, pairs: int) -> None:
    documents = texts(folder, SUFFIXES.get(name, OTHERS), most)
    with tempfile.TemporaryDirectory() as temporary:
        stream = write_shards(Path(temporary), documents)
        known = Documents(stream, ends_open=True)
        print(f"\n{name}: {len(documents):,} documents of {len(stream) / len(documents):,.0f} tokens on average\n")
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        for length in lengths:
            path = Path(temporary) / "plan"
            write_plan(path, known, size=length, key=bytes(16))
            plan = PackPlan(path, size=length, key=bytes(16))
            settings = {"block_size": length, "vocab_size": VOCABULARY}
            packed = PackedBlocks(stream, plan, **settings, documents=known)
            times = [seconds_a_row(blocks) * 1e6 for blocks in
                     (TrainBlocks(stream, **settings), TrainBlocks(stream, **settings, documents=known), packed)]  # fmt: skip
            shares = [plan.consecutive.cut_share, plan.counts.cut_share,
                      plan.consecutive.separated_share, plan.counts.separated_share]  # fmt: skip
            cells = [f"{length:,}", *(f"{share:.1%}" for share in shares), f"{plan.counts.padding_share:.2%}"]
            cells += [*(f"{each:,.0f} µs" for each in times), f"{step_ratio(packed, length, pairs):.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def speed(lengths: Sequence[int]) -> None:
    sizes = np.random.default_rng(0).lognormal(6.5, 1.2, POOL).astype(np.int64) + 1
    for length in lengths:
        start = time.process_time()
        pack(np.cumsum(sizes) - sizes, sizes, length)
        print(f"T {length:,}: {POOL / (time.process_time() - start) / 1e6:.1f} million documents a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--pairs", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    named = {str(folder): folder for folder in arguments.folders}
    named = named or {"Python sources": Path(sysconfig.get_paths()["purelib"]), "Documentation": Path("/usr/share/doc")}
    for name, folder in named.items():
        rows_of(name, folder, arguments.lengths, int(arguments.megabytes * 1e6), arguments.pairs)
    print()
    speed(arguments.lengths)


if __name__ == "__main__":
    main()
