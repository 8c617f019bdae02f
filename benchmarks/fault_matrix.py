"""Does `doctor` find what is wrong? Short runs with one fault each, and healthy runs, on which it must stay silent.

    python benchmarks/fault_matrix.py --seeds 3 --out runs/faults
    python benchmarks/fault_matrix.py --table --out runs/faults

The first command makes the runs and writes a row of `faults.csv` after each. An interrupted matrix continues. The second prints
the table of the rows. A fault is found if the first finding is one of those that name its cause.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch

import lit_llm.__main__
from lit_llm.config import build  # noqa: F401  # so that forks need not import it
from lit_llm.reporting.doctor.diagnose import diagnose, read_run

HERE = Path(__file__).resolve().parent
STEPS = 160
RATE = 0.01
KINDS: dict[str, list[str]] = {
    "default": [],
    "gpt2": ["--config", "base/gpt2", "--trainer.precision", "32-true", "--optimizer.lr", "3e-3", "--loss.chunk_size", "null"],
}
"""Model kinds: RMSNorm, rotary positions, squared ReLU and Muon; LayerNorm, learned positions, GELU, biases and AdamW."""
ALWAYS = [
    *("--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "64", "--model.block_size", "64"),
    *("--data.micro_batch_size", "8", "--data.global_batch_size", "16", "--schedule.warmup_steps", "10"),
    *("--trainer.log_every_n_steps", "5", "--health.every_n_steps", "10", "--validation.every_n_steps", "40"),
    *("--trainer.limit_val_batches", "8", "--checkpoint.every_n_steps", "1000", "--trainer.max_steps", str(STEPS)),
]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        found: names of rules that name the cause.
        flags: of `fit`.
        callback: a class of faults.py with its only argument.
        ranks: processes.
        data: the text, or a name that `text` knows.
        resumed_with: flags of a second launch that continues the run; `flags` and `callback` are then the first one's.
    """

    found: tuple[str, ...]
    flags: tuple[str, ...] = ()
    callback: tuple[str, ...] = ()
    ranks: int = 1
    data: str = "text"
    resumed: bool = False


def rate(factor: float) -> dict[str, tuple[str, ...]]:
    """Flags that multiply the learning rates, by model kind."""
    muon, adamw = str(RATE * factor), str(3e-3 * factor)
    return {"default": ("--optimizer.lr", muon, "--optimizer.adamw_lr", muon), "gpt2": ("--optimizer.lr", adamw)}


