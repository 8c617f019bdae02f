"""Files of runs, data and models that somebody replaced: what each command does with each damage.

python tests/attack/replaced_files.py [--first 0] [--last 2000] [--only SUBSTRING] [--per_pair 1] [--table]

Runs, data and exported models are made once. For each file, damage and command the world is copied, damaged, and the command is
run in a fork of this process, so that it can be ended. Judged:

- hang: more than `SECONDS` of processor time, or `WALL_SECONDS`
- traceback, or an exit code other than 0, 1 and 2, or one without a message
- silent: exit code 0, another result than without the damage, and no word of the file, although the content cannot be right
- changed: a file that the command does not own has another content, or is new
- memory: more than `MEMORY_BYTES` above those at the begin
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import damages
import torch
from damages import CONTENTS, DAMAGES, KINDS, OUTSIDE

SECONDS, WALL_SECONDS = 40, 180
MEMORY_BYTES = 2**30
DISK_BYTES = 2**28
"""Largest file that a command may write."""
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
HARDWARE = """\
source: a test
device_name: mine
compute_capability: 8
peak_tflops: {bf16: 312.0, tf32: 156.0, fp32: 19.5, fp8: null}
memory_gb: 40
memory_gbps: 1555
node_gbps: 300
network_gbps: 25
devices_per_node: 8
price_usd_hour: [1.0, 3.0]
watts: 400
host: {copy_gbps: 27, memory_gbps: 205, memory_gb: 1024}
"""
TEXT = "\n\n".join(f"document {i} repeats itself, {i * i} and {i % 7}" for i in range(80))
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"What is {i} + 1?"}, {"role": "assistant", "content": f"It is {i + 1}."}]}
    for i in range(20)
]
FIT = "fit --config recipe.yaml --run_dir runs/mine --resume auto --trainer.max_steps"
NEW = "fit --config recipe.yaml --run_dir runs/new --trainer.max_steps 1"
TEXT_DATA = "--data TextFiles --data.paths texts --data.tokenizer BPE --data.tokenizer.vocab_size 260"
PREPARE = "prepare --data TextFiles --data.paths text.txt --data.tokenizer Bytes --out shards"
CHATS = "--data.tokenizer TokenizerJSON --data.tokenizer.path chatml"
MADE = (
    PREPARE,
    f"{FIT} 4",
    "export --run runs/mine --out hf",
    "export --run runs/mine --out hf-parts --max_shard_gb 0.00002",
    "export --run runs/mine --out dcp --format dcp",
    "consolidate --run runs/mine --out whole.ckpt",
    "curve --run runs/mine --out curve.csv",
    f"{NEW.replace('runs/new', 'runs/lora')} --init_from runs/mine --lora.rank 2",
    "export --run runs/lora --out adapter --adapter true",
    f"prepare --chat_template auto --data.paths chat.jsonl {CHATS} --out chats",
    f"{NEW.replace('runs/new', 'runs/text')} {TEXT_DATA}",
)


class Command(NamedTuple):
    words: str
    owns: str
    """Pattern of the paths that it may write."""


COMMANDS = {
    "fit": Command(f"{FIT} 6", r"runs/mine\b|.*_pack.*\.idx"),
    "report": Command("report --run runs/mine --out page.html", "page.html"),
    "doctor": Command("doctor --run runs/mine", "$"),
    "generate": Command("generate --run runs/mine --prompt a --max_new_tokens 2", "$"),
    "validate": Command("validate --run runs/mine", r".*_pack.*\.idx"),
    "export": Command("export --run runs/mine --out new", "new"),
    "consolidate": Command("consolidate --run runs/mine --out new", "new"),
    "curve": Command("curve --run runs/mine --out new", "new"),
    "init_from": Command(f"{NEW} --init_from runs/mine", r"runs/new|.*_pack.*\.idx"),
    "check": Command("check --config recipe.yaml", r"cache|.*_pack.*\.idx"),
    "plan": Command("plan --config derived.yaml", "$"),
    "plan from_run": Command("plan --config recipe.yaml --from_run runs/mine", "$"),
    "plan hardware": Command("plan --config recipe.yaml --hardware hardware.yaml", "$"),
    "new": Command(NEW.replace("recipe", "derived"), r"runs/new|.*_pack.*\.idx"),
    "check_against": Command(f"{NEW} --check_against curve.csv", r"runs/new|.*_pack.*\.idx"),
    "import": Command("import --from hf --out new", "new"),
    "import parts": Command("import --from hf-parts --out new", "new"),
    "import dcp": Command("import --from dcp --out new", "new"),
    "import adapter": Command("import --from adapter --init_from runs/mine --out new", "new"),
    "generate lora": Command("generate --run runs/lora --prompt a --max_new_tokens 2", "$"),
    "export lora": Command("export --run runs/lora --out new", "new"),
    "fit lora": Command("fit --run runs/lora --resume auto --trainer.max_steps 2", r"runs/lora\b|.*_pack.*\.idx"),
    "fit text": Command(f"{NEW} {TEXT_DATA}", "runs/new|cache"),
    "fit chats": Command(f"{NEW} --data.train chats/train_*.bin --data.val chats/val_*.bin", r"runs/new|.*_pack.*\.idx"),
    "prepare": Command(f"prepare {TEXT_DATA} --out new", r"new|\.new"),
    "prepare again": Command(f"{PREPARE} --replace true", r"shards|\.shards"),
    "prepare chats": Command(f"prepare --chat_template auto --data.paths chat.jsonl {CHATS} --out new", r"new|\.new"),
    "prepare ids": Command(f"prepare --data TextFiles --data.paths text.txt {CHATS} --data.tokenizer.eos_token <|im_end|> --out new", r"new|\.new"),  # noqa: E501
    "clean": Command("clean --data.paths texts --exact_duplicates true --against text.txt --out new", r"new|\.new"),
    "whole": Command("generate --run runs/mine --ckpt_path whole.ckpt --prompt a --max_new_tokens 2", "$"),
}  # fmt: skip
RUN = ("generate", "report", "doctor", "export", "fit", "curve", "consolidate", "validate", "plan from_run", "init_from")
LORA = ("generate lora", "export lora", "fit lora")
FILES: dict[str, tuple[str, ...]] = {
    **{
        f"runs/mine/{name}": RUN
        for name in (
            *("config.yaml", "metrics.jsonl", "events", "plan.json", "tokenizer.json", "checkpoints", "checkpoints/newest"),
            *("checkpoints/last.ckpt", "checkpoints/newest/checkpoint.pt", "checkpoints/newest/manifest.json"),
        )
    },
    **{
        f"runs/mine/{name}": ("fit", "report", "generate")
        for name in (
            *("lock.json", "ended.json", ".config.yaml.partial", ".metrics.jsonl.partial", ".plan.json.partial"),
            *("hparams.yaml", "checkpoints/last.ckpt.tmp", "checkpoints/best.ckpt", "checkpoints/newest/damaged.json"),
        )
    },
    **{
        f"shards/{name}": ("doctor", "validate", "fit", "doctor", "prepare again")
        for name in (
            *("meta.json", "tokenizer.json", "train_000000.bin", "train_000000.docs", "val_000000.bin", "val_000000.docs"),
            "plan of packing",
        )
    },
    **{
        name: ("fit chats",)
        for name in (*("chats/train_000000.mask", "chats/meta.json", "chats/chat_template.jinja", "chats/train_000000.docs"),
                     "chats/generation_config.json")
    },
    **{f"cache/tokens/key/{name}": ("fit text",)
       for name in ("meta.json", "tokenizer.json", "train_000000.bin", "val_000000.docs", "plan of packing")},
    "recipe.yaml": ("plan", "check", "plan", "new"),
    "derived.yaml": ("plan", "plan", "new"),
    "hardware.yaml": ("plan hardware",),
    "curve.csv": ("check_against",),
    "whole.ckpt": ("whole",),
    "text.txt": ("clean", "prepare again"),
    ".shards.log": ("prepare again",),
    "texts": ("prepare", "clean", "fit text"),
    "texts/a.txt": ("prepare", "clean", "fit text"),
    "texts/b.jsonl": ("prepare", "clean", "fit text"),
    "chat.jsonl": ("prepare chats",),
    **{f"chatml/{name}": ("prepare ids", "prepare chats")
       for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")},
    **{f"hf/{name}": ("import",)
       for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                    "chat_template.jinja", "tokenizer.model", "pytorch_model.bin", "document_ids.json")},
    **{f"hf-parts/{name}": ("import parts",) for name in ("model.safetensors.index.json", "model-00002-of-00003.safetensors")},
    **{f"dcp/{name}": ("import dcp",) for name in (".metadata", "__0_0.distcp")},
    **{f"adapter/{name}": ("import adapter",) for name in ("adapter_config.json", "adapter_model.safetensors")},
    **{f"runs/lora/{name}": LORA
       for name in ("config.yaml", "tokenizer.json", "checkpoints/newest/checkpoint.pt", "checkpoints/newest/manifest.json")},
}  # fmt: skip
TEXTS = re.compile(r"texts.*|text\.txt|chat\.jsonl|.*\.log|.*\.jinja|.*\.partial|.*\.tmp|hparams.yaml|curve.csv")
"""Any text is right there, as far as anybody can know, or nobody reads it."""
OPTIONAL = re.compile(r".*/(tokenizer_config|generation_config|special_tokens_map)\.json")
"""Any object is right there."""
CHECKED = re.compile(r".*/(checkpoint\.pt|manifest\.json)|runs/.*/tokenizer\.json")
"""A checksum tells each change of a byte. Those of shards are compared by `doctor`."""


class Triple(NamedTuple):
    file: str
    damage: str
    command: str


def _pairs() -> Iterator[tuple[str, str, Callable[[Path, bytes], Any], tuple[str, ...]]]:
    """(file, damage, what does it, the commands)."""
    for file, commands in FILES.items():
        for name, damage in DAMAGES.items():
            yield file, name, damage, commands
    for name in damages.TEMPLATES:
        yield "chatml/chat_template.jinja", f"template {name}", damages.template(name), ("prepare chats",)
        yield "hf/chat_template.jinja", f"template {name}", damages.template(name), ("import",)
    for name in damages.TOKENIZERS:
        yield "chatml/tokenizer.json", f"tokenizer {name}", damages.tokenizer(name), ("prepare ids", "prepare chats")
        yield "hf/tokenizer.json", f"tokenizer {name}", damages.tokenizer(name), ("import",)


def triples(places: list[tuple[Any, ...]], per_pair: int = 100) -> list[Triple]:
    """All of them, first one of each pair of file and damage, in an order in which neighbours differ in each part.

    Args:
        places: of values in a checkpoint.
    """
    pairs = [(file, name, commands) for file, name, _, commands in _pairs()]
    commands = ("generate", "export", "fit", "generate", "consolidate", "init_from", "generate", "validate", "fit")
    pairs += [(f"value {json.dumps(place)}", name, commands) for place in places for name in (*damages.VALUES, damages.ABSENT)]
    step = 100_003  # a prime that divides no count of pairs
    pairs = [pairs[i * step % len(pairs)] for i in range(len(pairs))]
    return [
        Triple(file, name, commands[(number + turn) % len(commands)])
        for turn in range(per_pair)  # cheap commands stand in a list more than once
        for number, (file, name, commands) in enumerate(pairs)
        if turn < len(commands)
    ]


class World:
    """A folder with runs, data and models; commands that run in forks."""

    def __init__(self, top: Path) -> None:
        self.top, self.folder = top, top / "world"
        self.folder.mkdir()
        (self.folder / "outside").mkdir()
        for name, content in {
            OUTSIDE: '{"pid": 1}\n',
            "recipe.yaml": RECIPE,
            "derived.yaml": "base: recipe.yaml\ntrainer: {max_steps: 2}\n",
            "hardware.yaml": HARDWARE,
            "text.txt": TEXT,
            "texts/a.txt": TEXT,
            "texts/b.jsonl": '{"text": "one document of it"}\n' * 3,
            "chat.jsonl": "".join(f"{json.dumps(row)}\n" for row in CONVERSATIONS),
        }.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(content)
        from ingest.chat_templates import unmarked, write_tokenizer

        write_tokenizer("chatml", self.folder / "chatml")
        (self.folder / "chatml/chat_template.jinja").write_text(unmarked("chatml"))
        for words in MADE:
            outcome = self.call(words, self.folder)
            assert outcome.code == 0, (words, outcome.said)
        self.newest = max((self.folder / "runs/mine/checkpoints").glob("step-*.ckpt"))
        self.places = list(damages.paths(torch.load(self.newest / "checkpoint.pt", weights_only=True), 0))
        self._right: dict[str, frozenset[str]] = {}
        self._found = {(file, name): damage for file, name, damage, _ in _pairs()}

    def path(self, file: str) -> Path:
        """The path of a file by its name in `FILES`, relative to the world."""
        [key] = os.listdir(self.folder / "cache/tokens")
        folder, _, name = file.replace("tokens/key", f"tokens/{key}").rpartition("/")
        if name in ("events", "plan of packing"):
            pattern = {"events": "events.*", "plan of packing": "*_pack-*.idx"}[name]
            return next((self.folder / folder).glob(pattern)).relative_to(self.folder)
        if folder.startswith("cache"):
            return Path(folder) / name
        newest = max((self.folder / "/".join(file.split("/")[:2]) / "checkpoints").glob("step-*.ckpt"), default=self.newest)
        return Path(file.replace("newest", newest.name))

    def copy(self, folder: Path, command: str) -> None:
        ignored = shutil.ignore_patterns(*(() if command == "import dcp" else ("dcp",)))
        shutil.copytree(self.folder, folder, symlinks=True, ignore=ignored)

    def right(self, command: str) -> frozenset[str]:
        """What two runs of a command without damage have in common: lines of the output, and files with their hashes."""
        if command not in self._right:
            results = []
            for turn in range(2):
                folder = self.top / f"right {turn}"
                self.copy(folder, command)
                outcome = self.call(COMMANDS[command].words, folder)
                assert outcome.code == 0, (command, outcome.said)
                results.append(_result(outcome.said, folder, COMMANDS[command]))
                shutil.rmtree(folder)
                time.sleep(1.1)  # times in files differ
            self._right[command] = results[0] & results[1]
        return self._right[command]

    def judge(self, triple: Triple, folder: Path) -> tuple[str | None, int]:
        """What is wrong with the outcome, None if nothing is; bytes of memory that the command took."""
        command = COMMANDS[triple.command]
        self.copy(folder, triple.command)
        if triple.file.startswith("value "):
            path = self.path("runs/mine/checkpoints/newest/checkpoint.pt")
            damages.change_value((folder / path).parent, tuple(json.loads(triple.file.removeprefix("value "))), triple.damage)
        else:
            path = self.path(triple.file)
            before = (folder / path).read_bytes() if (folder / path).is_file() else b""
            if (folder / path).is_dir() and not (folder / path).is_symlink():
                shutil.rmtree(folder / path)
            (folder / path).unlink(missing_ok=True)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            self._found[triple.file, triple.damage](folder / path, before)
        kept = _tree(folder)
        outcome = self.call(command.words, folder)
        memory = outcome.memory
        if outcome.code is None:
            return f"hang: {outcome.said[-300:]}", memory
        if "Traceback (most recent call last)" in outcome.said:
            return "traceback: " + " | ".join(outcome.said.strip().splitlines()[-6:])[-700:], memory
        if outcome.code not in (0, 1, 2):
            return f"exit {outcome.code}: {outcome.said[-300:]}", memory
        if outcome.code and not re.search("error: .", outcome.said):
            return f"no message: {outcome.code} {outcome.said[-300:]}", memory
        if memory > MEMORY_BYTES:
            return f"memory: {memory / 1e9:.1f} GB", memory
        now = _tree(folder)
        changed = [each for each in kept.keys() | now.keys() if kept.get(each) != now.get(each)]
        strangers = sorted(each for each in changed if not re.match(rf"{command.owns}|runs/mine/.*/damaged\.json", each))
        if strangers:
            return f"changed: {strangers} ({outcome.code})", memory
        if outcome.code == 0 and self._cannot_be_right(triple) and path.name not in outcome.said:
            right = self.right(triple.command) - _result(outcome.said, folder, command)  # last: it takes two runs
            missing = {each for each in right if not each.startswith(f"{path}:")}
            if missing and not any(part in outcome.said for part in (path.parent.name, path.stem) if len(part) > 6):
                return f"silent: without {sorted(missing)[:3]!r:.300}; said {outcome.said[-200:]!r}", memory
        return None, memory

    def _cannot_be_right(self, triple: Triple) -> bool:
        if triple.file.startswith("value "):
            return triple.damage != damages.ABSENT
        if triple.damage in KINDS:
            return triple.damage not in ("missing", "link outside")
        if triple.damage.startswith(("template ", "tokenizer ")):
            return False
        if TEXTS.fullmatch(triple.file):
            return False
        if OPTIONAL.fullmatch(triple.file) and triple.damage in ("object", "many keys", "huge number", "surrogate"):
            return False
        return triple.damage in CONTENTS or bool(CHECKED.fullmatch(triple.file))

    def call(self, words: str, folder: Path) -> Outcome:
        """Run a command in a fork."""
        output = self.top / "output"
        modules = self.top / "modules"
        child = os.fork()
        if child == 0:
            _command(words.split(" "), folder, self.top)
        end = time.monotonic() + WALL_SECONDS
        while True:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid or time.monotonic() > end:
                break
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it left
        if not pid:
            os.wait4(child, 0)
        said = output.read_text(errors="replace")
        if not pid:
            return Outcome(said, None, 0)
        for name in modules.read_text().split() if modules.exists() else ():
            if name not in sys.modules:  # the next fork has them
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        modules.unlink(missing_ok=True)
        code = os.waitstatus_to_exitcode(status)
        memory = 1024 * usage.ru_maxrss - int((self.top / "memory").read_text())
        return Outcome(said, None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code, memory)


class Outcome(NamedTuple):
    said: str
    code: int | None
    """None: a hang."""
    memory: int
    """Bytes above those of the beginning."""


def _command(words: list[str], folder: Path, top: Path) -> None:
    code = 70
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        (top / "memory").write_text(str(resident))
        descriptor = os.open(top / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.setsid()
        os.chdir(folder)
        os.environ["LIT_LLM_CACHE"] = "cache"
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, DISK_BYTES))
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115  # as an interpreter's
        from lit_llm.__main__ import main

        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        (top / "modules").write_text("\n".join(sys.modules))
    finally:
        os._exit(code)


def _tree(folder: Path) -> dict[str, str]:
    """What is at each path below a folder."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            large = status.st_size > 2**26
            content = str(status.st_size) if large else hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = f"{stat.S_IFMT(status.st_mode)}{os.readlink(path) if path.is_symlink() else ''}"
        found[str(path.relative_to(folder))] = content
    return found


