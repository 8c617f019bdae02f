"""What duplicates cost: validation loss after the same number of tokens, with and without 20 % planted copies.

    python benchmarks/duplicates_and_loss.py                          # Python files of the standard library and the packages
    python benchmarks/duplicates_and_loss.py --text corpus/*.jsonl --tokens 4000000 --seeds 0 1 2

Every run sees the same number of tokens once, in a random order. ``none``: all documents are different. ``few``: a share of the
tokens are second copies of documents. ``many``: they are further copies of 1 % of the text. The held-out documents, the
tokenizer, the initial weights and the order's seed are the same in the runs of a seed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_llm.models.config import GPTConfig
from lit_llm.models.gpt import GPT
from lit_llm.tokenizers import BPE

BLOCK, BATCH = 128, 4
WARMUP = 50  # steps
HELD_OUT = 100_000  # tokens
PIECE = 3000  # characters of a document: with many short ones, the runs of a seed differ less by chance


def documents(paths: Sequence[Path]) -> list[str]:
    """A random piece of each text of JSONL files, or of each Python file; all are different."""
    if paths:
        texts = [json.loads(line)["text"] for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
        files = sorted({file for root in roots for file in root.rglob("*.py")})
        texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    draw = random.Random(0)
    starts = [draw.randrange(max(1, len(text) - PIECE)) for text in texts]
    pieces = [text[start : start + PIECE] for text, start in zip(texts, starts, strict=True)]
    return list(dict.fromkeys(piece for piece in pieces if len(piece) >= PIECE // 4))


def with_copies(encoded: Sequence[np.ndarray], tokens: int, share: float, source: float) -> list[np.ndarray]:
    """Documents of ``tokens`` tokens together, of which ``share`` are copies of the first documents.

    Args:
        source: tokens of the documents that are copied, as a share of ``tokens``.
    """
    chosen: list[np.ndarray] = []
    size = 0
    for document in encoded:
        if size >= tokens * (1 - share):
            break
        chosen.append(document)
        size += len(document)
    originals, first = [], 0
    for document in chosen:
        if first >= tokens * source:
            break
        originals.append(document)
        first += len(document)
    i = 0
    while size < tokens:
        copy = originals[i % len(originals)] if share else encoded[len(chosen)]
        chosen.append(copy)
        size += len(copy)
        i += 1
    return chosen


def train(stream: list[np.ndarray], held_out: np.ndarray, tokens: int, seed: int, args: argparse.Namespace) -> float:
    """The validation loss in nats per token after one pass over ``tokens`` tokens."""
    order = random.Random(seed)
    order.shuffle(stream)
    ids = torch.from_numpy(np.concatenate(stream)[: tokens + 1].astype(np.int64))
    blocks = list(range((len(ids) - 1) // BLOCK))
    order.shuffle(blocks)
    torch.manual_seed(seed)
    config = GPTConfig(
        n_layer=args.layers,
        n_head=args.width // 32,
        n_embd=args.width,
        block_size=BLOCK,
        vocab_size=args.vocab,
        tie_embeddings=True,
    )
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = len(blocks) // BATCH

    def batch(source: torch.Tensor, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([source[i * BLOCK : i * BLOCK + BLOCK + 1] for i in numbers])
        return rows[:, :-1], rows[:, 1:]

    for step in range(steps):
        rate = min((step + 1) / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        sums = model(*batch(ids, blocks[step * BATCH : (step + 1) * BATCH]))
        (sums.loss / (BATCH * BLOCK)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    held = torch.from_numpy(held_out.astype(np.int64))
    numbers = list(range((len(held) - 1) // BLOCK))
    with torch.no_grad():
        losses = [float(model(*batch(held, numbers[i : i + 32])).loss) for i in range(0, len(numbers), 32)]
    return sum(losses) / (len(numbers) * BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="JSONL files with the key text")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--share", type=float, default=0.2, help="of the tokens that are copies")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=["few", "many"], default=["many", "few"], help="of copies")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    texts = documents(args.text)
    tokenizer = BPE(args.vocab)
    sources = {"none": 0.0, "few": args.share, "many": 0.01}  # text that is copied, as a share of the tokens
    results: dict[str, list[float]] = {name: [] for name in ["none", *args.kinds]}
    for seed in args.seeds:
        random.Random(seed).shuffle(texts)
        if not tokenizer.trained:
            tokenizer.train(texts[:400])
        assert tokenizer.eos_id is not None
        encoded, size = [], 0
        for text in texts:
            encoded.append(np.append(tokenizer.encode(text), tokenizer.eos_id))
            size += len(encoded[-1])
            if size > 1.1 * args.tokens + HELD_OUT:
                break
        assert size > 1.1 * args.tokens + HELD_OUT, "the text is too short for so many tokens"
        held_out, held_size = [], 0
        while held_size < HELD_OUT:
            held_out.append(encoded.pop())
            held_size += len(held_out[-1])
        for name in results:
            started = time.perf_counter()
            stream = with_copies(encoded, args.tokens, args.share if name != "none" else 0.0, sources[name])
            loss = train(stream, np.concatenate(held_out), args.tokens, seed, args)
            results[name].append(loss)
            different = len({document.tobytes() for document in stream})
            print(
                f"seed {seed}, {name:4s}: {loss:.4f} nats per token; {len(stream):,} documents, {different:,} different "
                f"({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    for name in args.kinds:
        differences = [a - b for a, b in zip(results[name], results["none"], strict=True)]
        spread = statistics.stdev(differences) if len(differences) > 1 else float("nan")
        print(f"{name} - none: {statistics.mean(differences):+.4f} nats per token, standard deviation of a seed {spread:.4f}")


if __name__ == "__main__":
    main()
