"""BPE training by rustbpe (`lit_llm.tokenizers.BPE`) and by `tokenizers`: processor time, memory, quality of the tokens.

    python benchmarks/bpe_training.py                                # Python files of the standard library
    python benchmarks/bpe_training.py --text corpus --vocab_size 4096

Every tenth file is held out. Each trainer runs in a fresh process, with one thread. Bits per byte are those of a bigram model
of the tokens (absolute discounting), counted on the training text and measured on the held-out text. To see what a difference
means, both trainers are also given quarters of the text.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.tokenizers import BPE, END_OF_TEXT, PieceEncoder, TokenizerJSON, choose_encoder
from lit_llm.tokenizers.bytes import byte_symbols

DISCOUNT = 0.75


def with_tokenizers(texts: Iterable[str], vocab_size: int) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_symbols()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend.to_str(pretty=True)


def with_rustbpe(texts: Iterable[str], vocab_size: int) -> str:
    tokenizer = BPE(vocab_size)
    tokenizer.train(texts)
    return tokenizer.to_json()


TRAINERS = {"tokenizers": with_tokenizers, "rustbpe": with_rustbpe}


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and held-out files."""
    found = sorted(path for path in folder.rglob("*.py") if path.is_file() and "site-packages" not in path.parts)
    return [path for i, path in enumerate(found) if i % 10], found[::10]


def read(paths: Iterable[Path]) -> Iterable[str]:
    return (path.read_text(encoding="utf-8", errors="replace") for path in paths)


def train(name: str, paths: list[Path], vocab_size: int, out: Path) -> dict[str, float]:
    """Train in this process."""
    texts = list(read(paths))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    content = TRAINERS[name](iter(texts), vocab_size)
    seconds = time.process_time() - started
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(content, encoding="utf-8")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"cpu_seconds": seconds, "grown_mb": grown / 1024}


def quality(folder: Path, train_text: list[bytes], held_out: list[bytes]) -> dict[str, float]:
    """Tokens per byte, and bits per byte of a bigram model, on the held-out text."""
    tokenizer = TokenizerJSON(str(folder))
    encoder = PieceEncoder(tokenizer, choose_encoder(tokenizer, []))
    known, unseen = (
        np.concatenate([encoder.encode(text) for text in texts]).astype(np.int64) for texts in (train_text, held_out)
    )
    size = tokenizer.vocab_size
    unigram = (np.bincount(known, minlength=size) + 0.5) / (len(known) + 0.5 * size)
    pairs, counts = np.unique(known[:-1] * size + known[1:], return_counts=True)
    wanted = unseen[:-1] * size + unseen[1:]
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place], 0)
    before = np.bincount(known[:-1], minlength=size)[unseen[:-1]]
    kinds = np.bincount(pairs // size, minlength=size)[unseen[:-1]]
    smooth = unigram[unseen[1:]]
    probability = np.where(
        before > 0, (np.maximum(seen - DISCOUNT, 0) + DISCOUNT * kinds * smooth) / np.maximum(before, 1), smooth
    )
    held_bytes = sum(map(len, held_out))
    return {"tokens_per_byte": len(unseen) / held_bytes, "bits_per_byte": float(-np.log2(probability).sum()) / held_bytes}


def run(name: str, arguments: argparse.Namespace, out: Path, part: int | None = None) -> dict[str, float]:
    """Train in a fresh process with one thread."""
    command = [sys.executable, __file__, "--text", arguments.text, "--vocab_size", str(arguments.vocab_size)]
    command += ["--trainer", name, "--out", str(out), *([] if part is None else ["--part", str(part)])]
    environment = os.environ | {"RAYON_NUM_THREADS": "1"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=sysconfig.get_paths()["stdlib"], help="a folder with Python files")
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--pairs", type=int, default=3, help="timed pairs, in the order ABBA")
    parser.add_argument("--parts", type=int, default=4, help="quarters of the text to train on")
    parser.add_argument("--out", default="/tmp/bpe_training")
    parser.add_argument("--trainer", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    training, held_out = files(Path(arguments.text))
    if arguments.trainer is not None:
        paths = training if arguments.part is None else training[arguments.part :: 4]
        print(json.dumps(train(arguments.trainer, paths, arguments.vocab_size, Path(arguments.out))))
        return
    out = Path(arguments.out)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in TRAINERS}
    for pair in range(arguments.pairs):
        for name in list(TRAINERS)[:: 1 if pair % 2 == 0 else -1]:
            measured[name].append(run(name, arguments, out / name))
    ratios = [
        slow["cpu_seconds"] / fast["cpu_seconds"]
        for slow, fast in zip(measured["tokenizers"], measured["rustbpe"], strict=True)
    ]
    train_text, held_text = ([text.encode() for text in read(paths)] for paths in (training, held_out))
    print(f"{sum(map(len, train_text)) / 1e6:.1f} MB to train on, {sum(map(len, held_text)) / 1e6:.1f} MB held out")
    for name, runs in measured.items():
        seconds, grown = (sorted(one[key] for one in runs)[len(runs) // 2] for key in ("cpu_seconds", "grown_mb"))
        found = quality(out / name, train_text, held_text)
        print(
            f"{name:10}  {seconds:6.2f} cpu-s  +{grown:4.0f} MB  {found['tokens_per_byte']:.5f} tokens/byte  "
            f"{found['bits_per_byte']:.5f} bits/byte"
        )
    print(f"ratio of processor time: {sorted(ratios)[len(ratios) // 2]:.2f} (of {len(ratios)} pairs)")
    for part in range(arguments.parts):
        found_by = {}
        for name in TRAINERS:
            run(name, arguments, out / f"{name}-{part}", part)
            found_by[name] = quality(out / f"{name}-{part}", train_text, held_text)["bits_per_byte"]
        print(f"trained on part {part}: " + "  ".join(f"{name} {bits:.5f} bits/byte" for name, bits in found_by.items()))


if __name__ == "__main__":
    main()
