"""Ways of other projects to turn JSONL into a file of token ids, as `benchmarks/prepare.py` runs them, one in a process.

    python benchmarks/prepare_ways.py WAY FOLDER OUT WORKERS

FOLDER has `*.jsonl` and `tokenizer.json`. Each way writes its ids into OUT in its own layout, an end-of-document id after each
document. `ids` reads them back. They are the ways that the projects document, not their code:

datasets    `datasets.map` over batches with the tokenizer of `tokenizers`; the result is the Arrow files of the cache.
nanogpt     `datasets.map` with tiktoken, one document at a time, then all ids are copied into one memory-mapped file.
megatron    Lines go through the workers of a `multiprocessing.Pool` and come back as lists, which the first process writes.
tiktoken    The encoder alone: texts in memory, ids thrown away. It prints the CPU seconds of encoding.
tokenizers  The same with the other library.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EOS = 0
"""The id of the end-of-document token, which the vocabulary is trained with."""
_LINES_AT_A_TIME = 32
_PARTS = 1024  # of the memory-mapped file


def load_tokenizers(folder: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # a text that contains the name of the end-of-document token holds no such token
    return tokenizer


def load_tiktoken(folder: Path) -> Any:
    """The same vocabulary for tiktoken: tokens as bytes, in the order of their merges, which is that of their ids."""
    import tiktoken

    content = json.loads((folder / "tokenizer.json").read_text())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in content["model"]["vocab"].items() if rank != EOS}
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("benchmark", pat_str=words, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": EOS})


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.jsonl"))]


def rows(folder: Path, out: Path) -> Any:
    """The JSONL as a dataset, in the order of its files."""
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset("json", data_files=files(folder), split="train", cache_dir=str(out / "cache"))


def run_datasets(folder: Path, out: Path, workers: int) -> None:
    tokenizer = load_tokenizers(folder)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokenizer.encode_special_tokens = True  # `map` copies the tokenizer without this setting
        encodings = tokenizer.encode_batch(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, EOS] for encoding in encodings]}

    dataset = rows(folder, out).map(encode, batched=True, remove_columns=["text"], num_proc=workers if workers > 1 else None)
    (out / "files.json").write_text(json.dumps([file["filename"] for file in dataset.cache_files]))


def ids_of_datasets(out: Path) -> Iterator[np.ndarray]:
    import datasets

    for file in json.loads((out / "files.json").read_text()):
        for batch in datasets.Dataset.from_file(file).with_format("arrow").iter(1000):
            yield batch["ids"].combine_chunks().flatten().to_numpy()


def run_nanogpt(folder: Path, out: Path, workers: int) -> None:
    encoding = load_tiktoken(folder)

    def encode(row: dict[str, str]) -> dict[str, Any]:
        ids = encoding.encode_ordinary(row["text"])
        ids.append(EOS)
        return {"ids": ids, "len": len(ids)}

    dataset = rows(folder, out).map(encode, remove_columns=["text"], num_proc=workers if workers > 1 else None)
    count = int(np.sum(dataset["len"], dtype=np.uint64))
    target = np.memmap(out / "train.bin", dtype=np.uint16, mode="w+", shape=(count,))
    at, parts = 0, min(_PARTS, len(dataset))
    for index in range(parts):
        part = dataset.shard(num_shards=parts, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(part["ids"])
        target[at : at + len(ids)] = ids
        at += len(ids)
    target.flush()


def ids_of_nanogpt(out: Path) -> Iterator[np.ndarray]:
    yield np.fromfile(out / "train.bin", dtype=np.uint16)


_tokenizer: Any = None  # of a worker of the pool


def _load_in_worker(folder: Path) -> None:
    global _tokenizer
    _tokenizer = load_tokenizers(folder)


def _encode_line(line: str) -> tuple[list[int], int]:
    text = json.loads(line)["text"]
    return [*_tokenizer.encode(text, add_special_tokens=False).ids, EOS], len(text)


def run_megatron(folder: Path, out: Path, workers: int) -> None:
    ends, end = [0], 0
    with (
        multiprocessing.get_context("fork").Pool(workers, _load_in_worker, (folder,)) as pool,
        open(out / "train.bin", "wb") as target,
    ):
        for path in files(folder):
            with open(path, encoding="utf-8") as lines:
                for ids, _ in pool.imap(_encode_line, lines, _LINES_AT_A_TIME):
                    target.write(np.array(ids, dtype=np.uint16).tobytes())
                    end += len(ids)
                    ends.append(end)
        pool.close()
        pool.join()
    np.array(ends, dtype=np.int64).tofile(out / "train.idx")


def ids_of_megatron(out: Path) -> Iterator[np.ndarray]:
    yield np.fromfile(out / "train.bin", dtype=np.uint16)


def run_bare(folder: Path, encode: Any) -> None:
    texts = [json.loads(line)["text"] for path in files(folder) for line in open(path, encoding="utf-8")]  # noqa: SIM115
    started = time.process_time()
    for text in texts:
        encode(text)
    print(time.process_time() - started)


RUN = {"datasets": run_datasets, "nanogpt": run_nanogpt, "megatron": run_megatron}
IDS = {"datasets": ids_of_datasets, "nanogpt": ids_of_nanogpt, "megatron": ids_of_megatron}


def main() -> None:
    way, folder, out, workers = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # one core a worker
    if way == "tiktoken":
        run_bare(folder, load_tiktoken(folder).encode_ordinary)
    elif way == "tokenizers":
        tokenizer = load_tokenizers(folder)
        run_bare(folder, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    else:
        RUN[way](folder, out, workers)


if __name__ == "__main__":
    main()
