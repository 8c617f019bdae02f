"""Runs generated attacks and judges them.

python tests/attack/attacks.py [--cases 1200] [--seed 0] [--family YAML] [--processes 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fork_server
from cases import BYSTANDERS, Case, generate

INPUTS = {"recipe.yaml", "text.txt", *BYSTANDERS}
OWN = ("runs", "runs/", "cache", "-dash", "lightning_logs", "shards", "my cache", "deep", "checkpoints")
"""Where an accepted command may write: the folders that its arguments name."""


@dataclass
class Finding:
    """An attack that did not end as it should."""

    case: Case
    kind: str
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.kind} [{self.case.family}] {self.case.words} {list(self.case.files.items())[:2]!r:.200}\n    {self.detail}"
        )


def judge(case: Case, outcome: dict[str, Any] | None) -> Finding | None:
    """What is wrong with the outcome of a case; None if nothing is."""
    if outcome is None:
        return Finding(case, "hang or death", "the process ended")
    trace, said = outcome["trace"], outcome["err"] + outcome["out"]
    if trace is not None:
        kind = "hang" if "TimeIsUp" in trace.splitlines()[-1] else "traceback"
        return Finding(case, kind, " | ".join(trace.strip().splitlines()[-5:]))
    if "Traceback (most recent call last)" in said:
        return Finding(case, "traceback", said[-600:])
    code, right = outcome["code"] or 0, 0 if case.right else 2
    if code != right:
        return Finding(case, "wrong exit", f"{code} instead of {right}: {said.strip()[-300:]}")
    inputs = [name for name in outcome["changed"] if name in INPUTS | set(case.files)]
    if inputs and not case.setup and not any(name.startswith("runs/mine") for name in inputs):
        return Finding(case, "changed", str(inputs))
    if case.right:
        strangers = [name for name in outcome["new"] if not name.startswith(OWN)]
        return Finding(case, "misplaced", str(strangers)) if strangers else None
    written = [name for name in outcome["new"] if not name.startswith("cache")]
    if (written or outcome["changed"]) and case.names != [["monitor", "monitor"]]:
        return Finding(case, "written", f"{written} {outcome['changed']}")
    if "error: " not in outcome["err"]:
        return Finding(case, "no message", said[-300:])
    for names in case.names:
        if not any(name in outcome["err"] for name in ([names] if isinstance(names, str) else names)):
            return Finding(case, "no key", f"{names} not in: {outcome['err'][-300:]}")
    return None


class Victim:
    """A process that runs attacks; started again when one of them ends it."""

    def __init__(self) -> None:
        self.process: fork_server.Popen | None = None

    def run(self, case: Case) -> dict[str, Any] | None:
        """The outcome; None if the process died."""
        if self.process is None:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
            self.process = fork_server.Popen(
                [sys.executable, str(Path(__file__).parent / "victim.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(case)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if line:
            outcome: dict[str, Any] = json.loads(line)
            return outcome
        self.close()
        return None

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def run(cases: list[Case], processes: int = 1) -> tuple[list[Finding], float]:
    """Run cases; returns the findings and the CPU seconds of the slowest refusal."""

    def work(part: list[Case]) -> tuple[list[Finding], float]:
        victim, found, slowest = Victim(), [], 0.0
        for case in part:
            outcome = victim.run(case)
            if finding := judge(case, outcome):
                found.append(finding)
            if outcome is not None and not case.right:
                slowest = max(slowest, outcome["seconds"])
        victim.close()
        return found, slowest

    with ThreadPoolExecutor(processes) as threads:
        results = list(threads.map(work, [cases[i::processes] for i in range(processes)]))
    return [finding for found, _ in results for finding in found], max(slowest for _, slowest in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    cases = [case for case in generate(options.seed) if options.family in (None, case.family)][: options.cases]
    found, slowest = run(cases, options.processes)
    print(*found, sep="\n")
    kinds = Counter(finding.kind for finding in found)
    print(f"{len(cases)} attacks ({dict(Counter(case.family for case in cases))}), slowest refusal {slowest:.1f} s CPU")
    print(f"findings: {dict(kinds) or 'none'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