def _result(said: str, folder: Path, command: Command) -> frozenset[str]:
    # Caches and plans of packing are made anew where they are damaged, and `--replace` keeps what was there before.
    made_again = re.compile(r"cache|.*_pack.*\.idx|.*\.1/|.*/damaged\.json")
    tree = _tree(folder)
    names = {name for name in tree if re.match(command.owns, name) and not made_again.match(name)}
    files = {f"{name}: {tree[name]}" for name in names}
    said = re.sub(r"\(\d+s\)", "", said)
    return frozenset(files | {line.strip() for line in said.splitlines() if line.strip()})


def attack(world: World, chosen: list[Triple]) -> tuple[list[tuple[Triple, str]], Counter[str], Counter[str]]:
    """Triples that did not end as they should, and why; of each family the number of triples and the most memory."""
    found, tried, memory = [], Counter[str](), Counter[str]()
    gc.freeze()
    began = time.monotonic()
    home = os.getcwd()
    for number, triple in enumerate(chosen):
        folder = world.top / str(number)
        try:
            problem, taken = world.judge(triple, folder)
        except Exception as error:  # of the attack itself, which goes on
            problem, taken = f"not judged: {type(error).__name__}: {error}", 0
        finally:
            os.chdir(home)
        tried[family(triple)] += 1
        memory[family(triple)] = max(memory[family(triple)], taken)
        if not number % 50:
            print(f"# {number} of {len(chosen)} after {time.monotonic() - began:.0f} s", flush=True)
        if problem:
            found.append((triple, problem))
            print(json.dumps([*triple, problem], ensure_ascii=False), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return found, tried, memory


def family(triple: Triple) -> str:
    if triple.file.startswith("value "):
        return "values in a checkpoint with right checksums"
    if triple.damage.startswith(("template ", "tokenizer ")):
        return "chat templates" if triple.damage.startswith("template ") else "tokenizers"
    if triple.damage in KINDS:
        return "pipes, devices, folders, links in place of a file"
    if triple.damage in CONTENTS:
        return "files with another content"
    return "files with wrong values" if triple.damage in damages.TREES else "files with changed, missing or added bytes"


@contextlib.contextmanager
def a_world() -> Iterator[World]:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.append(str(Path(__file__).parents[1]))  # for ingest, when this runs as a script
    import lit_llm.config.build
    import lit_llm.reporting.doctor
    import lit_llm.training.fit  # noqa: F401

    with tempfile.TemporaryDirectory() as top:
        yield World(Path(top))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=100_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--per_pair", type=int, default=1, help="commands for each pair of file and damage")
    own = parser.parse_args()
    with a_world() as world:
        chosen = [each for each in triples(world.places, own.per_pair) if own.only in " ".join(each)][own.first : own.last]
        found, tried, memory = attack(world, chosen)
    problems = Counter((family(triple), problem.partition(":")[0]) for triple, problem in found)
    print(
        "| family | tried | hangs | tracebacks | silent | files changed elsewhere | most memory |", "|---" * 7 + "|", sep="\n"
    )
    for name in tried:
        figures = [problems.pop((name, kind), 0) for kind in ("hang", "traceback", "silent", "changed")]
        print(f"| {name} | {tried[name]:,} | {' | '.join(map(str, figures))} | {memory[name] / 1e6:.0f} MB |")
    print(f"{len({triple[:2] for triple in chosen}):,} pairs of file and damage; others: {dict(problems) or 'nothing'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
