"""Logits and greedy text of lit_llm against transformers, by model family, for import and export.

    OMP_NUM_THREADS=1 python benchmarks/parity.py

The models are those of the tests (tests/hf/folders.py): every variant of a family, with 2 and 3 layers, width 32 and random
fp32 weights, on a CPU. "in": built and saved by transformers, then imported. "out": built here, then exported. For each family
it prints the number of variants, the largest absolute difference of any logit (3 texts of 64 random ids), and in how many
variants all 40 tokens of the greedy continuations of 5 prompts are equal. For scale, the last line has the smallest standard
deviation of the logits, and the smallest number of different tokens in a continuation.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hf"))
import folders
import torch
import transformers
from folders import CONTEXT, OURS, THEIRS, differ, greedy, ids, logits
from torch import nn

from lit_llm.checkpoint.load_model import load_model
from lit_llm.commands.import_hf import import_folder

NAMES = {"gpt2": "GPT-2", "llama": "LLaMA", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclass(frozen=True)
class Pair:
    """The same model in lit_llm and in transformers."""

    difference: float
    """Largest absolute difference of the logits."""
    spread: float
    """Standard deviation of the logits."""
    same_text: bool
    tokens: int
    """Number of different tokens in the greedy text."""


def compare(ours: nn.Module, theirs: nn.Module) -> Pair:
    tokens = ids(3, CONTEXT)
    expected = logits(theirs, tokens)
    prompts = ids(5, 7).tolist()
    texts = [greedy(theirs, prompt) for prompt in prompts]
    return Pair(
        difference=differ(logits(ours, tokens), expected),
        spread=float(expected.std()),
        same_text=[greedy(ours, prompt) for prompt in prompts] == texts,
        tokens=len({token for text in texts for token in text}),
    )


def family(config: transformers.PretrainedConfig) -> str:
    rotary = getattr(config, "rope_parameters", None) or {}
    scaled = rotary.get("rope_type") == "llama3"
    window = ", window" if getattr(config, "sliding_window", None) else ""
    return NAMES[config.model_type] + (" 3.1 rotary scaling" if scaled else "") + window


def cells(pairs: list[Pair]) -> list[str]:
    if not pairs:
        return ["0", "", ""]
    count = len(pairs)
    return [str(count), f"{max(p.difference for p in pairs):.1e}", f"{sum(p.same_text for p in pairs)} of {count}"]


def main() -> None:
    imported: dict[str, list[Pair]] = defaultdict(list)
    exported: dict[str, list[Pair]] = defaultdict(list)
    for name in THEIRS:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place)
            theirs = folders.theirs(name)
            theirs.save_pretrained(path / "hf")
            import_folder(path / "hf", path / "run")
            ours = load_model(path / "run/checkpoints/last.ckpt")
            imported[family(theirs.config)].append(compare(ours, theirs))
    for changes, _ in OURS.values():
        with tempfile.TemporaryDirectory() as place:
            path = Path(place)
            ours = folders.ours(**changes)
            folders.save(ours, path / "a.ckpt")
            folders.export(path / "a.ckpt", path / "out")
            theirs = folders.load(path / "out")
            exported[family(theirs.config)].append(compare(ours, theirs))
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'family':26s}", *(f"{head:>12s}" for head in ("variants in", "logits", "same text", "out", "logits", "same text")))
    for name in sorted(imported | exported):
        print(f"{name:26s}", *(f"{cell:>12s}" for cell in cells(imported[name]) + cells(exported[name])))
    pairs = [pair for of in (imported, exported) for found in of.values() for pair in found]
    print(f"\nsmallest standard deviation of logits {min(p.spread for p in pairs):.2f},", end=" ")
    print(f"fewest different tokens {min(p.tokens for p in pairs)}")


if __name__ == "__main__":
    main()