EXPERTS = ("--model.moe.experts", "8", "--model.moe.top_k", "2", "--model.moe.expert_width", "32")
HIGH = ("learning-rate-too-high", "diverged", "loss-not-finite")
FAULTS: dict[str, Fault] = {
    "learning rate ×10": Fault(HIGH, ("rate", "10")),
    "learning rate ×100": Fault(HIGH, ("rate", "100")),
    "learning rate ÷30": Fault(("learning-rate-too-low",), ("rate", str(1 / 30))),
    "no warmup": Fault(("no-warmup",), ("--schedule.warmup_steps", "0")),
    "beta2 0.9999": Fault(("beta2-too-long",), ("--optimizer.betas", "[0.9, 0.9999]")),
    "clip 0.01": Fault(("clipped-at-every-step",), ("--gradient_norm.clip", "0.01")),
    "decay on norms": Fault(("decayed-vectors",), callback=("Weights", "decayed")),
    "labels unshifted": Fault(("targets-not-shifted",), callback=("Targets", "unshifted")),
    "labels shifted twice": Fault(("targets-shifted-twice",), callback=("Targets", "twice")),
    "targets shuffled": Fault(("targets-unrelated",), callback=("Targets", "shuffled")),
    "targets ignored": Fault(("targets-ignored",), callback=("Targets", "ignored")),
    "future leaks": Fault(("future-leak",), callback=("SeesTheFuture",)),
    "one batch repeated": Fault(("batch-repeated",), callback=("Batches", "repeated")),
    "duplicated data": Fault(("duplicated-data",), data="copies"),
    "train text in validation": Fault(("validation-in-training",), data="overlap"),
    "corrupt shard": Fault(("data-damaged",), data="corrupt"),
    "validation tokenised otherwise": Fault(("validation-unlike-training",), callback=("OtherTokenizer",)),
    "vocabulary too large": Fault(("vocabulary-unused",), ("--model.vocab_size", "5000")),
    "dead ReLUs": Fault(("dead-units",), callback=("Weights", "dead")),
    "frozen block": Fault(("parameters-not-trained",), callback=("Weights", "frozen")),
    "initial weights ×50": Fault(("initial-weights",), ("--model.init_std", "1.0")),
    "fp16 overflow": Fault(("fp16-overflow",), ("--trainer.precision", "16-mixed"), callback=("Weights", "large")),
    "bf16-true at a small rate": Fault(("updates-rounded-away",), ("--trainer.precision", "bf16-true", "rate", str(1 / 30))),
    "micro-batches added": Fault(("loss-scale",), callback=("SumsMicroBatches",)),
    "garbage batches": Fault(("loss-spikes",), callback=("Batches", "garbage")),
    "slow loader": Fault(("slow-loader",), callback=("Batches", "slow")),
    "schedule restarted": Fault(("schedule-restarted",), callback=("RestartedSchedule",), resumed=True),
    "over-fitting": Fault(("over-fitting", "data-too-small"), ("--model.n_embd", "128"), data="12000"),
    "data too small": Fault(("data-too-small",), data="5000"),
    "a rank with other weights": Fault(("ranks-differ",), callback=("Weights", "rank"), ranks=2),
    "straggler": Fault(("straggler",), callback=("SlowRank",), ranks=2),
    "experts without balance": Fault(("experts-unbalanced",), EXPERTS),
    "biases of experts ×300": Fault(("expert-bias-too-large",), (*EXPERTS, "--expert_balance.rate", "0.3")),
}
HEALTHY: dict[str, Fault] = {
    "as it is": Fault(()),
    "WSD": Fault((), ("--schedule", "WSD")),
    "bf16-mixed": Fault((), ("--trainer.precision", "bf16-mixed")),
    "dropout": Fault((), ("--model.dropout", "0.1")),
    "characters": Fault((), ("--data.tokenizer", "Characters")),
    "shards": Fault((), data="shards"),
    "two ranks": Fault((), ranks=2),
    "experts and a loss": Fault((), (*EXPERTS, "--model.moe.balance", "0.01")),
    "experts and biases": Fault((), (*EXPERTS, "--expert_balance", "ExpertBalance", "--model.moe.router", "sigmoid")),
}


