"""Compare lit_llm with transformers for each model family: logits after import and export, gradients, greedy text, weights.

    OMP_NUM_THREADS=1 python benchmarks/parity.py

The models are in tests/hf/family_models.py, on a CPU: random weights scaled so that logits reach 10, heads of width 24, 3
groups of keys, vocabulary 101, window 7. The columns of the table are:

in         largest fp32 difference of a logit between transformers' model and its import, over 2 texts of 1, 20 and 64 ids
out        the same between lit_llm's model with changed weights and its export
gradients  largest float64 difference of a parameter's gradient, relative to the largest element of this gradient
text       number of prompts, of 5, after which 25 greedy tokens are equal
bits       whether import followed by export gives all tensors of the folder bit for bit
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hf"))
import torch
import transformers
from family_models import LENGTHS, MODELS, gradient_differences, model_of
from folders import differ, export, greedy, ids, load, logits, same_tensors, save

from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.import_hf import import_folder

HEADS = ("family", "logits reach", "in", "out", "gradients", "text", "bits")


def row(name: str, path: Path) -> list[str]:
    theirs = model_of(name)
    theirs.save_pretrained(path / "hf")
    import_folder(path / "hf", path / "run")
    ours = load_model(path / "run/checkpoints/last.ckpt")
    expected = {length: logits(theirs, ids(2, length)) for length in LENGTHS}
    inwards = max(differ(logits(ours, ids(2, length)), expected[length]) for length in LENGTHS)
    export(path / "run/checkpoints/last.ckpt", path / "out", run=path / "run")
    bits = same_tensors(dict(load(path / "out").state_dict()), dict(theirs.state_dict()))
    prompts = ids(5, 7).tolist()
    same = sum(greedy(ours, prompt, 25) == greedy(theirs, prompt, 25) for prompt in prompts)
    gradients = max(gradient_differences(ours, theirs, json.loads((path / "hf/config.json").read_text())).values())
    ours.float()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.rand_like(p), alpha=0.02)
    save(ours, path / "tuned.ckpt")
    export(path / "tuned.ckpt", path / "tuned", run=path / "run")
    again = load(path / "tuned")
    outwards = max(differ(logits(again, ids(2, length)), logits(ours, ids(2, length))) for length in LENGTHS)
    reach = max(float(each.abs().max()) for each in expected.values())
    return [name, f"{reach:.0f}", f"{inwards:.1e}", f"{outwards:.1e}", f"{gradients:.1e}", f"{same} of 5", str(bits)]


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(*(f"{head:>13s}" for head in HEADS))
    for name in MODELS:
        with tempfile.TemporaryDirectory() as path:
            print(*(f"{cell:>13s}" for cell in row(name, Path(path))), flush=True)


if __name__ == "__main__":
    main()
