"""Files of a run and of its data that somebody replaced: what each command does with each damage.

python tests/attack/replaced_files.py [--first 0] [--last 2000] [--only SUBSTRING]

A run is trained once. For each triple of file, damage and command, its folder is copied, damaged, and the command is run in
this process. Judged: no traceback, no hang, no more than `MEMORY_BYTES`, and nothing changed outside of what the command owns.
Each command runs in a fork, so that one can be ended.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 60
MEMORY_BYTES = 2**30
"""Above what the process has when the command begins."""
RECIPE = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TokenShards
  init_args: {train: shards/train_*.bin, val: shards/val_*.bin, packing: best_fit, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 1}}
validation: {every_n_steps: 2}
checkpoint: {every_n_steps: 2}
samples: {prompts: [a], every_n_steps: 2, max_new_tokens: 4}
trainer: {max_steps: 4, log_every_n_steps: 1, accelerator: cpu, limit_val_batches: 1, logger: true}
"""
TEXT = "\n\n".join(f"document {i} repeats itself, {i * i} and {i % 7}" for i in range(80))
OUTSIDE = "outside/secret.txt"


def outside(path: Path) -> Path:
    return path.absolute().parents[len(path.parts) - 1] / OUTSIDE


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(path))


def _change(change: Callable[[bytes], bytes]) -> Callable[[Path, bytes], None]:
    return lambda path, before: void(path.write_bytes(change(before)))


def void(_: Any) -> None:
    pass