class Texts:
    """The texts of the runs: Python's reference, whole or in parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.text = "\n\n".join(topics[name] for name in sorted(topics))
        (folder / "held.txt").write_text(self.text[-40_000:])
        (folder / "train.txt").write_text(self.text[:-40_000])

    def flags(self, data: str) -> list[str]:
        """The flags that train on it. Validation text is other text, except for "overlap"."""
        train, held = self.folder / "train.txt", self.folder / "held.txt"
        if data in ("shards", "corrupt"):
            path = str(self._shards(data))
            return [*("--data", "TokenShards", "--data.path", path), *("--data.vocab_size", "null", "--data.seed", "0")]
        if data == "copies":
            part = self.text[:60_000]
            train = self._write("copies", part + self.text[60_000:90_000] + part + self.text[90_000:100_000] + part + part)
        elif data == "overlap":
            train = self._write("short", self.text[:150_000])
            held = self._write("inside", self.text[40_000:80_000])
        elif data.isdigit():
            train = self._write(data, self.text[: int(data)])
        return ["--data", "TextFiles", "--data.train", str(train), "--data.val", str(held), "--data.tokenizer", "Bytes"]

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.txt"
        path.write_text(text)
        return path

    def _shards(self, data: str) -> Path:
        out = self.folder / data
        if not out.exists():
            command = ["prepare", *self.flags("text"), "--out", str(out)]
            subprocess.run([sys.executable, "-m", "lit_llm", *command], check=True, stdout=subprocess.DEVNULL)
            if data == "corrupt":
                shard = next(out.glob("train*.bin"))
                content = bytearray(shard.read_bytes())
                content[len(content) // 2 : len(content) // 2 + 40_000] = bytes(40_000)
                shard.write_bytes(content)
        return out


def words(fault: Fault, kind: str, seed: int, texts: Texts, run: Path) -> list[str]:
    """The command line of `fit`."""
    flags = list(fault.flags)
    if "rate" in flags:
        at = flags.index("rate")
        flags[at : at + 2] = rate(float(flags[at + 1]))[kind]
    found = ["fit", *KINDS[kind], *texts.flags(fault.data), *ALWAYS, *flags]
    if fault.ranks > 1:
        found += ["--trainer.devices", str(fault.ranks), "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu"]
    return [*found, "--seed_everything", str(seed), "--run_dir", str(run)]


def injected(callback: tuple[str, ...]) -> list[str]:
    """The flag that adds a fault."""
    if not callback:
        return []
    name, *kind = callback
    return [
        "--trainer.callbacks+",
        json.dumps([{"class_path": f"faults.{name}", "init_args": {"kind": kind[0]} if kind else {}}]),
    ]


def launches(fault: Fault, command: list[str]) -> Iterator[list[str]]:
    """The command lines of a run, one after the other."""
    if not fault.resumed:
        yield [*command, *injected(fault.callback)]
        return
    half = ["--schedule.total_steps", str(STEPS), "--checkpoint.every_n_steps", str(STEPS // 2)]
    yield [*command, *half, "--trainer.max_steps", str(STEPS // 2)]
    yield [*command, *half, *injected(fault.callback), "--resume", "auto"]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True, help="folder of the runs and of faults.csv")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--only", help="names of faults, separated by commas")
    flags.add_argument("--kinds", default=",".join(KINDS))
    flags.add_argument("--keep", action="store_true", help="keep the runs, to look at")
    flags.add_argument("--again", action="store_true", help="read kept runs again instead of making them")
    flags.add_argument("--table", action="store_true", help="print the table of the rows and exit")
    own = flags.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rows = own.out / "faults.csv"
    if own.table:
        print(table(rows))
        return
    cases = {name: fault for name, fault in (FAULTS | HEALTHY).items() if own.only is None or name in own.only.split(",")}
    texts = Texts(own.out / "text")
    done = {tuple(row[:3]) for row in read(rows)} if not own.again else set()
    if own.again:
        rows.unlink(missing_ok=True)
    for seed, kind, (name, fault) in itertools.product(range(own.seeds), own.kinds.split(","), cases.items()):
        if (name, kind, str(seed)) in done:
            continue
        run = own.out / f"{name.replace(' ', '_').replace(',', '')}-{kind}-{seed}"
        if not own.again:
            shutil.rmtree(run, ignore_errors=True)
            for command in launches(fault, words(fault, kind, seed, texts, run)):
                fit(command, own.out / f"{run.name}.log", ranks=fault.ranks)
        findings = [finding.name for finding in diagnose(read_run(run)[0])] if run.is_dir() else ["no run"]
        with open(rows, "a", newline="") as file:
            csv.writer(file).writerow([name, kind, seed, "right" if right(fault, findings) else "WRONG", *findings])
        print(f"{name}, {kind}, {seed}: {'right' if right(fault, findings) else 'WRONG'} {findings}", flush=True)
        if not own.keep and not own.again:
            shutil.rmtree(run, ignore_errors=True)
    print(table(rows))


def fit(command: list[str], log: Path, *, ranks: int) -> None:
    """Train in another process, which sees the faults. Its exit code may be any: some faults end the run."""
    with open(log, "a") as file:
        if ranks > 1:
            environment = os.environ | {"PYTHONPATH": str(HERE)}
            subprocess.run([sys.executable, "-m", "lit_llm", *command], stdout=file, stderr=file, env=environment, check=False)
            return
        child = os.fork()  # a fork has imported everything
        if child:
            os.waitpid(child, 0)
            return
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            code = lit_llm.__main__.main(command)
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def right(fault: Fault, findings: list[str]) -> bool:
    """Whether the first finding names the cause, or a healthy run has none."""
    return findings[0] in fault.found if fault.found and findings else not fault.found and not findings


def read(rows: Path) -> list[list[str]]:
    if not rows.exists():
        return []
    with open(rows, newline="") as file:
        return list(csv.reader(file))


def table(rows: Path) -> str:
    """The confusion matrix in Markdown: what came first, by fault."""
    by_fault: dict[str, list[list[str]]] = {}
    for row in read(rows):
        by_fault.setdefault(row[0], []).append(row)
    lines = ["| fault | runs | right cause first | other first findings |", "|---|---|---|---|"]
    for name, found in by_fault.items():
        wrong = Counter(row[4] if len(row) > 4 else "none" for row in found if row[3] != "right")
        others = ", ".join(f"{what} ({count})" for what, count in wrong.most_common()) or "–"
        lines.append(f"| {name} | {len(found)} | {sum(row[3] == 'right' for row in found)} | {others} |")
    faulty = [row for row in read(rows) if row[0] in FAULTS]
    healthy = [row for row in read(rows) if row[0] in HEALTHY]
    for said, group in (("faults with the right cause first", faulty), ("silent healthy runs", healthy)):
        lines.append(f"\n{said}: {sum(row[3] == 'right' for row in group)} of {len(group)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
