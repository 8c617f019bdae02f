"""The end of `make quickstart`: the model compared with gzip and xz on the same text, a sample, and next steps."""

from __future__ import annotations

import gzip
import lzma
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lit_llm.commands import generate
from lit_llm.data import PythonStdlib
from lit_llm.runs import load

NEXT = """
Next:
  watch the curves     {python} -m tensorboard.main --logdir runs
  let it write more    {python} -m lit_llm generate --run {run} --prompt "class " --max_new_tokens 300
  train on your text   {python} -m lit_llm fit --config recipes/quickstart.yaml --run_dir runs/mine \\
                         --data TextFiles --data.paths my.txt
"""


def main(run: Path) -> None:
    """Print the report of a run on `PythonStdlib`."""
    scalars = load(run).scalars
    last = {name: scalars[f"val/{name}"].values[-1] for name in ("loss", "perplexity", "bits_per_byte")}
    text = b"".join(PythonStdlib().held_out_text())
    table = Table("", "bits per byte", title=f"held-out text: {len(text):,} bytes of Python", title_justify="left")
    for name, compressed in {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}.items():
        table.add_row(name, f"{8 * len(compressed) / len(text):.3f}")
    table.add_row(f"this model (loss {last['loss']:.3f}, perplexity {last['perplexity']:.2f})", f"{last['bits_per_byte']:.3f}")
    Console(file=sys.stdout).print(table)
    print('\nA sample, continuing "def ":\n')
    generate.main(["--run", str(run), "--prompt", "def ", "--max_new_tokens", "150"])
    print(f"\nThe run is in {run}: config.yaml, checkpoints/, tokenizer.json and the TensorBoard events.")
    print(NEXT.format(python=Path(sys.executable).parent.parent.name + "/bin/python", run=run))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
