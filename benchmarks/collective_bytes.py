"""Bytes that a rank sends in one optimizer step, counted, and the plan's formulas beside them.

    python benchmarks/collective_bytes.py

A fake process group runs one rank alone, so any number of ranks takes one process. Sizes are exact; times mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("tests", "tests/plan")]
from collective_cases import CASES, counted, planned


def main() -> None:
    print("| layout | ranks | MB counted | MB planned | ratio |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        for count, plan in zip(counted(case), planned(case), strict=True):
            print(f"| {name} | {case.world} | {count / 1e6:.4f} | {plan / 1e6:.4f} | {plan / count:.4f} |", flush=True)


if __name__ == "__main__":
    main()