DAMAGES: dict[str, Callable[[Path, bytes], Any]] = {
    "fifo": lambda path, _: os.mkfifo(path),
    "zero": lambda path, _: path.symlink_to("/dev/zero"),
    "full": lambda path, _: path.symlink_to("/dev/full"),
    "self link": lambda path, _: path.symlink_to(path.name),
    "dangling link": lambda path, _: path.symlink_to("nowhere"),
    "link outside": lambda path, _: path.symlink_to(outside(path)),
    "folder": lambda path, _: path.mkdir(),
    "socket": lambda path, _: _socket(path),
    "empty": _change(lambda _: b""),
    "NUL": _change(lambda _: b"\0" * 4096),
    "brackets": _change(lambda _: b"[" * 200_000),
    "braces": _change(lambda _: b'{"a":' * 200_000),
    "null": _change(lambda _: b"null\n"),
    "number": _change(lambda _: b"3\n"),
    "list": _change(lambda _: b"[1, {}]\n"),
    "object": _change(lambda _: b"{}\n"),
    "half": _change(lambda before: before[: len(before) // 2]),
    "twice": _change(lambda before: before * 2),
    "one bit": _change(lambda b: bytes([*b[: len(b) // 2], b[len(b) // 2] ^ 8, *b[len(b) // 2 + 1 :]]) if b else b"x"),
    "no UTF-8": _change(lambda before: b"\xff\xfe\xfa" + before),
    "long line": _change(lambda _: b"a" * 5_000_000),
    "sparse": lambda path, _: (path.touch(), os.truncate(path, 2**38)),
}
FILES = (
    *("config.yaml", "metrics.jsonl", "events", "plan.json", "tokenizer.json", "lock.json", "ended.json", "checkpoints"),
    *(".config.yaml.partial", ".metrics.jsonl.partial", ".plan.json.partial", "hparams.yaml"),
    *("checkpoints/last.ckpt", "checkpoints/last.ckpt.tmp", "checkpoints/best.ckpt", "checkpoints/newest"),
    *("checkpoints/newest/checkpoint.pt", "checkpoints/newest/manifest.json", "checkpoints/newest/damaged.json"),
)
SHARDS = ("meta.json", "tokenizer.json", "train_000000.bin", "train_000000.docs", "val_000000.bin", "plan of packing")
FIT = ["fit", "--config", "recipe.yaml", "--run_dir", "runs/mine", "--resume", "auto", "--trainer.max_steps", "6"]
COMMANDS = {
    "fit": FIT,
    "report": ["report", "--run", "runs/mine", "--out", "page.html"],
    "doctor": ["doctor", "--run", "runs/mine"],
    "generate": ["generate", "--run", "runs/mine", "--prompt", "a", "--max_new_tokens", "2"],
    "validate": ["validate", "--run", "runs/mine"],
    "export": ["export", "--run", "runs/mine", "--out", "hf"],
    "init_from": ["fit", "--config", "recipe.yaml", "--run_dir", "runs/new", "--init_from", "runs/mine"],
    "check": ["check", "--config", "recipe.yaml"],
    "plan": ["plan", "--config", "recipe.yaml", "--from_run", "runs/mine"],
}


class Triple(NamedTuple):
    file: str
    damage: str
    command: str


def triples() -> Iterator[Triple]:
    """All of them, in an order in which neighbours differ in each part."""
    found = [
        Triple(file, damage, command)
        for damage in DAMAGES
        for file in (*(f"runs/mine/{name}" for name in FILES), *(f"shards/{name}" for name in SHARDS))
        for command in (("fit", "check", "doctor") if file.startswith("shards") else ("fit", "report", "generate", "validate"))
    ]
    found += [
        Triple(f"runs/mine/{name}", damage, command)
        for damage in DAMAGES
        for name in ("config.yaml", "tokenizer.json", "checkpoints/newest/manifest.json", "metrics.jsonl", "plan.json")
        for command in ("doctor", "export", "init_from", "plan")
    ]
    step = 1009  # a prime that divides no count of triples
    return (found[i * step % len(found)] for i in range(len(found)))


def make_world(folder: Path) -> None:
    """A run of four steps, and its data."""
    os.chdir(folder)
    (folder / "outside").mkdir()
    (folder / OUTSIDE).write_text('{"pid": 1}\n')
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "text.txt").write_text(TEXT)
    from lit_llm.__main__ import main

    prepare = ["prepare", "--data", "TextFiles", "--data.paths", "text.txt", "--data.tokenizer", "Bytes", "--out", "shards"]
    assert main(prepare) == 0
    assert main([*FIT[:-1], "4"]) == 0


def place(world: Path, file: str) -> Path:
    """The path of a file by its name in `FILES`, relative to the world."""
    runs = world / "runs/mine"
    newest = max((runs / "checkpoints").glob("step-*.ckpt")).name
    if file == "runs/mine/events":
        return next(runs.glob("events.*")).relative_to(world)
    if file == "shards/plan of packing":
        return next((world / "shards").glob("*_pack-*.idx")).relative_to(world)
    return Path(file.replace("newest", newest))


def judge(world: Path, triple: Triple, folder: Path) -> str | None:
    """What is wrong with the outcome; None if nothing is."""
    shutil.copytree(world, folder, symlinks=True)
    os.chdir(folder)
    path = place(folder, triple.file)
    before = path.read_bytes() if path.is_file() else b""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    DAMAGES[triple.damage](path, before)
    kept = {each: (folder / each).read_bytes() for each in (OUTSIDE, "text.txt", "recipe.yaml")}
    said, code, memory = run(COMMANDS[triple.command], folder)
    if code is None:
        return f"hang: {said[-300:]}"
    if "Traceback (most recent call last)" in said:
        return "traceback: " + " | ".join(said.strip().splitlines()[-4:])[-600:]
    if code not in (0, 1, 2):
        return f"exit {code}: {said[-300:]}"
    if code == 2 and "error: " not in said:
        return f"no message: {said[-300:]}"
    if memory > MEMORY_BYTES:
        return f"memory: {memory / 1e9:.1f} GB"
    changed = [each for each, content in kept.items() if (folder / each).read_bytes() != content]
    return f"changed: {changed}" if changed else None


def run(words: list[str], folder: Path) -> tuple[str, int | None, int]:
    """Output, exit code (None: a hang) and bytes of memory above those of the beginning, of a command in a fork."""
    output = folder.with_name(f"{folder.name}.out")
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            from lit_llm.__main__ import main

            try:
                code = main(list(words))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 70
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + 3 * SECONDS
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.wait4(child, 0)
            return output.read_text(errors="replace"), None, 0
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    memory = 1024 * max(0, usage.ru_maxrss - began)
    return output.read_text(errors="replace"), None if code == -signal.SIGXCPU or code == -signal.SIGKILL else code, memory


def attack(chosen: list[Triple]) -> list[tuple[Triple, str]]:
    """Triples that did not end as they should, and why."""
    os.environ["OMP_NUM_THREADS"] = "1"
    home = os.getcwd()
    import lit_llm.config.build
    import lit_llm.reporting.doctor
    import lit_llm.training.fit  # noqa: F401

    found = []
    with tempfile.TemporaryDirectory() as top:
        world = Path(top) / "world"
        world.mkdir()
        os.environ["LIT_LLM_CACHE"] = str(Path(top) / "cache")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                make_world(world)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for number, triple in enumerate(chosen):
            folder = Path(top) / str(number)
            try:
                problem = judge(world, triple, folder)
            finally:
                os.chdir(home)
            if problem:
                found.append((triple, problem))
                print(json.dumps([*triple, problem]), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=10_000)
    parser.add_argument("--only", default="")
    own = parser.parse_args()
    chosen = [triple for triple in triples() if own.only in " ".join(triple)][own.first : own.last]
    found = attack(chosen)
    print(f"{len(chosen)} triples: {dict(Counter(problem.partition(':')[0] for _, problem in found)) or 'nothing found'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
