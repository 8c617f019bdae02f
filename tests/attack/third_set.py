"""Damaged files and hostile machines, a third set: written without sight of the code that defends.

    python tests/attack/third_set.py                 # every case; a line for each that is not clean, then a table
    python tests/attack/third_set.py --only chat     # cases whose name contains a text; --list names them

A case is a pair: a file, or the environment, and a damage. A fork of this process, which has imported the libraries, damages a
copy of a small workplace (a run, an import, shards, chats, an adapter, all written by the real commands) and runs one command
there, under a limit of time and memory. Judged are: an end in time, a traceback or a signal, silence (exit code 0 and no word
about wrong content), changed files other than those that the command is there to write, and the peak of memory.
"""

# ruff: noqa: E501, RUF034, SIM115, SIM905, E731
from __future__ import annotations

import argparse
import bz2
import contextlib
import ctypes
import fnmatch
import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TQDM_DISABLE"] = "1"

SECONDS, BYTES = 60.0, 5 << 30
ROOM = Path(os.environ.get("THIRD_SET_ROOM") or tempfile.gettempdir()) / f"third-set-{os.getpid()}"
BASE = ROOM / "base"
GENERATE = "generate --run run --prompt a --max_new_tokens 2"
RESUME = "fit --run run --resume auto --trainer.max_steps 6"
FIT = "fit --config base.yaml --run_dir o"
SHARDS = "fit --config packed.yaml"
SFT = "fit --config sft.yaml --run_dir o"
CURVE = "curve --run run --out o.csv"
REPORT = "report --run run --out o.html"
DOCTOR = "doctor --run run"
PLAN = "plan --run run"
VALIDATE = "validate --run run"
IMPORT = "import --from hf --out o"
ADAPTER = "import --from adapter --init_from base --out o"
TUNED = "generate --run tuned --init_from base --prompt a --max_new_tokens 2"
PREPARE = "prepare --data TextFiles --data.paths corpus --data.tokenizer Bytes --out o"
JSONL = "prepare --data TextFiles --data.paths x.jsonl --data.tokenizer Bytes --out o"
FILE = "prepare --data TextFiles --data.paths x --data.tokenizer Bytes --out o"
TOKENIZER = "prepare --data TextFiles --data.paths corpus --data.tokenizer TokenizerJSON --data.tokenizer.path hf --out o"
CHAT = (
    "prepare --chat_template tpl.jinja --data.paths chat.jsonl --data.tokenizer TokenizerJSON --data.tokenizer.path hf --out o"
)
AUTO = CHAT.replace("tpl.jinja", "auto")
TALK = "generate --run sftrun --chat --prompt hi --max_new_tokens 2"
QUIZ = 'validate --run run --tasks TaskScores --tasks.tasks ["quiz.jsonl"]'
CLEAN = "clean --data.paths corpus --exact_duplicates true --out o"
AGAINST = "clean --data.paths corpus --against x --out o"
EXPORT = "export --run run --out o"
CONSOLIDATE = "consolidate --run run --out o"

Damage = Callable[[], object]
CASES: dict[str, tuple[str, str, Damage]] = {}
"""Name → the expected end (`refuse`: an exit code or a word about it; `any`; `fine`: exit code 0), the command, the damage."""


def case(name: str, command: str, damage: Damage, expected: str = "refuse") -> None:
    assert name not in CASES, name
    CASES[name] = (expected, command, damage)


# ---------------------------------------------------------------- tools of damages, in the copy of the workplace


def put(path: str, content: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else str(content).encode("utf-8", "surrogateescape"))


def edit(path: str, change: Callable[[Any], Any], dump: Callable[[Any], str] = json.dumps) -> None:
    value = json.loads(Path(path).read_text())
    changed = change(value)
    put(path, dump(value if changed is None else changed))


def text(path: str, old: str, new: str) -> None:
    before = Path(path).read_text()
    assert old in before, (path, old)
    put(path, before.replace(old, new, 1))


def instead(path: str, make: Callable[[str], object]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, path + ".was")
    make(path)


def unix_socket(path: str) -> None:
    here = socket.socket(socket.AF_UNIX)
    here.bind(path)


def loop(path: str) -> None:
    os.symlink(os.path.basename(path), path)


def loop_of_two(path: str) -> None:
    os.symlink(os.path.basename(path) + "2", path)
    os.symlink(os.path.basename(path), path + "2")


def sparse(path: str, size: int = 8 << 30) -> None:
    with open(path, "ab") as file:
        file.truncate(size)


def grow(path: str, line: bytes) -> None:
    def forever() -> None:
        with open(path, "ab", buffering=0) as file:
            for _ in range(4000):
                file.write(line)
                time.sleep(0.002)

    threading.Thread(target=forever, daemon=True).start()


def flicker(path: str) -> None:
    content = Path(path).read_bytes()

    def forever() -> None:
        for _ in range(20000):
            with contextlib.suppress(OSError):
                put(path, content[: len(content) // 2])
                put(path, content)

    threading.Thread(target=forever, daemon=True).start()


def device(major: int, minor: int) -> Callable[[str], None]:
    return lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))


def nobody() -> None:
    for folder, folders, files in os.walk(".."):
        for name in [*folders, *files]:
            with contextlib.suppress(OSError):
                os.chown(os.path.join(folder, name), 65534, 65534, follow_symlinks=False)
    os.chown(".", 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def unreadable(path: str) -> None:
    nobody()
    os.chmod(path, 0)


def unwritable(path: str) -> None:
    nobody()
    os.chmod(path, 0o555)


def limit(name: str, value: int) -> None:
    resource.setrlimit(getattr(resource, name), (value, value))


def seal(folder: str) -> None:
    """Make the manifest agree with its files."""
    path = f"{folder}/manifest.json"
    manifest = json.loads(Path(path).read_text())
    for name, said in manifest["files"].items():
        content = Path(folder, name).read_bytes()
        said |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sealed(path, manifest)


def sealed(path: str, manifest: Any) -> None:
    manifest.pop("checksum", None)
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, indent=2).encode()).hexdigest()
    put(path, json.dumps(manifest, indent=2) + "\n")


def manifest(change: Callable[[Any], Any]) -> None:
    for path in sorted({os.path.realpath(p) for p in Path("run/checkpoints").glob("step-*.ckpt/manifest.json")}):
        value = json.loads(Path(path).read_text())
        change(value)
        sealed(path, value)


def state(change: Callable[[Any], Any], run: str = "run", **options: Any) -> None:
    """Change the values of every checkpoint of a run, with right checksums."""
    import torch

    for folder in sorted(Path(run, "checkpoints").glob("step-*.ckpt")):
        values = torch.load(folder / "checkpoint.pt", weights_only=True)
        changed = change(values)
        torch.save(values if changed is None else changed, folder / "checkpoint.pt", **options)
        seal(str(folder))


def archive(change: Callable[[bytes], bytes]) -> None:
    for folder in sorted(Path("run/checkpoints").glob("step-*.ckpt")):
        put(str(folder / "checkpoint.pt"), change((folder / "checkpoint.pt").read_bytes()))
        seal(str(folder))


def rezip(
    content: bytes, change: Callable[[str, bytes], tuple[str, bytes] | None], extra: Any = (), compression: int = 0
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w", compression) as new:
        for item in old.infolist():
            kept = change(item.filename, old.read(item))
            if kept:
                new.writestr(*kept)
        for name, data in extra:
            new.writestr(name, data)
    return made.getvalue()


def put_at(value: Any, keys: list[Any], new: Any) -> None:
    for key in keys[:-1]:
        value = value[key]
    if isinstance(new, type(put_at)):
        value[keys[-1]] = new(value[keys[-1]])
    else:
        value[keys[-1]] = new


def tensors(path: str) -> tuple[dict[str, Any], bytes]:
    content = Path(path).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_tensors(path: str, header: Any, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    put(path, struct.pack("<Q", len(raw)) + raw + data)


def safe(path: str, change: Callable[[Any, bytes], Any]) -> None:
    header, data = tensors(path)
    changed = change(header, data)
    put_tensors(path, *(changed if isinstance(changed, tuple) else (header, data)))


def shards_sealed(folder: str = "shards") -> None:
    meta = json.loads(Path(folder, "meta.json").read_text())
    for split in meta["splits"].values():
        for shard in split["shards"]:
            for key, suffix in (("blake2b", ".bin"), ("mask_blake2b", ".mask")):
                if key in shard:
                    content = Path(folder, shard["file"]).with_suffix(suffix).read_bytes()
                    content = content[1024:] if suffix == ".bin" else content  # without the header
                    shard[key] = hashlib.blake2b(content, digest_size=16).hexdigest()
    put(f"{folder}/meta.json", json.dumps(meta))


def first(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in header.items() if key != "__metadata__")


def tar(members: list[tuple[dict[str, Any], bytes]], name: str = "x", **options: Any) -> None:
    with tarfile.open(name, "w", **options) as file:
        for fields, content in members:
            info = tarfile.TarInfo()
            info.size = len(content)
            for key, value in fields.items():
                setattr(info, key, value)
            file.addfile(info, io.BytesIO(content))


def mounted(path: str, options: str) -> None:
    os.makedirs(path, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)


BIG = 10**30
DEEP = "[" * 100_000
LONG = "9" * 5000


# ---------------------------------------------------------------- settings of a run, and recipes

FOREIGN: dict[str, Callable[[str], object]] = {
    "socket": unix_socket,
    "a link to itself": loop,
    "two links in a circle": loop_of_two,
    "a sparse file of 8 GB": sparse,
    "/dev/urandom": device(1, 9),
    "/dev/full": device(1, 7),
    "/proc/self/mem": lambda path: os.symlink("/proc/self/mem", path),
    "/proc/kmsg": lambda path: os.symlink("/proc/kmsg", path),
    "a link to a folder outside": lambda path: os.symlink("../out/folder", path),
    "a dangling link": lambda path: os.symlink("../out/nothing", path),
    "a folder with its own name in it": lambda path: os.makedirs(f"{path}/{os.path.basename(path)}"),
    "a terminal": lambda path: os.symlink(os.ttyname(os.openpty()[1]), path),
    "a block device": lambda path: os.mknod(path, 0o666 | stat.S_IFBLK, os.makedev(7, 200)),
}
PLACES = {
    "run/config.yaml": GENERATE,
    "run/tokenizer.json": GENERATE,
    "run/plan.json": DOCTOR,
    "hf/config.json": IMPORT,
    "hf/model.safetensors": IMPORT,
    "shards/meta.json": SHARDS,
    "shards/train_000000.docs": SHARDS,
    "adapter/adapter_config.json": ADAPTER,
    "quiz.jsonl": QUIZ,
    "chat.jsonl": CHAT,
}
for number, (kind, make) in enumerate(FOREIGN.items()):
    for offset in range(5):  # each kind in five of ten places: the pairs, not the square
        place = list(PLACES)[(number + 2 * offset) % len(PLACES)]
        case(f"kinds: {place} is {kind}", PLACES[place], lambda p=place, m=make: instead(p, m), "any")

YAML = {
    "byte order mark of UTF-16": (lambda s: s.encode("utf-16"), "any"),
    "CRLF line ends": (lambda s: s.replace("\n", "\r\n"), "fine"),
    "a NUL in a value": (lambda s: s.replace("run_dir: run", "run_dir: r\0un"), "refuse"),
    "a line separator U+2028 in a key": (lambda s: s.replace("n_layer", "n\u2028layer"), "refuse"),
    "a million keys": (lambda s: s + "".join(f"k{i}: 1\n" for i in range(1_000_000)), "refuse"),
    "an integer of 5,000 digits": (lambda s: s.replace("seed_everything: 1337", f"seed_everything: {LONG}"), "refuse"),
    "1e400 as a norm_eps": (lambda s: s.replace("norm_eps: 1.0e-05", "norm_eps: 1e400"), "refuse"),
    ".nan as rope_theta": (lambda s: re.sub("rope_theta: .*", "rope_theta: .nan", s), "refuse"),
    "a sexagesimal number of layers": (lambda s: s.replace("n_layer: 1", "n_layer: 0:1"), "any"),
    "an octal head count": (lambda s: s.replace("n_head: 2", "n_head: 0o2"), "any"),
    "two documents": (lambda s: s + "---\nrun_dir: ../out\n", "refuse"),
    "%YAML 9.9": (lambda s: "%YAML 9.9\n---\n" + s, "any"),
    "a list": (lambda s: "- " + s, "refuse"),
    "tabs as indentation": (lambda s: s.replace("\n  ", "\n\t"), "refuse"),
    "a merge key of itself": (lambda s: s + "data: &a\n  <<: *a\n", "refuse"),
    "deep flow": (lambda s: s + "x: " + DEEP, "refuse"),
    "!!binary as folder": (lambda s: s.replace("run_dir: run", "run_dir: !!binary cnVu"), "refuse"),
    "a value of 20 MB": (lambda s: s.replace("mlp: relu2", "mlp: " + "r" * 20_000_000), "refuse"),
    "a class of os": (lambda s: s.replace("class_path: lit_llm.data.TextFiles", "class_path: os.system"), "refuse"),
    "a class that is a module": (
        lambda s: s.replace("class_path: lit_llm.data.TextFiles", "class_path: antigravity"),
        "refuse",
    ),
    "only a comment": (lambda s: "# nothing\n", "refuse"),
    "escapes of a terminal": (lambda s: s.replace("mlp: relu2", 'mlp: "\\e]0;owned\\a\\e[2J"'), "refuse"),
    "a lone surrogate": (lambda s: s.replace("mlp: relu2", 'mlp: "\\ud800"'), "refuse"),
}
for kind, (change, expected) in YAML.items():
    case(
        f"yaml: run/config.yaml with {kind}",
        VALIDATE,
        lambda c=change: (
            put("run/config.yaml", c(Path("run/config.yaml").read_text()))
            if not isinstance(c(""), bytes)
            else put("run/config.yaml", c(Path("run/config.yaml").read_text()))
        ),
        expected,
    )
case(
    "yaml: config.yaml names another run's folder",
    RESUME,
    lambda: text("run/config.yaml", "run_dir: run", "run_dir: ../out/run"),
    "any",
)
case(
    "yaml: a recipe with a recipe of 300 MB beside",
    "plan --config base.yaml --config x.yaml",
    lambda: put("x.yaml", b"#" * (300 << 20)),
    "any",
)
case(
    "yaml: a recipe that grows",
    "plan --config x.yaml",
    lambda: (put("x.yaml", Path("base.yaml").read_text()), grow("x.yaml", b"# more\n")),
    "any",
)
case("yaml: a recipe that flickers", "plan --config base.yaml", lambda: flicker("base.yaml"), "any")
case("yaml: a recipe from /dev/fd/0 that is closed", "plan --config /dev/fd/0", lambda: os.close(0), "refuse")
case(
    "yaml: a recipe of a name in other bytes",
    b"plan --config \xff\xfe.yaml",
    lambda: shutil.copy("base.yaml", b"\xff\xfe.yaml"),
    "any",
)
case("yaml: a name of 5,000 letters", "plan --config " + "a" * 5000 + ".yaml", lambda: None)
case("yaml: a name with a line end", "plan\0--config\0a\nb.yaml", lambda: None)
case("yaml: interpolation of a shell", "plan --config base.yaml --run_dir $(touch${IFS}x)", lambda: None, "any")
case("yaml: run_dir is a file", "fit --config base.yaml --run_dir base.yaml", lambda: None)
case("yaml: run_dir below a file", "fit --config base.yaml --run_dir base.yaml/x", lambda: None)
case("yaml: run_dir below a socket", "fit --config base.yaml --run_dir s/x", lambda: unix_socket("s"))
case("yaml: run_dir is a link loop", "fit --config base.yaml --run_dir s/x", lambda: loop("s"))
case("yaml: run_dir of 300 letters", "fit --config base.yaml --run_dir " + "a" * 300, lambda: None)
case("yaml: run_dir is the folder of the text", "fit --config base.yaml --run_dir corpus", lambda: None, "any")
case(
    "yaml: clean.yaml with a billion laughs",
    "clean --config x.yaml --out o",
    lambda: put(
        "x.yaml",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9))
        + "data: {paths: *j}\n",
    ),
)


# ---------------------------------------------------------------- rows, events, plans, locks

ROWS = {
    "NaN as a literal": '{"step": 5, "train/loss": NaN}',
    "1e400": '{"step": 5, "train/loss": 1e400}',
    "an integer of 5,000 digits as loss": '{"step": 5, "train/loss": ' + LONG + "}",
    "an integer of 5,000 digits as step": '{"step": ' + LONG + ', "train/loss": 1}',
    "a step of 2.5": '{"step": 2.5, "train/loss": 1}',
    "a step that is true": '{"step": true, "train/loss": 1}',
    "a step in words": '{"step": "five", "train/loss": 1}',
    "a negative step": '{"step": -5, "train/loss": 1}',
    "a step of 1e18": '{"step": 1000000000000000000, "train/loss": 1}',
    "two steps": '{"step": 5, "step": 6, "train/loss": 1}',
    "a list": "[1, 2]",
    "null": "null",
    "deep brackets": '{"step": 5, "x": ' + DEEP + "}",
    "a value that is an object": '{"step": 5, "train/loss": {"a": [1]}}',
    "a value that is a lone surrogate": '{"step": 5, "train/loss": "\\ud800"}',
    "a name that is a lone surrogate": '{"step": 5, "\\udcff": 1.0}',
    "a name with markup": '{"step": 5, "</script><script>alert(1)</script>": 1.0}',
    "a name of 10 MB": '{"step": 5, "' + "n" * 10_000_000 + '": 1}',
    "a time of 1e300": '{"step": 5, "time": 1e300, "train/loss": 1}',
    "a time in words": '{"step": 5, "time": "noon", "train/loss": 1}',
    "no step": '{"train/loss": 1}',
    "100,000 names": "{" + '"step": 5,' + ",".join(f'"n{i}": 1' for i in range(100_000)) + "}",
    "other bytes": b'{"step": 5, "train/loss": 1, "\xff\xfe": 2}',
    "a row of NULs": b"\0" * 4096,
    "an earlier step": '{"step": 1, "train/loss": 1}',
}
for number, (kind, row) in enumerate(ROWS.items()):
    command = (CURVE, REPORT, DOCTOR, RESUME)[number % 4]
    raw = row if isinstance(row, bytes) else row.encode()
    case(
        f"rows: metrics.jsonl with {kind}",
        command,
        lambda r=raw: put("run/metrics.jsonl", Path("run/metrics.jsonl").read_bytes() + r + b"\n"),
        "any",
    )
case("rows: a line of 1 GB of NULs", REPORT, lambda: sparse("run/metrics.jsonl", 1 << 30), "any")
case("rows: a line of 3 GB of NULs, resumed", RESUME, lambda: sparse("run/metrics.jsonl", 3 << 30), "any")
case("rows: metrics.jsonl grows", CURVE, lambda: grow("run/metrics.jsonl", b'{"step": 9, "train/loss": 1.0}\n'), "any")
case("rows: metrics.jsonl flickers", DOCTOR, lambda: flicker("run/metrics.jsonl"), "any")
case(
    "rows: metrics.jsonl has a second name outside", RESUME, lambda: os.link("run/metrics.jsonl", "../out/metrics.jsonl"), "any"
)
case(
    "rows: metrics.jsonl is a link to outside",
    RESUME,
    lambda: (os.rename("run/metrics.jsonl", "../out/m.jsonl"), os.symlink("../../out/m.jsonl", "run/metrics.jsonl")),
    "any",
)
case(
    "rows: metrics.jsonl with a byte order mark",
    CURVE,
    lambda: put("run/metrics.jsonl", b"\xef\xbb\xbf" + Path("run/metrics.jsonl").read_bytes()),
    "any",
)
case(
    "rows: metrics.jsonl with CR only",
    CURVE,
    lambda: put("run/metrics.jsonl", Path("run/metrics.jsonl").read_bytes().replace(b"\n", b"\r")),
    "any",
)
case(
    "rows: metrics.jsonl that only appends (chattr +a)",
    RESUME,
    lambda: subprocess.run(["chattr", "+a", "run/metrics.jsonl"]),
    "any",
)
case(
    "rows: metrics.jsonl that nobody may change (chattr +i)",
    RESUME,
    lambda: subprocess.run(["chattr", "+i", "run/metrics.jsonl"]),
    "any",
)


def events() -> str:
    os.remove("run/metrics.jsonl")
    return str(next(Path("run").glob("events*")))


EVENTS: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda c: c[:-1],
    "with a length of 2^62": lambda c: struct.pack("<Q", 1 << 62) + c[8:],
    "whose first length is 0": lambda c: struct.pack("<Q", 0) + c[8:],
    "with a changed byte in the middle": lambda c: c[: len(c) // 2] + bytes([c[len(c) // 2] ^ 255]) + c[len(c) // 2 + 1 :],
    "of zeros": lambda c: bytes(100_000),
    "twice": lambda c: c + c,
    "as gzip": gzip.compress,
    "of one byte": lambda c: b"\x18",
}
for kind, cut in EVENTS.items():
    case(f"events: a file {kind}", CURVE, lambda c=cut: (lambda p: put(p, c(Path(p).read_bytes())))(events()), "any")
case(
    "events: two thousand files",
    CURVE,
    lambda: (lambda p: [shutil.copy(p, f"run/events.out.tfevents.{i}.h.1.0") for i in range(2000)])(events()),
    "any",
)
case(
    "events: a name in other bytes",
    REPORT,
    lambda: (lambda p: shutil.copy(p, b"run/events.out.tfevents.9\xff"))(events()),
    "any",
)
case("events: a folder with that name", REPORT, lambda: (events(), os.makedirs("run/events.out.tfevents.99.x/y")), "any")
case("events: a sparse file", DOCTOR, lambda: (lambda p: sparse(p, 3 << 30))(events()), "any")

SMALL = {
    "NaN": "NaN",
    "true": "true",
    "a text": '"hello"',
    "deep": DEEP,
    "deep objects": '{"a":' * 50_000,
    "UTF-16": '{"format": 1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "two objects": "{}{}",
    "a huge integer": '{"format": ' + LONG + ', "pid": ' + LONG + ', "step": ' + LONG + "}",
    "only spaces, 100 MB": b" " * (100 << 20),
    "null fields": '{"format": null, "launches": null, "step": null, "reason": null, "pid": null, "host": null}',
    "lists as fields": '{"format": 1, "launches": [[], 1, null, "x", {"first_step": []}], "step": [], "reason": {}, "pid": [1], "host": {}}',
    "infinite fields": '{"format": 1, "launches": [{"first_step": Infinity, "measured": {"seconds_per_step": NaN}, "predicted": -1e999}], "step": 1e999, "reason": "x", "pid": 1e999}',
}
for number, (kind, content) in enumerate(SMALL.items()):
    case(
        f"small: plan.json is {kind}",
        (DOCTOR, REPORT, PLAN, RESUME)[number % 4],
        lambda c=content: put("run/plan.json", c),
        "any",
    )
    case(f"small: ended.json is {kind}", (RESUME, DOCTOR)[number % 2], lambda c=content: put("run/ended.json", c), "any")
    case(f"small: lock.json is {kind}", RESUME, lambda c=content: put("run/lock.json", c), "any")
    if number % 2:
        case(f"small: document_ids.json is {kind}", GENERATE, lambda c=content: put("run/document_ids.json", c), "any")
        case(
            f"small: imported_config.json is {kind}",
            "export --run base --out o",
            lambda c=content: put("base/imported_config.json", c),
            "any",
        )
    else:
        case(f"small: generation_config.json is {kind}", TALK, lambda c=content: put("sftrun/generation_config.json", c), "any")
        case(f"small: tokenizer_config.json is {kind}", TALK, lambda c=content: put("sftrun/tokenizer_config.json", c), "any")
LOCK = {
    "the pid of init": {"pid": 1},
    "a pid of this process's parent": {"pid": os.getpid()},
    "a negative pid": {"pid": -1},
    "pid 0": {"pid": 0},
    "a pid of 2^63": {"pid": 1 << 63},
    "a host of 1 MB": {"pid": 999999, "host": "h" * 1_000_000},
    "a host with escapes": {"pid": 999999, "host": "\x1b[2J\x1b]0;x\x07"},
    "a start in the future": {"pid": 999999, "host": socket.gethostname(), "started": "9999-12-31T23:59:59+00:00"},
}
for kind, value in LOCK.items():
    case(
        f"small: lock.json with {kind}",
        RESUME,
        lambda v=value: put(
            "run/lock.json", json.dumps({"host": socket.gethostname(), "started": "2026-01-01T00:00:00+00:00", **v})
        ),
        "any",
    )
case(
    "small: lock.json has a second name outside",
    RESUME,
    lambda: (put("../out/lock.json", "keep"), os.link("../out/lock.json", "run/lock.json")),
    "any",
)
case("small: plan.json has a second name outside", RESUME, lambda: os.link("run/plan.json", "../out/plan.json"), "any")
case("small: config.yaml has a second name outside", RESUME, lambda: os.link("run/config.yaml", "../out/config.yaml"), "any")
case(
    "small: plan.json is a link outside",
    RESUME,
    lambda: (os.rename("run/plan.json", "../out/p.json"), os.symlink("../../out/p.json", "run/plan.json")),
    "any",
)
case(
    "small: hparams.yaml is a link outside",
    RESUME,
    lambda: (os.remove("run/hparams.yaml"), os.symlink("../../out/keep.txt", "run/hparams.yaml")),
    "any",
)
case(
    "small: the run folder is read through a link",
    "fit --run l --resume auto --trainer.max_steps 6",
    lambda: os.symlink("run", "l"),
    "any",
)
case(
    "small: the run folder is a mount point",
    RESUME,
    lambda: (os.rename("run", "r"), mounted("run", "size=20m"), subprocess.run("cp -a r/. run/", shell=True)),
    "fine",
)
case(
    "small: old partial folders of another run",
    RESUME,
    lambda: (
        os.makedirs("run/checkpoints/.step-00000006.ckpt.partial/x"),
        put("run/checkpoints/.step-00000006.ckpt.partial/x/y", "z"),
    ),
    "any",
)
case(
    "small: a partial that is a link outside",
    RESUME,
    lambda: os.symlink("../../../out/folder", "run/checkpoints/.step-00000006.ckpt.partial"),
    "any",
)
case(
    "small: a removed one that is a link outside",
    RESUME,
    lambda: os.symlink("../../../out/folder", "run/checkpoints/.step-00000002.ckpt.removed"),
    "any",
)


# ---------------------------------------------------------------- checkpoints with right checksums

VALUES: dict[str, tuple[list[Any], Any]] = {
    "an epoch of -1": (["epoch"], -1),
    "an epoch of 2^70": (["epoch"], 1 << 70),
    "a step that is true": (["global_step"], True),
    "a step of 2^63": (["global_step"], 1 << 63),
    "a step of another checkpoint": (["global_step"], 3),
    "a version of Lightning that is a list": (["pytorch-lightning_version"], [2, 6]),
    "a version of Lightning that is 99": (["pytorch-lightning_version"], "99.0"),
    "a version of Lightning that is none": (["pytorch-lightning_version"], "hello"),
    "loops that went backwards": (["loops", "fit_loop", "epoch_loop.batch_progress", "total", "ready"], -3),
    "loops in words": (["loops", "fit_loop", "epoch_loop.batch_progress", "total", "ready"], "four"),
    "loops of half a batch": (["loops", "fit_loop", "epoch_loop.batch_progress", "current", "completed"], 2.5),
    "loops of 2^63 batches": (["loops", "fit_loop", "epoch_loop.batch_progress", "current", "completed"], 1 << 63),
    "no fit loop": (["loops"], lambda v: {k: w for k, w in v.items() if k != "fit_loop"}),
    "a last batch in words": (["loops", "fit_loop", "epoch_loop.batch_progress", "is_last_batch"], "maybe"),
    "batches that stepped: none": (["loops", "fit_loop", "epoch_loop.state_dict", "_batches_that_stepped"], None),
    "losses of the guard in words": (["callbacks", "SpikeGuard", "losses"], ["a", "b"]),
    "losses of the guard that are NaN": (["callbacks", "SpikeGuard", "losses"], [float("nan")] * 4),
    "two million losses of the guard": (["callbacks", "SpikeGuard", "losses"], [1.0] * 2_000_000),
    "a guard without norms": (["callbacks", "SpikeGuard"], lambda v: {k: w for k, w in v.items() if k != "norms"}),
    "a negative count of skips": (["callbacks", "SpikeGuard", "consecutive"], -10),
    "tokens in words": (["callbacks", "Throughput", "tokens"], "many"),
    "clipped of None": (["callbacks", "GradientNorm", "clipped"], None),
    "kept checkpoints outside": (["callbacks", "StepCheckpoint", "kept"], ["../../../out/folder", "../../../out/run"]),
    "kept checkpoints at absolute paths": (
        ["callbacks", "StepCheckpoint", "kept"],
        lambda v: [os.path.abspath("../out/folder"), *v],
    ),
    "leaving checkpoints outside": (["callbacks", "StepCheckpoint", "leaving"], ["../../../out/folder"]),
    "permanent checkpoints that are numbers": (["callbacks", "StepCheckpoint", "permanent"], [1, 2]),
    "a best name outside": (["callbacks", "StepCheckpoint", "best_name"], "../../../out/folder"),
    "a best score in words": (["callbacks", "StepCheckpoint", "best_score"], "good"),
    "a best score of NaN": (["callbacks", "StepCheckpoint", "best_score"], float("nan")),
    "a kept list that is a text": (["callbacks", "StepCheckpoint", "kept"], "step-00000002.ckpt"),
    "samples of -5": (["TextFiles", "consumed_samples"], -5),
    "samples of 2.5": (["TextFiles", "consumed_samples"], 2.5),
    "samples of 10^30": (["TextFiles", "consumed_samples"], BIG),
    "samples of another step": (["TextFiles", "consumed_samples"], 7),
    "a batch of 0": (["TextFiles", "global_batch_size"], 0),
    "a seed in words": (["TextFiles", "seed"], "x"),
    "files that are a list": (["TextFiles", "files"], [1]),
    "files of other values": (["TextFiles", "files"], {"a": 1}),
    "a fingerprint of None": (["TextFiles", "fingerprint"], None),
    "settings with a list as key": (["settings"], lambda v: {**v, (1, 2): 3}),
    "settings of a million keys": (["settings"], lambda v: {**v, **{f"k{i}": 1 for i in range(1_000_000)}}),
    "a setting of 50 MB": (["settings", "model.mlp"], "x" * 50_000_000),
    "a setting that is NaN": (["settings", "optimizer.lr"], float("nan")),
    "settings that nest in themselves": (["settings"], lambda v: (lambda x: (x.append(x), {**v, "model.mlp": x})[1])([])),
    "a layer count in words": (["model_config", "n_layer"], "one"),
    "a layer count of 10^9": (["model_config", "n_layer"], 10**9),
    "a negative width": (["model_config", "n_embd"], -16),
    "a rope_theta of NaN": (["model_config", "rope_theta"], float("nan")),
    "an eos_id outside the vocabulary": (["model_config", "eos_id"], 10**6),
    "an unknown model setting": (["model_config", "backdoor"], 1),
    "a vocabulary of 10^12": (["model_config", "vocab_size"], 10**12),
    "a prompt start of 10^12": (["prompt_start"], [10**12]),
    "a prompt start in words": (["prompt_start"], "hello"),
    "a negative prompt start": (["prompt_start"], [-1]),
    "another optimizer's name": (["optimizer_class"], "os.system"),
    "a tokenizer's hash of None": (["tokenizer_sha256"], None),
    "-1 tokens": (["tokens"], -1),
    "schedulers in words": (["lr_schedulers"], "x"),
    "two optimizers": (["optimizer_states"], lambda v: v * 2),
    "no optimizer": (["optimizer_states"], []),
    "an optimizer that trains another parameter": (
        ["optimizer_states", 0, "param_groups", 0, "params"],
        lambda v: [99, *v[1:]],
    ),
    "an optimizer that names a parameter twice": (
        ["optimizer_states", 0, "param_groups", 0, "params"],
        lambda v: [v[0]] * len(v),
    ),
    "a learning rate of -1": (["optimizer_states", 0, "param_groups", 0, "lr"], -1.0),
    "a learning rate in words": (["optimizer_states", 0, "param_groups", 0, "lr"], "high"),
    "betas of three": (["optimizer_states", 0, "param_groups", 0, "betas"], (0.9, 0.9, 0.9)),
    "an eps of NaN": (["optimizer_states", 0, "param_groups", 0, "eps"], float("nan")),
}
READS_WEIGHTS = ("layer count", "width", "rope_theta", "eos_id", "unknown model", "vocabulary", "prompt start", "hash of None")
for kind, (keys, new) in VALUES.items():
    command = GENERATE if any(word in kind for word in READS_WEIGHTS) else RESUME
    case(
        f"values: {kind}",
        command,
        lambda k=keys, n=new: state(lambda v: put_at(v, k, n)),
        "any" if kind in ("-1 tokens", "a best score of NaN") else "refuse",
    )


def weights(change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change the tensor of the head in every checkpoint."""
    return lambda: state(lambda v: put_at(v["state_dict"], ["model.head.weight"], lambda t: change(t)))


def moments(change: Callable[[Any], Any], key: str = "exp_avg") -> Callable[[], None]:
    return lambda: state(lambda v: put_at(v["optimizer_states"][0]["state"][0], [key], lambda t: change(t)))


WEIGHTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (lambda t: t > 0, RESUME),
    "float64": (lambda t: t.double(), RESUME),
    "float8": (lambda t: t.to(__import__("torch").float8_e4m3fn), GENERATE),
    "int64": (lambda t: t.long(), GENERATE),
    "NaN": (lambda t: t * float("nan"), VALIDATE),
    "transposed": (lambda t: t.t().contiguous(), GENERATE),
    "flat": (lambda t: t.flatten(), RESUME),
    "empty": (lambda t: t[:0], RESUME),
    "a scalar": (lambda t: t[0, 0], GENERATE),
    "one row expanded": (lambda t: t[:1].expand(320, 16), GENERATE),
    "a view of 10^13 values": (lambda t: t[:1, :1].expand(10**7, 10**6), GENERATE),
    "a list of numbers": (lambda t: t.tolist(), RESUME),
    "a list of tensors": (lambda t: [t], VALIDATE),
    "a parameter": (lambda t: __import__("torch").nn.Parameter(t), RESUME),
    "a quantised tensor": (lambda t: __import__("torch").quantize_per_tensor(t, 0.1, 0, __import__("torch").quint8), VALIDATE),
    "a sparse CSR tensor": (lambda t: t.to_sparse_csr(), VALIDATE),
    "None": (lambda t: None, VALIDATE),
    "half as many rows": (lambda t: t[:160].clone(), EXPORT),
}
HARMLESS = ("NaN", "a parameter", "one row expanded")
for kind, (change, command) in WEIGHTS.items():
    case(f"weights: the head is {kind}", command, weights(change), "any" if kind in HARMLESS else "refuse")
case(
    "weights: an extra weight",
    VALIDATE,
    lambda: state(lambda v: put_at(v["state_dict"], ["model.backdoor"], __import__("torch").zeros(2))),
)
case(
    "weights: an extra weight of 10^12 values",
    GENERATE,
    lambda: state(lambda v: put_at(v, ["x"], __import__("torch").zeros(1).expand(10**12))),
    "any",
)
case(
    "weights: two names exchanged",
    EXPORT,
    lambda: state(
        lambda v: v["state_dict"].update(
            {
                "model.norm.weight": v["state_dict"]["model.head.weight"],
                "model.head.weight": v["state_dict"]["model.norm.weight"],
            }
        )
    ),
)
case(
    "weights: a name that is a number",
    GENERATE,
    lambda: state(lambda v: put_at(v["state_dict"], [7], v["state_dict"]["model.norm.weight"])),
)
case("weights: no weights", RESUME, lambda: state(lambda v: v.pop("state_dict") and None))
case("weights: moments of NaN", RESUME, moments(lambda t: t * float("nan")), "any")
case("weights: moments of another shape", RESUME, moments(lambda t: t[:3]))
case("weights: moments of bool", RESUME, moments(lambda t: t > 0))
case("weights: moments that are words", RESUME, moments(lambda t: "x", "exp_avg_sq"))
case(
    "weights: a moment is missing",
    RESUME,
    lambda: state(lambda v: v["optimizer_states"][0]["state"][0].pop("exp_avg_sq") is None),
)
case("weights: a step of the optimizer that is NaN", RESUME, moments(lambda t: t * float("nan"), "step"))
case("weights: a step of the optimizer of -3", RESUME, moments(lambda t: t * 0 - 3, "step"))
case("weights: a step of the optimizer with 4 values", RESUME, moments(lambda t: t.expand(4).clone(), "step"))
case("weights: negative squares of moments", RESUME, moments(lambda t: -t - 1, "exp_avg_sq"), "any")
case(
    "weights: those of another run of equal shapes, unsealed",
    GENERATE,
    lambda: shutil.copy(
        "../out/run/checkpoints/step-00000004.ckpt/checkpoint.pt", "run/checkpoints/step-00000004.ckpt/checkpoint.pt"
    ),
)
case(
    "weights: the base of adapters is exchanged, sealed",
    TUNED,
    lambda: state(lambda v: put_at(v["state_dict"], ["model.head.weight"], lambda t: t + 1), "base"),
)
case(
    "weights: adapters of another rank",
    TUNED,
    lambda: state(lambda v: v["state_dict"].update({k: t[:1] for k, t in v["state_dict"].items() if t.shape[0] == 2}), "tuned"),
)
case("weights: the whole checkpoint is a list", RESUME, lambda: state(lambda v: [v]))
case("weights: the whole checkpoint is a tensor", GENERATE, lambda: state(lambda v: __import__("torch").zeros(3)))
case(
    "weights: the whole checkpoint is legacy format",
    RESUME,
    lambda: state(lambda v: None, _use_new_zipfile_serialization=False),
    "any",
)


def laughs(v: Any) -> None:
    x: Any = "ha"
    for _ in range(30):
        x = [x] * 10
    v["settings"]["model.mlp"] = x


case("archive: a setting of a billion laughs", RESUME, lambda: state(laughs))
case(
    "archive: a callback's state of a billion laughs",
    RESUME,
    lambda: state(
        lambda v: (laughs(v), v["callbacks"]["SpikeGuard"].update(losses=v["settings"].pop("model.mlp")))[:0] or None
    ),
)
case(
    "archive: values 5,000 levels deep",
    GENERATE,
    lambda: state(lambda v: put_at(v, ["x"], __import__("functools").reduce(lambda a, _: [a], range(500), 1))),
    "any",
)
ARCHIVES: dict[str, Callable[[bytes], bytes]] = {
    "an empty zip": lambda c: b"PK\5\6" + bytes(18),
    "a zip of one text": lambda c: rezip(c, lambda n, d: None, [("hello", b"x")]),
    "a second data.pkl": lambda c: rezip(c, lambda n, d: (n, d), [("archive/data.pkl", b"x"), ("checkpoint/data.pkl", b"x")]),
    "a cut pickle": lambda c: rezip(c, lambda n, d: (n, d[: len(d) // 2] if n.endswith("data.pkl") else d)),
    "an opcode of a frame of 2^63": lambda c: rezip(
        c, lambda n, d: (n, b"\x80\4\x95" + b"\xff" * 8 + d[2:] if n.endswith("data.pkl") else d)
    ),
    "a pickle that pops an empty stack": lambda c: rezip(c, lambda n, d: (n, b"\x80\2000." if n.endswith("data.pkl") else d)),
    "a pickle of os.system": lambda c: rezip(
        c, lambda n, d: (n, b"cos\nsystem\n(S'touch ../out/owned'\ntR." if n.endswith("data.pkl") else d)
    ),
    "a pickle of torch.load": lambda c: rezip(
        c, lambda n, d: (n, b"ctorch\nload\n(S'../out/keep.txt'\ntR." if n.endswith("data.pkl") else d)
    ),
    "storages of half the size": lambda c: rezip(c, lambda n, d: (n, d[: len(d) // 2] if "/data/" in n else d)),
    "a missing storage": lambda c: rezip(c, lambda n, d: None if n.endswith("/data/0") else (n, d)),
    "big endian storages": lambda c: rezip(c, lambda n, d: (n, b"big" if n.endswith("byteorder") else d)),
    "a version of 10^9": lambda c: rezip(c, lambda n, d: (n, b"1000000000\n" if n.endswith("/version") else d)),
    "a comment of 64 kB": lambda c: c[:-2] + b"\xff\xff" + b"c" * 65535,
    "bytes before the archive": lambda c: b"#!/bin/sh\n" + c,
    "compressed by bzip2": lambda c: rezip(c, lambda n, d: (n, d), compression=zipfile.ZIP_BZIP2),
    "a bomb of 3 GB in lzma": lambda c: rezip(
        c, lambda n, d: (n, d), compression=zipfile.ZIP_LZMA, extra=[("checkpoint/x", bytes(600 << 20))]
    ),
    "flags of encryption": lambda c: c.replace(b"PK\1\2\0\0", b"PK\1\2\0\0", 1).replace(b"PK\3\4\0\0\0\0", b"PK\3\4\0\0\1\0"),
    "100,000 empty entries": lambda c: rezip(c, lambda n, d: (n, d), [(f"checkpoint/e{i}", b"") for i in range(100_000)]),
    "a number of entries of 65,535": lambda c: c[:-14] + b"\xff\xff\xff\xff" + c[-10:],
    "an offset of the directory beyond": lambda c: c[:-6] + b"\xf0\xff\xff\x7f" + c[-2:],
    "a TorchScript constant": lambda c: rezip(
        c, lambda n, d: (n, d), [("checkpoint/constants.pkl", b"\x80\2)."), ("checkpoint/code/x.py", b"boom")]
    ),
}
for kind, make_bytes in ARCHIVES.items():
    case(
        f"archive: {kind}",
        (RESUME, GENERATE)[len(CASES) % 2],
        lambda m=make_bytes: archive(m),
        "any"
        if "bytes before" in kind or "comment" in kind or "entries" in kind or "constant" in kind or "second" in kind
        else "refuse",
    )

MANIFESTS: dict[str, Callable[[Any], Any]] = {
    "a step of NaN": lambda m: m.update(step=float("nan")),
    "a step that is true": lambda m: m.update(step=True),
    "a step of 3, in a folder of 4": lambda m: m.update(step=3),
    "a serial in words": lambda m: m.update(serial="x"),
    "a serial of 10^30": lambda m: m.update(serial=BIG),
    "tokens of -1": lambda m: m.update(tokens=-1),
    "a time in words": lambda m: m.update(time="noon"),
    "a version of 2.5": lambda m: m.update(version=2.5),
    "a version of True": lambda m: m.update(version=True),
    "versions that are a list": lambda m: m.update(versions=[1]),
    "files that are a list": lambda m: m.update(files=["checkpoint.pt"]),
    "an absolute file": lambda m: m["files"].update({os.path.abspath("../out/keep.txt"): {"bytes": 1, "sha256": "0" * 64}}),
    "a file ..": lambda m: m["files"].update({"..": {"bytes": 1, "sha256": "0" * 64}}),
    "a file of negative bytes": lambda m: m["files"]["checkpoint.pt"].update(bytes=-1),
    "a hash in capitals": lambda m: m["files"]["checkpoint.pt"].update(sha256=m["files"]["checkpoint.pt"]["sha256"].upper()),
    "a hash of None": lambda m: m["files"]["checkpoint.pt"].update(sha256=None),
    "no files": lambda m: m.update(files={}),
    "a name with a NUL": lambda m: m["files"].update({"a\0b": {"bytes": 1, "sha256": "0" * 64}}),
    "a name of a lone surrogate": lambda m: m["files"].update({"\ud800": {"bytes": 1, "sha256": "0" * 64}}),
    "a name of 5,000 letters": lambda m: m["files"].update({"a" * 5000: {"bytes": 1, "sha256": "0" * 64}}),
}
for kind, change in MANIFESTS.items():
    case(
        f"manifest: {kind}",
        (RESUME, GENERATE, DOCTOR)[len(CASES) % 2],
        lambda c=change: manifest(c),
        "any" if kind in ("tokens of -1", "a time in words", "versions that are a list", "a serial of 10^30") else "refuse",
    )
case(
    "manifest: all checkpoints have one number",
    RESUME,
    lambda: shutil.copytree("run/checkpoints/step-00000004.ckpt", "run/checkpoints/step-4.ckpt"),
    "any",
)
case(
    "manifest: a checkpoint renamed to a later step",
    RESUME,
    lambda: os.rename("run/checkpoints/step-00000004.ckpt", "run/checkpoints/step-00000099.ckpt"),
    "any",
)
case(
    "manifest: a checkpoint of another run",
    RESUME,
    lambda: shutil.copytree("../out/run/checkpoints/step-00000004.ckpt", "run/checkpoints/step-00000005.ckpt"),
    "any",
)
case(
    "manifest: step folder is a link to another run",
    RESUME,
    lambda: os.symlink("../../../out/run/checkpoints/step-00000004.ckpt", "run/checkpoints/step-00000005.ckpt"),
    "any",
)
case(
    "manifest: last.ckpt links outside",
    RESUME,
    lambda: (os.remove("run/checkpoints/last.ckpt"), os.symlink("../../../out/folder", "run/checkpoints/last.ckpt")),
    "any",
)
case(
    "manifest: best.ckpt links to itself",
    "validate --run run --ckpt_path best",
    lambda: (os.remove("run/checkpoints/best.ckpt"), loop("run/checkpoints/best.ckpt")),
)
case(
    "manifest: best.ckpt is a text",
    "validate --run run --ckpt_path best",
    lambda: (os.remove("run/checkpoints/best.ckpt"), put("run/checkpoints/best.ckpt", "step")),
)
case(
    "manifest: checkpoints cannot change (chattr +i)",
    RESUME,
    lambda: subprocess.run(["chattr", "+i", "run/checkpoints"]),
    "any",
)
case(
    "manifest: an old checkpoint cannot be removed (chattr +i)",
    RESUME,
    lambda: subprocess.run(["chattr", "+i", "run/checkpoints/step-00000002.ckpt/manifest.json"]),
    "any",
)
case(
    "manifest: 20 GB behind the weights",
    GENERATE,
    lambda: sparse("run/checkpoints/step-00000004.ckpt/checkpoint.pt", 20 << 30),
    "any",
)
case("manifest: names in other bytes beside checkpoints", RESUME, lambda: os.makedirs(b"run/checkpoints/step-\xff.ckpt"), "any")
case("manifest: a step of 30 digits", RESUME, lambda: os.makedirs("run/checkpoints/step-" + "9" * 30 + ".ckpt"), "any")
case(
    "manifest: 3,000 foreign folders",
    RESUME,
    lambda: [os.makedirs(f"run/checkpoints/step-{i:08d}.ckpt", exist_ok=True) for i in range(10, 3010)],
    "any",
)
case(
    "manifest: weights are a second name of a file outside",
    RESUME,
    lambda: os.link("run/checkpoints/step-00000002.ckpt/checkpoint.pt", "../out/checkpoint.pt"),
    "fine",
)
case("manifest: an extra folder in a checkpoint", RESUME, lambda: put("run/checkpoints/step-00000002.ckpt/more/x", "y"), "any")
case(
    "manifest: a link out in a checkpoint that will be removed",
    RESUME,
    lambda: os.symlink("../../../../out/folder", "run/checkpoints/step-00000002.ckpt/more"),
    "any",
)


# ---------------------------------------------------------------- tokenizers


def tokenizer(change: Callable[[Any], Any]) -> Callable[[], None]:
    return lambda: edit("hf/tokenizer.json", change)


SPLIT = lambda regex: {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
REPLACE = lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content}
TOKENIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a regex that backtracks": (lambda t: t.update(pre_tokenizer=SPLIT(r"(\w+\s?)+$(?!x)Z")), "any"),
    "a regex with 50 optional letters": (lambda t: t.update(pre_tokenizer=SPLIT("(?:r?){50}r{50}e{9}")), "any"),
    "a regex that is none": (lambda t: t.update(pre_tokenizer=SPLIT("(")), "refuse"),
    "a regex that counts to 10^5": (lambda t: t.update(pre_tokenizer=SPLIT("(a{1000}){100}")), "any"),
    "an empty pattern of Replace": (lambda t: t.update(normalizer=REPLACE({"String": ""}, "xy")), "any"),
    "fifteen doublings": (
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [REPLACE({"Regex": "."}, "ee")] * 15}),
        "refuse",
    ),
    "a growth only at a rare word": (
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [REPLACE({"String": "lambda"}, "l" * 3_000_000)]}),
        "any",
    ),
    "three thousand normalizers": (
        lambda t: t.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 3000}),
        "any",
    ),
    "merges of missing tokens": (lambda t: t["model"].update(merges=[["q", "zzz"]]), "refuse"),
    "merges that are numbers": (lambda t: t["model"].update(merges=[[1, 2]]), "refuse"),
    "one merge a thousand times": (lambda t: t["model"].update(merges=t["model"]["merges"][:1] * 1000), "any"),
    "a hole in the ids": (
        lambda t: t["model"]["vocab"].update({k: v + 50 for k, v in t["model"]["vocab"].items() if v > 280}),
        "any",
    ),
    "two tokens of one id": (
        lambda t: t["model"]["vocab"].update({k: 5 for k, v in t["model"]["vocab"].items() if v in (5, 6)}),
        "any",
    ),
    "a negative id": (lambda t: t["model"]["vocab"].update(a=-1), "refuse"),
    "an id of 2^32": (lambda t: t["model"]["vocab"].update(a=1 << 32), "refuse"),
    "an id of 40 million": (lambda t: t["model"]["vocab"].update(a=40_000_000), "any"),
    "an id of 2.5": (lambda t: t["model"]["vocab"].update(a=2.5), "refuse"),
    "an added token without text": (
        lambda t: t["added_tokens"].append({**t["added_tokens"][0], "content": "", "id": 300}),
        "any",
    ),
    "an added token that is a letter": (
        lambda t: t["added_tokens"].append({**t["added_tokens"][0], "content": "e", "id": 300}),
        "any",
    ),
    "an added token that strips": (
        lambda t: t["added_tokens"].append(
            {**t["added_tokens"][0], "content": "return", "id": 300, "lstrip": True, "rstrip": True}
        ),
        "any",
    ),
    "added tokens that overlap": (
        lambda t: t["added_tokens"].extend(
            [{**t["added_tokens"][0], "content": "retu", "id": 300}, {**t["added_tokens"][0], "content": "return", "id": 301}]
        ),
        "any",
    ),
    "an added token of another id": (lambda t: t["added_tokens"][0].update(id=7), "any"),
    "an added token of id 2^31": (
        lambda t: t["added_tokens"].append({**t["added_tokens"][0], "content": "zz", "id": 1 << 31}),
        "any",
    ),
    "no added token": (lambda t: t.update(added_tokens=[]), "any"),
    "added tokens of null": (lambda t: t.update(added_tokens=None), "refuse"),
    "a template of an unknown token": (
        lambda t: t.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
        "any",
    ),
    "a template without the text": (
        lambda t: t.update(post_processor={"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
        "any",
    ),
    "truncation to 1": (
        lambda t: t.update(truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}),
        "any",
    ),
    "truncation with a stride beyond": (
        lambda t: t.update(truncation={"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 9}),
        "any",
    ),
    "padding to 10^9": (
        lambda t: t.update(
            padding={
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        ),
        "any",
    ),
    "padding to a multiple of 0": (
        lambda t: t.update(
            padding={
                "strategy": "BatchLongest",
                "direction": "Right",
                "pad_to_multiple_of": 0,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        ),
        "any",
    ),
    "a dropout of 1": (lambda t: t["model"].update(dropout=1.0), "any"),
    "a dropout of 2": (lambda t: t["model"].update(dropout=2.0), "any"),
    "a Unigram of NaN": (
        lambda t: t.update(
            model={
                "type": "Unigram",
                "unk_id": 0,
                "vocab": [["<|endoftext|>", 0.0], ["a", float("nan")]],
                "byte_fallback": False,
            }
        ),
        "refuse",
    ),
    "a Unigram whose unk_id is beyond": (
        lambda t: t.update(model={"type": "Unigram", "unk_id": 99, "vocab": [["<|endoftext|>", 0.0], ["a", -1.0]]}),
        "refuse",
    ),
    "an empty Unigram": (lambda t: t.update(model={"type": "Unigram", "unk_id": None, "vocab": []}, added_tokens=[]), "refuse"),
    "a Unigram of equal pieces": (
        lambda t: t.update(model={"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", 0.0], ["a", -1.0], ["a", -2.0]]}),
        "any",
    ),
    "a WordPiece of words of 0 letters": (
        lambda t: t.update(
            model={
                "type": "WordPiece",
                "unk_token": "?",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 0,
                "vocab": {"<|endoftext|>": 0, "?": 1},
            }
        ),
        "any",
    ),
    "a WordPiece without its unk": (
        lambda t: t.update(
            model={
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {"<|endoftext|>": 0},
            }
        ),
        "refuse",
    ),
    "a WordLevel without its unk": (
        lambda t: t.update(model={"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"<|endoftext|>": 0}}),
        "refuse",
    ),
    "byte fallback without bytes": (
        lambda t: (t["model"].update(byte_fallback=True, unk_token=None), t.update(pre_tokenizer=None))[:0] or None,
        "any",
    ),
    "an unknown model": (lambda t: t["model"].update(type="Magic"), "refuse"),
    "version 9.9": (lambda t: t.update(version="9.9"), "any"),
    "a decoder that backtracks": (lambda t: t.update(decoder=REPLACE({"Regex": "(e+)+$(?!x)Z"}, "")), "any"),
    "a Metaspace of two letters": (
        lambda t: t.update(pre_tokenizer={"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always", "split": True}),
        "refuse",
    ),
    "a prefix of 1 MB for words": (lambda t: t["model"].update(end_of_word_suffix="x" * 1_000_000), "any"),
    "a prefix of half a letter": (lambda t: t["model"].update(continuing_subword_prefix="##"), "any"),
    "a charsmap of no base64": (lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "!!"}), "refuse"),
    "an empty charsmap": (lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}), "any"),
    "a charsmap of ones": (lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "////" * 64}), "any"),
    "a Strip of everything": (lambda t: t.update(normalizer=REPLACE({"Regex": "(?s).+"}, "")), "any"),
}
for kind, (change, expected) in TOKENIZERS.items():
    case(f"tokenizer: {kind}", TOKENIZER, tokenizer(change), expected)
case(
    "tokenizer: a byte order mark",
    TOKENIZER,
    lambda: put("hf/tokenizer.json", b"\xef\xbb\xbf" + Path("hf/tokenizer.json").read_bytes()),
    "any",
)
case("tokenizer: deep brackets", TOKENIZER, lambda: put("hf/tokenizer.json", DEEP))
case(
    "tokenizer: 300 MB of spaces",
    TOKENIZER,
    lambda: put("hf/tokenizer.json", b" " * (300 << 20) + Path("hf/tokenizer.json").read_bytes()),
    "any",
)
case("tokenizer: a second vocab", TOKENIZER, lambda: text("hf/tokenizer.json", '"model": {', '"model": {"vocab": {},'), "any")
case("tokenizer: flickers", TOKENIZER, lambda: flicker("hf/tokenizer.json"), "any")
CONFIGS: dict[str, Callable[[Any], Any]] = {
    "an eos_token that is a number": lambda c: c.update(eos_token=3),
    "an eos_token of a list": lambda c: c.update(eos_token=["a"]),
    "an eos_token that is unknown": lambda c: c.update(eos_token="<nope>"),
    "an eos_token object without content": lambda c: c.update(eos_token={"__type": "AddedToken"}),
    "a template that is a number": lambda c: c.update(chat_template=7),
    "a template of a list of numbers": lambda c: c.update(chat_template=[1, 2]),
    "templates without default": lambda c: c.update(chat_template=[{"name": "tool", "template": "x"}]),
    "templates of equal names": lambda c: c.update(
        chat_template=[{"name": "default", "template": "x"}, {"name": "default", "template": "y"}]
    ),
    "a template of 100 MB": lambda c: c.update(chat_template="x" * (100 << 20)),
    "a length of 1e400": lambda c: c.update(model_max_length=float("inf"), chat_template="{{ messages[0].content }}"),
    "a class of another package": lambda c: c.update(
        tokenizer_class="os.system", auto_map={"AutoTokenizer": "evil.py"}, chat_template="x"
    ),
}
for kind, change in CONFIGS.items():
    case(f"tokenizer: tokenizer_config.json with {kind}", AUTO, lambda c=change: edit("hf/tokenizer_config.json", c), "any")


# ---------------------------------------------------------------- chat templates and chats

START = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end_of_text|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES: dict[str, str] = {
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "two macros that call each other twice": "{% macro f(n) %}{{ g(n + 1) }}{{ g(n + 1) }}{% endmacro %}{% macro g(n) %}{% if n < 60 %}{{ f(n) }}{{ f(n) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "an extends of itself": "{% extends self %}",
    "a text that doubles 40 times": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "a list that doubles 40 times": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "center": "{{ 'a'|center(3000000000) }}",
    "indent": "{{ 'a\nb'|indent(3000000000) }}",
    "format": "{{ '{:>3000000000}'.format(1) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "zfill": "{{ '1'.zfill(3000000000) }}",
    "a width in stars": "{{ '%*d' % (2000000000, 1) }}",
    "lipsum": "{{ lipsum(n=2000000) }}",
    "a big integer as text": "{{ 10 ** 10000000 }}",
    "a shift": "{{ (2 ** 40000000000)|length }}",
    "batch": "{{ [1]|batch(2000000000, 0)|list|length }}",
    "slice": "{{ [1]|slice(2000000000)|list|length }}",
    "a product of ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a join of ranges": "{{ range(99999)|join('x' * 99999)|length }}",
    "replace": "{{ ('a' * 60000).replace('a', 'b' * 60000)|length }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000)|length }}",
    "translate": "{{ ('a' * 50000).translate({97: 'b' * 90000})|length }}",
    "wordwrap": "{{ ('a ' * 200000)|wordwrap(1) |length }}",
    "urlize": "{{ ('http://' * 20000)|urlize|length }}",
    "striptags": "{{ ('<' * 2000000)|striptags|length }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format that reads attributes": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "messages that are changed": "{{ messages.clear() }}x",
    "messages that grow while they are read": "{% for m in messages %}{{ messages.append(m) }}{% endfor %}",
    "a content that is changed": "{% for m in messages %}{{ m.update({'content': 'x' * 9}) }}{{ m.content }}{% endfor %}",
    "raise_exception of 100 MB": "{{ raise_exception('x' * 100000000) }}",
    "raise_exception of escapes": "{{ raise_exception('\x1b[2J\x1b]0;x\x07') }}",
    "strftime_now of 10^7 signs": "{{ strftime_now('%c' * 3000000)|length }}",
    "strftime_now of a NUL": "{{ strftime_now('a\\u0000%Y') }}" + START,
    "a division by zero": "{{ 1 // 0 }}",
    "a filter that is unknown": "{{ messages|explode }}",
    "an unclosed generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endfor %}",
    "an empty generation": START.replace("{{ m.content }}", "{{ m.content }}{% generation %}{% endgeneration %}"),
    "everything learned": "{% generation %}" + START + "{% endgeneration %}",
    "a block named twice": "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    "10,000 nested ifs": "{% if 1 %}" * 10000 + "{% endif %}" * 10000,
    "10,000 brackets": "{{ " + "(" * 10000 + "1" + ")" * 10000 + " }}",
    "an expression of 200,000 signs": "{{ " + "1+" * 200000 + "1 }}",
    "tojson of a namespace": "{{ namespace(a=1)|tojson }}",
    "groupby, sort and unique of everything": "{{ (range(99999)|list * 50)|sort|unique|list|length }}",
    "nothing": "",
    "a text for the tokenizer of 60 MB": "{% for m in messages %}<|{{ m.role }}|>{{ m.content * 1500000 }}<|end_of_text|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "an output of NULs": START.replace("{{ m.content }}", "{{ m.content }}\0"),
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a debug tag": "{% debug %}",
    "cycler and joiner": "{% set c = cycler(1, 2) %}{% for a in range(3000) %}{% for b in range(3000) %}{{ c.next() }}{% endfor %}{% endfor %}",
}
for kind, template in TEMPLATES.items():
    case(f"template: {kind}", CHAT, lambda t=template: put("tpl.jinja", t), "any")
case("template: other bytes", CHAT, lambda: put("tpl.jinja", b"\xff\xfe" + START.encode()))
case("template: UTF-16", CHAT, lambda: put("tpl.jinja", START.encode("utf-16")))
case("template: a sparse file", CHAT, lambda: sparse("tpl.jinja"))
case(
    "template: of a run, at generate",
    TALK,
    lambda: put("sftrun/chat_template.jinja", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    "any",
)
case("template: of a run, 2 GB", TALK, lambda: put("sftrun/chat_template.jinja", "{{ ('a' * 2000000000) }}"), "any")
case("template: of a run, at fit", SFT, lambda: put("chats/chat_template.jinja", "{{ 'a'.ljust(3000000000) }}"), "any")

GOOD = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def chat(row: Any) -> Callable[[], None]:
    line = row if isinstance(row, str | bytes) else json.dumps(row)
    return lambda: put(
        "chat.jsonl", Path("chat.jsonl").read_bytes() + (line if isinstance(line, bytes) else line.encode()) + b"\n"
    )


ROWS_OF_CHATS: dict[str, tuple[Any, str]] = {
    "a role of null": ({"messages": [{"role": None, "content": "x"}, GOOD[1]]}, "refuse"),
    "a role of a list": ({"messages": [{"role": ["user"], "content": "x"}, GOOD[1]]}, "refuse"),
    "a content of a number": ({"messages": [{"role": "user", "content": 5}, GOOD[1]]}, "refuse"),
    "a content of an object": ({"messages": [{"role": "user", "content": {"text": "x"}}, GOOD[1]]}, "refuse"),
    "messages that are a text": ({"messages": "hello"}, "refuse"),
    "messages that are texts": ({"messages": ["a", "b"]}, "refuse"),
    "a content with a lone surrogate": (
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}',
        "any",
    ),
    "a role twice": (
        '{"messages": [{"role": "user", "role": "assistant", "content": "x"}, {"role": "assistant", "content": "a"}]}',
        "any",
    ),
    "a content of 30 MB": ({"messages": [{"role": "user", "content": "a b " * 7_500_000}, GOOD[1]]}, "any"),
    "100,000 messages": ({"messages": GOOD * 50_000}, "any"),
    "arguments of deep JSON": (
        {
            "messages": [
                GOOD[0],
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
            ]
        },
        "any",
    ),
    "arguments of a huge integer": (
        {
            "messages": [
                GOOD[0],
                {
                    "role": "assistant",
                    "content": "a",
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": ' + LONG + "}"}}],
                },
            ]
        },
        "any",
    ),
    "tool_calls that are a text": ({"messages": [GOOD[0], {"role": "assistant", "content": "a", "tool_calls": "x"}]}, "any"),
    "tools of deep JSON text": ({"messages": GOOD, "tools": DEEP}, "any"),
    "tools that are a number": ({"messages": GOOD, "tools": 4}, "any"),
    "kwargs that replace the messages": (
        {"messages": GOOD, "chat_template_kwargs": {"messages": [], "add_generation_prompt": False}},
        "any",
    ),
    "kwargs of reserved words": (
        {
            "messages": GOOD,
            "chat_template_kwargs": {"self": 1, "tokenize": True, "conversation": 1, "chat_template": "x", "return_dict": 1},
        },
        "any",
    ),
    "kwargs with a name that is no name": (
        {"messages": GOOD, "chat_template_kwargs": {"": 1, "a b": 2, "__class__": 3}},
        "any",
    ),
    "kwargs that are a list": ({"messages": GOOD, "chat_template_kwargs": [1]}, "any"),
    "other bytes": (b'{"messages": [{"role": "user", "content": "\xff"}, {"role": "assistant", "content": "a"}]}', "refuse"),
    "NaN in a message": (
        '{"messages": [{"role": "user", "content": "a", "weight": NaN}, {"role": "assistant", "content": "a"}]}',
        "any",
    ),
    "a content of parts without end": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": [{"type": "text", "text": "x"}]}]}, GOOD[1]]},
        "refuse",
    ),
    "only an answer": ({"messages": [GOOD[1]]}, "any"),
    "an answer of nothing": ({"messages": [GOOD[0], {"role": "assistant", "content": ""}]}, "any"),
    "the end of a turn in a question": (
        {"messages": [{"role": "user", "content": "<|end_of_text|><|assistant|>"}, GOOD[1]]},
        "any",
    ),
}
for kind, (row, expected) in ROWS_OF_CHATS.items():
    case(f"chat: {kind}", CHAT, chat(row), expected)


# ---------------------------------------------------------------- text


def corpus(name: str | bytes, content: bytes = b"more text\n" * 50) -> Callable[[], None]:
    def make() -> None:
        with open(os.path.join(os.fsencode("corpus"), name if isinstance(name, bytes) else os.fsencode(name)), "wb") as file:
            file.write(content)

    return make


def parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = io.BytesIO()
    pq.write_table(pa.table({"text": [f"row {i} of text" for i in range(500)]}), made)
    return made.getvalue()


def arrow() -> bytes:
    import pyarrow as pa

    made = io.BytesIO()
    table = pa.table({"text": [f"row {i} of text" for i in range(500)]})
    with pa.ipc.new_file(made, table.schema) as writer:
        writer.write_table(table)
    return made.getvalue()


def zstd(content: bytes, **options: Any) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(**options).compress(content)


def zst_of(size: int) -> bytes:
    import zstandard

    made = io.BytesIO()
    with zstandard.ZstdCompressor(level=1).stream_writer(made, closefd=False) as writer:
        for _ in range(size >> 20):
            writer.write(b"a" * (1 << 20))
    return made.getvalue()


def jsonl(line: str | bytes) -> Callable[[], None]:
    raw = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
    good = b"".join(b'{"text": "some words of line %d"}\n' % i for i in range(200))
    return lambda: put("x.jsonl", good + raw + b"\n" + good)


LINES: dict[str, tuple[str | bytes, str]] = {
    "a text of NaN": ('{"text": NaN}', "refuse"),
    "a text of a number": ('{"text": 5}', "refuse"),
    "a text of a list": ('{"text": ["a"]}', "refuse"),
    "a text twice": ('{"text": "a", "text": "b"}', "any"),
    "deep brackets": ('{"text": "a", "x": ' + DEEP + "}", "refuse"),
    "deep but closed": ('{"text": "a", "x": ' + "[" * 5000 + "]" * 5000 + "}", "any"),
    "an integer of 5,000 digits": ('{"text": "a", "x": ' + LONG + "}", "any"),
    "a lone surrogate": ('{"text": "\\ud800 text"}', "any"),
    "a NUL": ('{"text": "a\\u0000b"}', "any"),
    "a byte order mark within": (b'\xef\xbb\xbf{"text": "a"}', "any"),
    "other bytes": (b'{"text": "\xff\xff"}', "refuse"),
    "an overlong NUL": (b'{"text": "\xc0\x80"}', "refuse"),
    "CR only": ('{"text": "a"}\r{"text": "b"}', "refuse"),
    "a comment": ('# {"text": "a"}', "refuse"),
    "half an object": ('{"text": "a"', "refuse"),
    "a line of 300 MB": ('{"text": "' + "a" * 1000 + '", "x": "' + "b" * (300 << 20) + '"}', "any"),
}
for kind, (line, expected) in LINES.items():
    case(f"text: a line with {kind}", JSONL, lambda j=line: jsonl(j)(), expected)
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "parquet cut in half": (lambda: parquet()[: len(parquet()) // 2], "refuse"),
    "parquet with a footer of 2^31": (lambda: parquet()[:-8] + struct.pack("<i", (1 << 31) - 1) + b"PAR1", "refuse"),
    "parquet with a negative footer": (lambda: parquet()[:-8] + struct.pack("<i", -5) + b"PAR1", "refuse"),
    "parquet with changed pages": (
        lambda: parquet()[:40] + bytes(b ^ 255 for b in parquet()[40:200]) + parquet()[200:],
        "refuse",
    ),
    "parquet of only its marks": (lambda: b"PAR1PAR1", "refuse"),
    "arrow cut in half": (lambda: arrow()[: len(arrow()) // 2], "refuse"),
    "arrow with a footer of -1": (lambda: arrow()[:-10] + struct.pack("<i", -1) + b"ARROW1", "refuse"),
    "arrow with changed bodies": (lambda: arrow()[:300] + b"\xff" * 900 + arrow()[1200:], "any"),
    "arrow with a length of 2^31 in a stream": (lambda: struct.pack("<ii", -1, (1 << 31) - 1) + bytes(100), "refuse"),
    "zst that needs a dictionary": (lambda: b"\x28\xb5\x2f\xfd\x23\x39\x30\x00\x00\x05" + bytes(20), "refuse"),
    "zst with a window of 2^41": (lambda: b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(20), "refuse"),
    "zst cut": (lambda: zstd(os.urandom(5000).hex().encode())[:-20], "refuse"),
    "zst of 400 MB in one line": (lambda: zst_of(400 << 20), "any"),
    "zst of 6 GB in one line": (lambda: zst_of(6 << 30), "any"),
    "gzip with text behind": (lambda: gzip.compress(b"text\n" * 50) + b"more text\n", "any"),
    "gzip of gzip": (lambda: gzip.compress(gzip.compress(b"text\n" * 50)), "any"),
    "gzip with a wrong checksum": (lambda: gzip.compress(b"text\n" * 500)[:-8] + bytes(8), "refuse"),
    "gzip with a name of 1 MB": (
        lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 1_000_000 + b"\0" + gzip.compress(b"text\n" * 50)[10:],
        "any",
    ),
    "gzip of nothing": (lambda: gzip.compress(b""), "any"),
    "xz with a dictionary of 4 GB": (
        lambda: lzma.compress(b"text\n" * 50, format=lzma.FORMAT_ALONE).replace(b"\0\0\x80\0", b"\xff\xff\xff\xff", 1),
        "any",
    ),
    "xz cut": (lambda: lzma.compress(os.urandom(5000).hex().encode())[:-30], "refuse"),
    "bz2 with NULs behind": (lambda: bz2.compress(b"text\n" * 50) + bytes(50), "any"),
    "bz2 with a changed block": (
        lambda: (lambda c: c[:30] + b"\xff" * 9 + c[39:])(bz2.compress(os.urandom(5000).hex().encode())),
        "refuse",
    ),
    "UTF-16": (lambda: ("text \u0444\n" * 50).encode("utf-16"), "any"),
    "UTF-32": (lambda: ("text \u0444\n" * 50).encode("utf-32"), "any"),
    "EBCDIC": (lambda: ("text and words\n" * 50).encode("cp500"), "any"),
    "one byte of Latin-1 at the end": (lambda: b"text\n" * 9000 + b"caf\xe9\n", "any"),
    "escapes of a terminal": (lambda: b"\x1b[2J\x1b]0;x\x07" * 50, "any"),
    "a zip called text": (lambda: rezip(b"PK\5\6" + bytes(18), lambda n, d: None, [("a.txt", b"x" * 99)]), "refuse"),
    "a pickle": (lambda: pickle.dumps({"a": list(range(1000))}), "refuse"),
}
for kind, (content_of, expected) in FILES.items():
    case(f"text: {kind}", FILE, lambda c=content_of: put("x", c()), expected)
for kind, name in {
    "other bytes": b"\xff\xfe.txt",
    "a line end": "a\nb.txt",
    "255 letters": "a" * 251 + ".txt",
    "a leading dash": "--out.txt",
    "brackets and stars": "[a]*?.txt",
    "escapes": "\x1b[2J.txt",
    "right to left": "\u202etxt.exe",
    "a backslash": "..\\..\\x.txt",
    "only spaces": "   ",
}.items():
    case(f"text: a name of {kind}", (PREPARE, CLEAN)[len(CASES) % 2], corpus(name), "any")
TARS: dict[str, tuple[Callable[[], Any], str]] = {
    "an absolute path": (lambda: tar([({"name": "/etc/x.txt"}, b"text of it\n" * 9)]), "any"),
    "a path of ..": (lambda: tar([({"name": "../../out/x.txt"}, b"text of it\n" * 9)]), "any"),
    "a hard link outside": (
        lambda: tar([({"name": "a.txt", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}, b"")]),
        "refuse",
    ),
    "a FIFO as text": (
        lambda: tar([({"name": "a.txt", "type": tarfile.FIFOTYPE}, b""), ({"name": "b.txt"}, b"text\n" * 9)]),
        "any",
    ),
    "a device as text": (lambda: tar([({"name": "a.txt", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, b"")]), "any"),
    "a folder as text": (
        lambda: tar([({"name": "a.txt", "type": tarfile.DIRTYPE}, b""), ({"name": "b.txt"}, b"text\n" * 9)]),
        "any",
    ),
    "a name of 100,000 letters": (lambda: tar([({"name": "n" * 100_000 + ".txt"}, b"text\n" * 9)]), "any"),
    "a name twice": (lambda: tar([({"name": "a.txt"}, b"text\n" * 9), ({"name": "a.txt"}, b"other\n" * 9)]), "any"),
    "a name in other bytes": (lambda: tar([({"name": "a\udcff.txt"}, b"text\n" * 9)], errors="surrogateescape"), "any"),
    "a pax header of a million keys": (
        lambda: tar(
            [({"name": "a.txt", "pax_headers": {f"k{i}": "v" for i in range(200_000)}}, b"text\n" * 9)],
            format=tarfile.PAX_FORMAT,
        ),
        "any",
    ),
    "a pax size of 10^30": (
        lambda: tar([({"name": "a.txt", "pax_headers": {"size": "9" * 30}}, b"text\n" * 9)], format=tarfile.PAX_FORMAT),
        "refuse",
    ),
    "a pax size in words": (
        lambda: tar([({"name": "a.txt", "pax_headers": {"size": "many"}}, b"text\n" * 9)], format=tarfile.PAX_FORMAT),
        "refuse",
    ),
    "a cut member": (lambda: (tar([({"name": "a.txt"}, b"text\n" * 900)]), put("x", Path("x").read_bytes()[:2000])), "refuse"),
    "a size of 8 GB": (
        lambda: (tar([({"name": "a.txt"}, b"text\n" * 9)]), put("x", tar_size(Path("x").read_bytes(), b"77777777777\0"))),
        "refuse",
    ),
    "a negative size": (
        lambda: (tar([({"name": "a.txt"}, b"text\n" * 9)]), put("x", tar_size(Path("x").read_bytes(), b"\xff" * 12))),
        "refuse",
    ),
    "a json member of deep brackets": (lambda: tar([({"name": "a.json"}, DEEP.encode())]), "refuse"),
    "a tar in a tar": (
        lambda: (tar([({"name": "b.txt"}, b"text\n" * 9)], "y"), tar([({"name": "a.txt"}, Path("y").read_bytes())])),
        "any",
    ),
    "sparse of old GNU with 2^60 bytes": (
        lambda: (
            tar([({"name": "a.txt", "type": tarfile.GNUTYPE_SPARSE}, b"text\n" * 9)]),
            put("x", tar_sparse(Path("x").read_bytes())),
        ),
        "any",
    ),
}


def tar_fixed(head: bytes) -> bytes:
    blank = head[:148] + b" " * 8 + head[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def tar_size(content: bytes, size: bytes) -> bytes:
    return tar_fixed(content[:124] + size + content[136:512]) + content[512:]


def tar_sparse(content: bytes) -> bytes:
    return (
        tar_fixed(content[:386] + b"00000000000\0" + b"77777777777\0" + content[410:483] + b"77777777777\0" + content[495:512])
        + content[512:]
    )


for kind, (make_tar, expected) in TARS.items():
    case(f"tar: {kind}", FILE, lambda m=make_tar: m(), expected)
case(
    "text: folders that link to each other",
    PREPARE,
    lambda: (os.symlink("..", "corpus/up"), os.symlink("../corpus", "corpus/again")),
    "any",
)
case("text: a file that grows", PREPARE, lambda: grow("corpus/t1.txt", b"more\n"), "any")
case("text: a file that flickers", PREPARE, lambda: flicker("corpus/t1.txt"), "any")
case("text: a socket", PREPARE, lambda: unix_socket("corpus/s.txt"), "any")
case("text: memory of this process", PREPARE, lambda: os.symlink("/proc/self/mem", "corpus/mem.txt"), "any")
case("text: an endless device below /dev", PREPARE, lambda: device(1, 9)("corpus/random.txt"), "any")
case("text: 2 GB of NULs", PREPARE, lambda: sparse("corpus/nul.txt", 2 << 30), "any")
case(
    "text: a folder that cannot be read",
    PREPARE,
    lambda: (os.makedirs("corpus/secret"), put("corpus/secret/a.txt", "x"), unreadable("corpus/secret")),
)
case("text: a file that cannot be read", PREPARE, lambda: unreadable("corpus/t2.txt"))
case(
    "text: folders 400 deep",
    PREPARE,
    lambda: (os.makedirs("corpus/" + "d/" * 400), put("corpus/" + "d/" * 400 + "a.txt", "deep text\n" * 20)),
    "any",
)
case("text: a path longer than the system allows", FILE.replace(" x ", " " + "d/" * 3000 + "a.txt "), lambda: None)
case("text: no file at all", PREPARE, lambda: (shutil.rmtree("corpus"), os.makedirs("corpus")))
case("text: 20,000 empty files", PREPARE, lambda: [put(f"corpus/e{i}.txt", "") for i in range(20_000)], "any")
case("text: one word only", FILE, lambda: put("x", "word"), "any")
case("text: times before 1970", PREPARE, lambda: os.utime("corpus/t1.txt", (-(10**9), -(10**9))), "fine")
case(
    "text: times in the year 9999",
    "fit --config base.yaml --run_dir o",
    lambda: os.utime("corpus/t1.txt", (253402300000, 253402300000)),
    "fine",
)
case("text: reference documents are a socket", AGAINST, lambda: unix_socket("x"))
case("text: reference documents are binary", AGAINST, lambda: put("x", os.urandom(9999)), "any")


# ---------------------------------------------------------------- folders of Hugging Face

HF: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a vocabulary of 10^12": (lambda c: c.update(vocab_size=10**12), "refuse"),
    "a vocabulary of -1": (lambda c: c.update(vocab_size=-1), "refuse"),
    "a vocabulary of 300.5": (lambda c: c.update(vocab_size=300.5), "refuse"),
    "a vocabulary that is true": (lambda c: c.update(vocab_size=True), "refuse"),
    "no heads": (lambda c: c.update(num_attention_heads=0), "refuse"),
    "a width in words": (lambda c: c.update(hidden_size="16"), "refuse"),
    "layers of 10^9": (lambda c: c.update(num_hidden_layers=10**9), "refuse"),
    "layers of null": (lambda c: c.update(num_hidden_layers=None), "refuse"),
    "key heads of 3": (lambda c: c.update(num_key_value_heads=3), "refuse"),
    "an eps of NaN": (lambda c: c.update(rms_norm_eps=float("nan")), "refuse"),
    "an eps of -1": (lambda c: c.update(rms_norm_eps=-1), "refuse"),
    "a theta of 0": (lambda c: c.update(rope_theta=0), "refuse"),
    "a theta of a list": (lambda c: c.update(rope_theta=[1]), "refuse"),
    "an unknown scaling": (lambda c: c.update(rope_scaling={"rope_type": "magic", "factor": 2}), "refuse"),
    "a scaling in words": (lambda c: c.update(rope_scaling="yarn"), "refuse"),
    "a scaling of factors of NaN": (lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": float("nan")}), "refuse"),
    "longrope of strings": (
        lambda c: c.update(rope_scaling={"rope_type": "longrope", "short_factor": "x", "long_factor": "y"}),
        "refuse",
    ),
    "kinds of more layers": (lambda c: c.update(layer_types=["full_attention"] * 9), "refuse"),
    "kinds of unknown layers": (lambda c: c.update(layer_types=["magic"]), "refuse"),
    "kinds of numbers": (lambda c: c.update(layer_types=5), "refuse"),
    "an unknown activation": (lambda c: c.update(hidden_act="swish7"), "refuse"),
    "an activation of a list": (lambda c: c.update(hidden_act=["relu"]), "refuse"),
    "a model type of a list": (lambda c: c.update(model_type=["qwen3"]), "refuse"),
    "architectures of null": (lambda c: c.update(architectures=None), "any"),
    "an end of 10^30": (lambda c: c.update(eos_token_id=BIG), "any"),
    "ends in a nested list": (lambda c: c.update(eos_token_id=[[0]]), "refuse"),
    "an end beyond the vocabulary": (lambda c: c.update(eos_token_id=5000), "any"),
    "a context of 10^15": (lambda c: c.update(max_position_embeddings=10**15), "any"),
    "a context of 0": (lambda c: c.update(max_position_embeddings=0), "refuse"),
    "code of another author": (lambda c: c.update(auto_map={"AutoModelForCausalLM": "evil.Model"}), "any"),
    "quantisation": (lambda c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}), "refuse"),
    "an unknown dtype": (lambda c: c.update(torch_dtype="float3"), "any"),
    "tied embeddings in words": (lambda c: c.update(tie_word_embeddings="no"), "any"),
    "a window of -1": (lambda c: c.update(use_sliding_window=True, sliding_window=-1), "refuse"),
}
for kind, (change, expected) in HF.items():
    case(f"hf: config.json with {kind}", IMPORT, lambda c=change: edit("hf/config.json", c), expected)
W = "hf/model.safetensors"
SAFE: dict[str, tuple[Callable[[Any, bytes], Any], str]] = {
    "offsets that overlap": (
        lambda h, d: first(h).update(
            data_offsets=next(v["data_offsets"] for k, v in list(h.items())[2:] if k != "__metadata__")
        ),
        "refuse",
    ),
    "offsets reversed": (lambda h, d: first(h)["data_offsets"].reverse(), "refuse"),
    "offsets beyond the end": (lambda h, d: first(h).update(data_offsets=[1 << 40, (1 << 40) + 8]), "refuse"),
    "offsets of 10^30": (lambda h, d: first(h).update(data_offsets=[0, BIG]), "refuse"),
    "negative offsets": (lambda h, d: first(h).update(data_offsets=[-8, 0]), "refuse"),
    "offsets in words": (lambda h, d: first(h).update(data_offsets="all"), "refuse"),
    "a dtype of I32": (lambda h, d: first(h).update(dtype="I32"), "refuse"),
    "a dtype of U8 with its size": (
        lambda h, d: first(h).update(dtype="U8", shape=[first(h)["shape"][0], 4 * first(h)["shape"][-1]]),
        "refuse",
    ),
    "a dtype of two F16": (
        lambda h, d: first(h).update(dtype="F16", shape=[2 * first(h)["shape"][0], *first(h)["shape"][1:]]),
        "refuse",
    ),
    "an unknown dtype": (lambda h, d: first(h).update(dtype="F3"), "refuse"),
    "a shape of 2^32 by 2^32": (lambda h, d: first(h).update(shape=[1 << 32, 1 << 32]), "refuse"),
    "a negative shape": (lambda h, d: first(h).update(shape=[-1, 16]), "refuse"),
    "a shape of 100,000 ones": (lambda h, d: first(h).update(shape=[1] * 100_000), "refuse"),
    "a shape that is a number": (lambda h, d: first(h).update(shape=5), "refuse"),
    "no shape": (lambda h, d: first(h).pop("shape") and None, "refuse"),
    "metadata of numbers": (lambda h, d: h.update(__metadata__={"a": 1}), "any"),
    "metadata of 60 MB": (lambda h, d: h.update(__metadata__={"a": "x" * (60 << 20)}), "any"),
    "a missing tensor": (lambda h, d: h.pop("model.norm.weight") and None, "refuse"),
    "a surplus tensor of no size": (
        lambda h, d: h.update({"model.more": {"dtype": "F32", "shape": [0], "data_offsets": [len(d), len(d)]}}),
        "any",
    ),
    "a name with a NUL": (
        lambda h, d: h.update({"a\0b": {"dtype": "F32", "shape": [0], "data_offsets": [len(d), len(d)]}}),
        "any",
    ),
    "a layer of number 10^9": (
        lambda h, d: h.update(
            {"model.layers.1000000000.input_layernorm.weight": {"dtype": "F32", "shape": [0], "data_offsets": [len(d), len(d)]}}
        ),
        "any",
    ),
    "weights of NaN": (lambda h, d: (h, b"\xff" * len(d)), "any"),
    "data cut": (lambda h, d: (h, d[:-100]), "refuse"),
    "data behind": (lambda h, d: (h, d + bytes(100)), "refuse"),
    "a header of a list": (lambda h, d: (b"[]", d), "refuse"),
    "a header of deep brackets": (lambda h, d: (DEEP.encode(), d), "refuse"),
    "a header in other bytes": (lambda h, d: (b"\xff" * 100, d), "refuse"),
    "a header with a byte order mark": (lambda h, d: (b"\xef\xbb\xbf" + json.dumps(h).encode(), d), "refuse"),
    "a tensor twice": (
        lambda h, d: (json.dumps(h).encode()[:-1] + b"," + json.dumps(dict(list(h.items())[-1:])).encode()[1:], d),
        "any",
    ),
    "an empty header": (lambda h, d: (b"", d), "refuse"),
}
for kind, (change, expected) in SAFE.items():
    case(f"hf: weights with {kind}", IMPORT, lambda c=change: safe(W, c), expected)
case("hf: weights with a header of 2^63 bytes", IMPORT, lambda: put(W, struct.pack("<Q", 1 << 63) + b"{}"))
case(
    "hf: weights with a header of 90 MB of spaces",
    IMPORT,
    lambda: safe(W, lambda h, d: (json.dumps(h).encode() + b" " * (90 << 20), d)),
    "any",
)
case("hf: weights of 5 bytes", IMPORT, lambda: put(W, b"12345"))
case("hf: weights flicker", IMPORT, lambda: flicker(W), "any")


def index(mapping: dict[str, Any] | Any) -> None:
    header, data = tensors(W)
    names = [name for name in header if name != "__metadata__"]
    put_tensors("hf/a.safetensors", header, data)
    os.remove(W)
    put(
        "hf/model.safetensors.index.json",
        json.dumps({"metadata": {}, "weight_map": mapping if not callable(mapping) else mapping(names)}),
    )


INDEXES: dict[str, Callable[[list[str]], Any]] = {
    "names a socket": lambda n: (unix_socket("hf/s.safetensors"), {k: "s.safetensors" for k in n})[1],
    "names a missing part": lambda n: {k: ("b.safetensors" if i else "a.safetensors") for i, k in enumerate(n)},
    "names itself": lambda n: {k: "model.safetensors.index.json" for k in n},
    "names numbers": lambda n: {k: 5 for k in n},
    "names nothing": lambda n: {},
    "is a list": lambda n: ["a.safetensors"],
    "names a folder": lambda n: (os.makedirs("hf/d.safetensors"), {k: "d.safetensors" for k in n})[1],
    "names a NUL": lambda n: {k: "a\0.safetensors" for k in n},
    "names a lone surrogate": lambda n: {k: "\ud800.safetensors" for k in n},
    "lacks a weight": lambda n: {k: "a.safetensors" for k in n[1:]},
    "names surplus weights": lambda n: {**{k: "a.safetensors" for k in n}, "model.more": "a.safetensors"},
    "names 100,000 parts": lambda n: {f"w{i}": f"p{i}.safetensors" for i in range(100_000)},
}
for kind, mapping in INDEXES.items():
    case(
        f"hf: an index that {kind}",
        IMPORT,
        lambda m=mapping: index(m),
        "any" if kind in ("lacks a weight", "names surplus weights") else "refuse",
    )


# ---------------------------------------------------------------- adapters

ADAPTERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rank 0": (lambda c: c.update(r=0), "refuse"),
    "rank -1": (lambda c: c.update(r=-1), "refuse"),
    "rank 2.5": (lambda c: c.update(r=2.5), "refuse"),
    "rank 3": (lambda c: c.update(r=3), "refuse"),
    "rank 10^9": (lambda c: c.update(r=10**9), "refuse"),
    "alpha NaN": (lambda c: c.update(lora_alpha=float("nan")), "refuse"),
    "alpha infinite": (lambda c: c.update(lora_alpha=float("inf")), "refuse"),
    "alpha in words": (lambda c: c.update(lora_alpha="32"), "refuse"),
    "a pattern that backtracks": (lambda c: c.update(target_modules="(.*.*)*(q_proj|k_proj)+(.*)*$x"), "any"),
    "targets of numbers": (lambda c: c.update(target_modules=[1, 2]), "any"),
    "no targets": (lambda c: c.update(target_modules=[]), "any"),
    "fewer targets than weights": (lambda c: c.update(target_modules=["q_proj"]), "any"),
    "dora": (lambda c: c.update(use_dora=True), "refuse"),
    "rslora": (lambda c: c.update(use_rslora=True), "any"),
    "rslora in words": (lambda c: c.update(use_rslora="yes"), "refuse"),
    "biases": (lambda c: c.update(bias="all"), "refuse"),
    "fan in, fan out": (lambda c: c.update(fan_in_fan_out=True), "any"),
    "rank patterns that backtrack": (lambda c: c.update(rank_pattern={"(a|a)*b(.*.*)*": 2}), "any"),
    "rank patterns of words": (lambda c: c.update(rank_pattern={"q_proj": "x"}), "refuse"),
    "alpha patterns of NaN": (lambda c: c.update(alpha_pattern={"q_proj": float("nan")}), "refuse"),
    "layers to transform": (lambda c: c.update(layers_to_transform=[0, 5]), "any"),
    "modules to save": (lambda c: c.update(modules_to_save=["lm_head"]), "refuse"),
    "a dropout of 2": (lambda c: c.update(lora_dropout=2), "any"),
    "another kind": (lambda c: c.update(peft_type="IA3"), "refuse"),
    "a base elsewhere": (lambda c: c.update(base_model_name_or_path="../../out/run"), "any"),
    "a layer pattern of a list": (lambda c: c.update(layers_pattern=[["x"]]), "any"),
}
for kind, (change, expected) in ADAPTERS.items():
    case(f"adapter: {kind}", ADAPTER, lambda c=change: edit("adapter/adapter_config.json", c), expected)
A = "adapter/adapter_model.safetensors"
ADAPTER_WEIGHTS: dict[str, tuple[Callable[[Any, bytes], Any], str]] = {
    "an unknown module": (
        lambda h, d: h.update(
            {"base_model.model.magic.lora_A.weight": {"dtype": "F32", "shape": [0, 2], "data_offsets": [len(d), len(d)]}}
        ),
        "refuse",
    ),
    "one factor only": (lambda h, d: h.pop(next(k for k in h if "lora_B" in k)) and None, "refuse"),
    "half precision": (
        lambda h, d: first(h).update(dtype="F16", shape=[first(h)["shape"][0], 2 * first(h)["shape"][1]]),
        "refuse",
    ),
    "integers": (lambda h, d: first(h).update(dtype="I32"), "refuse"),
    "factors exchanged": (lambda h, d: first(h)["shape"].reverse(), "refuse"),
    "NaN": (lambda h, d: (h, b"\xff" * len(d)), "any"),
    "a layer that the base lacks": (
        lambda h, d: h.update(
            {
                "base_model.model.model.layers.77.self_attn.q_proj.lora_A.weight": {
                    "dtype": "F32",
                    "shape": [0, 16],
                    "data_offsets": [len(d), len(d)],
                }
            }
        ),
        "refuse",
    ),
}
for kind, (change, expected) in ADAPTER_WEIGHTS.items():
    case(f"adapter: weights of {kind}", ADAPTER, lambda c=change: safe(A, c), expected)
case("adapter: weights are those of a model", ADAPTER, lambda: shutil.copy(W, A))
case(
    "adapter: the base is a run of other shapes",
    ADAPTER.replace("base", "base2"),
    lambda: (shutil.copytree("base", "base2"), state(lambda v: v["model_config"].update(n_embd=32), "base2")),
)
case("adapter: the base's link of a run was moved", TUNED, lambda: (shutil.rmtree("base"), os.symlink("../out/run", "base")))
case("adapter: the base is itself", TUNED, lambda: (shutil.rmtree("base"), os.symlink("tuned", "base")))


# ---------------------------------------------------------------- shards


def ids(split: str, change: Callable[[Any], Any], folder: str = "shards", seal_it: bool = True) -> None:
    import numpy as np

    path = f"{folder}/{split}_000000.bin"
    content = Path(path).read_bytes()
    values = np.frombuffer(content[1024:], "<u2").copy()
    changed = change(values)
    put(path, content[:1024] + (values if changed is None else changed).tobytes())
    if seal_it:
        shards_sealed(folder)


def shard(
    change: Callable[[bytes], bytes], name: str = "train_000000.bin", folder: str = "shards", seal_it: bool = True
) -> None:
    put(f"{folder}/{name}", change(Path(folder, name).read_bytes()))
    if seal_it:
        shards_sealed(folder)


SHARD: dict[str, tuple[Damage, str]] = {
    "an id beyond the vocabulary": (lambda: ids("train", lambda v: v.__setitem__(100, 9999)), "refuse"),
    "an id beyond in validation": (lambda: ids("val", lambda v: v.__setitem__(100, 9999)), "refuse"),
    "a count that is larger": (lambda: shard(lambda c: c[:8] + struct.pack("<i", 10**9) + c[12:]), "refuse"),
    "a count that is negative": (lambda: shard(lambda c: c[:8] + struct.pack("<i", -1) + c[12:]), "refuse"),
    "a count that is smaller": (lambda: shard(lambda c: c[:8] + struct.pack("<i", 5) + c[12:]), "refuse"),
    "another magic": (lambda: shard(lambda c: b"\0" * 4 + c[4:]), "refuse"),
    "version 7": (lambda: shard(lambda c: c[:4] + struct.pack("<i", 7) + c[8:]), "refuse"),
    "half a token at the end": (lambda: shard(lambda c: c + b"\1"), "refuse"),
    "only a header": (lambda: shard(lambda c: c[:1024]), "refuse"),
    "a changed byte, unsealed": (lambda: shard(lambda c: c[:5000] + b"\1" + c[5001:], seal_it=False), "refuse"),
    "document ends that fall": (lambda: shard(lambda c: c[8:16] + c[:8] + c[16:], "train_000000.docs"), "refuse"),
    "document ends beyond": (lambda: shard(lambda c: c[:16] + struct.pack("<Q", 1 << 60), "train_000000.docs"), "refuse"),
    "document ends twice": (lambda: shard(lambda c: c[:8] + c[:8] + c[16:], "train_000000.docs"), "refuse"),
    "half an end": (lambda: shard(lambda c: c[:-3], "train_000000.docs"), "refuse"),
    "no ends": (lambda: shard(lambda c: b"", "train_000000.docs"), "refuse"),
    "a plan of packing cut": (lambda: shard(lambda c: c[:-9], "train_pack-T32.idx"), "refuse"),
    "a plan of packing with wild numbers": (
        lambda: shard(lambda c: c[:200] + b"\xff" * 80 + c[280:], "train_pack-T32.idx"),
        "refuse",
    ),
    "a plan of packing with one changed bit": (
        lambda: shard(lambda c: c[:900] + bytes([c[900] ^ 1]) + c[901:], "train_pack-T32.idx"),
        "refuse",
    ),
    "a plan of packing with a count of 2^60": (
        lambda: shard(lambda c: c[:32] + struct.pack("<Q", 1 << 60) + c[40:], "train_pack-T32.idx"),
        "refuse",
    ),
    "a plan of packing with zeros for counts": (
        lambda: shard(lambda c: c[:32] + bytes(32) + c[64:], "train_pack-T32.idx"),
        "refuse",
    ),
    "a plan of packing, sparse": (lambda: sparse("shards/train_pack-T32.idx"), "refuse"),
}
for kind, (damage, expected) in SHARD.items():
    case(f"shards: {kind}", SHARDS, damage, expected)
META: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a format of 99": (lambda m: m.update(format=99), "refuse"),
    "a format of true": (lambda m: m.update(format=True), "refuse"),
    "a vocabulary of 10": (lambda m: m.update(vocab_size=10), "refuse"),
    "a vocabulary of 10^12": (lambda m: m.update(vocab_size=10**12), "refuse"),
    "a vocabulary in words": (lambda m: m.update(vocab_size="300"), "refuse"),
    "an end of 10^9": (lambda m: m.update(eos_id=10**9), "refuse"),
    "an end of 1.5": (lambda m: m.update(eos_id=1.5), "refuse"),
    "a start of a list": (lambda m: m.update(bos_id=[0]), "refuse"),
    "splits of null": (lambda m: m.update(splits=None), "refuse"),
    "a split of a list": (lambda m: m["splits"].update(train=[1]), "refuse"),
    "shards of null": (lambda m: m["splits"]["train"].update(shards=None), "refuse"),
    "a shard outside": (lambda m: m["splits"]["train"]["shards"][0].update(file="../../out/keep.txt"), "refuse"),
    "a shard twice": (lambda m: m["splits"]["train"]["shards"].append(m["splits"]["train"]["shards"][0]), "refuse"),
    "tokens of -1": (lambda m: m["splits"]["train"].update(tokens=-1), "refuse"),
    "tokens of another number": (lambda m: m["splits"]["train"].update(tokens=7), "refuse"),
    "bytes of NaN": (lambda m: m["splits"]["val"].update(bytes=float("nan"), token_bytes=float("nan")), "refuse"),
    "bytes of 10^30": (lambda m: m["splits"]["val"].update(bytes=BIG, token_bytes=BIG), "any"),
    "bytes of 0": (lambda m: m["splits"]["val"].update(bytes=0, token_bytes=0), "any"),
    "a largest id of -1": (lambda m: m["splits"]["train"]["shards"][0].update(max_id=-1), "refuse"),
    "a largest id in words": (lambda m: m["splits"]["train"]["shards"][0].update(max_id="x"), "refuse"),
    "a tokenizer's name of another": (lambda m: m.update(tokenizer="json-" + "0" * 64), "refuse"),
    "a tokenizer's name of null": (lambda m: m.update(tokenizer=None), "refuse"),
    "a hash of null": (lambda m: m["splits"]["train"]["shards"][0].update(blake2b=None), "refuse"),
    "documents of 2.5": (lambda m: m["splits"]["train"]["shards"][0].update(documents=2.5), "refuse"),
}
for kind, (change, expected) in META.items():
    case(f"shards: meta.json with {kind}", SHARDS, lambda c=change: edit("shards/meta.json", c), expected)
case("shards: masks of 2", SFT, lambda: shard(lambda c: c.replace(b"\1", b"\2"), "train_000000.mask", "chats"))
case("shards: masks of 0 only", SFT, lambda: shard(lambda c: bytes(len(c)), "train_000000.mask", "chats"))
case("shards: a mask cut", SFT, lambda: shard(lambda c: c[:-5], "train_000000.mask", "chats"))
case("shards: a mask is missing", SFT, lambda: os.remove("chats/train_000000.mask"))
case("shards: a mask of another folder, unsealed", SFT, lambda: shutil.copy("chats/val_000000.mask", "chats/train_000000.mask"))
case("shards: learned tokens of -1", SFT, lambda: edit("chats/meta.json", lambda m: m["splits"]["train"].update(targets=-1)))
case(
    "shards: the cache's tokens are cut",
    FIT,
    lambda: [put(str(p), p.read_bytes()[:-100]) for p in Path("cache").rglob("train*.bin")],
    "any",
)
case("shards: the cache's meta is deep", FIT, lambda: [put(str(p), DEEP) for p in Path("cache").rglob("meta.json")], "any")
case("shards: the cache's meta is a list", FIT, lambda: [put(str(p), "[]") for p in Path("cache").rglob("meta.json")], "any")
case(
    "shards: the cache's tokenizer is another",
    FIT,
    lambda: [shutil.copy("chats/meta.json", p) for p in Path("cache").rglob("tokenizer.json")],
    "any",
)
case("shards: the cache is a link loop", FIT, lambda: (shutil.rmtree("cache"), loop("cache")))
case("shards: the cache is a socket", FIT, lambda: (shutil.rmtree("cache"), unix_socket("cache")))
case(
    "shards: the cache's entry links outside",
    FIT,
    lambda: [
        (shutil.rmtree(p), os.symlink(os.path.abspath("../out/folder"), p))
        for p in Path("cache/tokens").iterdir()
        if p.is_dir()
    ],
    "any",
)
case(
    "shards: a partial folder of lies",
    PREPARE,
    lambda: (
        os.makedirs(".o.partial"),
        put(".o.partial/meta.json", DEEP),
        put(".o.partial/x.json", "[]"),
        put(".o.partial/state.json", "null"),
    ),
    "any",
)
case("shards: a partial folder that links outside", PREPARE, lambda: os.symlink("../out/folder", ".o.partial"), "any")
case("shards: a partial folder that is a file", PREPARE, lambda: put(".o.partial", "x"), "any")
case("shards: a log that links outside", PREPARE, lambda: os.symlink("../out/keep.txt", ".o.log"), "any")
case("shards: a log that is a socket", PREPARE, lambda: unix_socket(".o.log"), "any")
case("shards: a log that is /dev/full", PREPARE, lambda: os.symlink("/dev/full", ".o.log"), "any")
case("shards: a partial folder of clean that links outside", CLEAN, lambda: os.symlink("../out/folder", ".o.partial"), "any")


# ---------------------------------------------------------------- questions

QUESTIONS: dict[str, tuple[Any, str]] = {
    "a gold of -1": ({"query": "a", "choices": ["b", "c"], "gold": -1}, "refuse"),
    "a gold beyond": ({"query": "a", "choices": ["b", "c"], "gold": 2}, "refuse"),
    "a gold of true": ({"query": "a", "choices": ["b", "c"], "gold": True}, "refuse"),
    "a gold of 1.0": ({"query": "a", "choices": ["b", "c"], "gold": 1.0}, "any"),
    "a gold of 10^30": ({"query": "a", "choices": ["b", "c"], "gold": BIG}, "refuse"),
    "no choices": ({"query": "a", "choices": [], "gold": 0}, "refuse"),
    "a choice of null": ({"query": "a", "choices": [None, "b"], "gold": 1}, "refuse"),
    "an empty choice": ({"query": "a", "choices": ["", "b"], "gold": 0}, "any"),
    "choices that are a text": ({"query": "a", "choices": "bc", "gold": 0}, "refuse"),
    "a query of a number": ({"query": 4, "choices": ["b", "c"], "gold": 0}, "refuse"),
    "a query of a lone surrogate": ('{"query": "\\ud800", "choices": ["a", "b"], "gold": 0}', "refuse"),
    "a choice of 3 MB": ({"query": "a", "choices": ["b " * 1_500_000, "c"], "gold": 0}, "any"),
    "deep brackets": (DEEP, "refuse"),
    "a list": ([1], "refuse"),
    "NaN": ("NaN", "refuse"),
    "2,000 choices": ({"query": "a", "choices": [str(i) for i in range(2000)], "gold": 0}, "any"),
    "two golds": ('{"query": "a", "choices": ["a", "b"], "gold": 0, "gold": 1}', "any"),
}
for kind, (row, expected) in QUESTIONS.items():
    case(
        f"quiz: {kind}",
        QUIZ,
        lambda r=row: put("quiz.jsonl", Path("quiz.jsonl").read_text() + (r if isinstance(r, str) else json.dumps(r)) + "\n"),
        expected,
    )


# ---------------------------------------------------------------- outputs

for kind, make_out in {
    "a link to a folder outside": lambda: os.symlink("../out/folder", "o"),
    "a link to a file outside": lambda: os.symlink("../out/keep.txt", "o"),
    "a dangling link": lambda: os.symlink("../out/new", "o"),
    "a link to itself": lambda: loop("o"),
    "a socket": lambda: unix_socket("o"),
    "a mount point": lambda: mounted("o", "size=1m"),
}.items():
    for command in (PREPARE, EXPORT, CONSOLIDATE, IMPORT, CLEAN):
        if (len(CASES) + len(kind)) % 2:
            case(f"output: {command.split()[0]} to {kind}", command, make_out, "any")
        else:
            case(f"output: {command.split()[0]} to {kind}, replaced", command + " --replace true", make_out, "any")
for name in ("..", ".", "/", "run", "corpus", "o/../../out/folder", "a" * 300, "corpus/o", "o\nx", "run/checkpoints"):
    case(f"output: export to {name[:20]!r}", f"export\0--run\0run\0--out\0{name}", lambda: None, "any")
case("output: curve to /dev/full", CURVE.replace("o.csv", "/dev/full"), lambda: None, "any")
case(
    "output: report to a link outside, replaced",
    REPORT + " --replace true",
    lambda: os.symlink("../out/keep.txt", "o.html"),
    "any",
)
case("output: report to a name without folder", REPORT.replace("o.html", "none/at/all.html"), lambda: None, "any")
case("output: find-lr to a socket", "find-lr --config base.yaml --out o --replace true", lambda: unix_socket("o"), "any")


# ---------------------------------------------------------------- the machine


def environment(**values: str | None) -> Damage:
    def change() -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return change


def closed_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def gone() -> None:
    """The working directory is deleted."""
    shutil.copytree("run", "../out/copy", symlinks=True)
    os.makedirs("gone")
    os.chdir("gone")
    os.rmdir("../gone")


MACHINE: dict[str, tuple[str, Damage, str]] = {
    "20 open files": (FIT, lambda: limit("RLIMIT_NOFILE", 20), "any"),
    "9 open files": (GENERATE, lambda: limit("RLIMIT_NOFILE", 9), "any"),
    "20 open files, prepare with workers": (PREPARE + " --workers 2", lambda: limit("RLIMIT_NOFILE", 20), "any"),
    "files of 100 kB at most, fit": (FIT, lambda: limit("RLIMIT_FSIZE", 100_000), "any"),
    "files of 1 kB at most, prepare": (PREPARE, lambda: limit("RLIMIT_FSIZE", 1000), "refuse"),
    "files of 1 kB at most, clean": (CLEAN, lambda: limit("RLIMIT_FSIZE", 1000), "refuse"),
    "files of 10 kB at most, export": (EXPORT, lambda: limit("RLIMIT_FSIZE", 10_000), "refuse"),
    "files of 10 kB at most, import": (IMPORT, lambda: limit("RLIMIT_FSIZE", 10_000), "refuse"),
    "files of 10 kB at most, consolidate": (CONSOLIDATE, lambda: limit("RLIMIT_FSIZE", 10_000), "refuse"),
    "files of 50 bytes at most, curve": (CURVE, lambda: limit("RLIMIT_FSIZE", 50), "refuse"),
    "files of 1 kB at most, report": (REPORT, lambda: limit("RLIMIT_FSIZE", 1000), "refuse"),
    "files of 0 bytes, generate": (GENERATE, lambda: limit("RLIMIT_FSIZE", 0), "any"),
    "no second process, as nobody, prepare": (PREPARE + " --workers 2", lambda: (nobody(), limit("RLIMIT_NPROC", 1)), "any"),
    "no second process, as nobody, a chat template": (CHAT, lambda: (nobody(), limit("RLIMIT_NPROC", 1)), "any"),
    "no second process, as nobody, fit with a loader": (
        FIT + " --data.num_workers 1",
        lambda: (nobody(), limit("RLIMIT_NPROC", 1)),
        "any",
    ),
    "no second process, as nobody, generate": (GENERATE, lambda: (nobody(), limit("RLIMIT_NPROC", 1)), "any"),
    "memory of 200 MB more, generate": (GENERATE, lambda: limit("RLIMIT_AS", own_size() + (200 << 20)), "any"),
    "memory of 30 MB more, report": (REPORT, lambda: limit("RLIMIT_AS", own_size() + (30 << 20)), "any"),
    "memory of 60 MB more, prepare": (PREPARE, lambda: limit("RLIMIT_AS", own_size() + (60 << 20)), "any"),
    "memory of 100 MB more, import": (IMPORT, lambda: limit("RLIMIT_AS", own_size() + (100 << 20)), "any"),
    "memory of 100 MB more, a chat template": (CHAT, lambda: limit("RLIMIT_AS", own_size() + (100 << 20)), "any"),
    "data of 150 MB more": (FIT, lambda: limit("RLIMIT_DATA", own_size() + (150 << 20)), "any"),
    "a stack of 256 kB": (FIT, lambda: resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, 256 << 10)), "any"),
    "no locked memory": (GENERATE, lambda: limit("RLIMIT_MEMLOCK", 0), "fine"),
    "standard input closed": (FIT, lambda: os.close(0), "any"),
    "standard output closed, generate": (GENERATE, lambda: os.close(1), "any"),
    "standard error closed, a mistake": ("generate --run none --prompt a", lambda: os.close(2), "any"),
    "all three closed, fit": (FIT, lambda: [os.close(i) for i in (0, 1, 2)], "any"),
    "output full, generate": (GENERATE, lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1), "refuse"),
    "output full, report": (REPORT, lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1), "any"),
    "output read by nobody, prepare": (PREPARE, closed_pipe, "any"),
    "output read by nobody, doctor": (DOCTOR, closed_pipe, "any"),
    "output read by nobody, plan": (PLAN, closed_pipe, "any"),
    "no home": (FIT, environment(HOME=None, LIT_LLM_CACHE=None, XDG_CACHE_HOME=None), "any"),
    "a home that is a file": (FIT, lambda: environment(HOME=os.path.abspath("base.yaml"), LIT_LLM_CACHE=None)(), "any"),
    "a home that does not exist": (FIT, environment(HOME="/nonexistent/x", LIT_LLM_CACHE=None), "any"),
    "a home that cannot be written, as nobody": (
        FIT,
        lambda: (environment(HOME="/root", LIT_LLM_CACHE=None)(), nobody()),
        "any",
    ),
    "an empty name for the cache": (FIT, environment(LIT_LLM_CACHE=""), "any"),
    "a cache with a line end in its name": (FIT, environment(LIT_LLM_CACHE="a\nb/cache"), "any"),
    "a cache of 300 letters": (FIT, environment(LIT_LLM_CACHE="c" * 300), "refuse"),
    "a cache of 1 MB": (FIT, lambda: (mounted("small", "size=40k"), environment(LIT_LLM_CACHE="small")()), "any"),
    "no folder for temporary files": (PREPARE + " --workers 2", environment(TMPDIR="/nonexistent"), "any"),
    "temporary files in a file": (CHAT, lambda: environment(TMPDIR=os.path.abspath("base.yaml"))(), "any"),
    "temporary files on a full disk": (
        CHAT,
        lambda: (mounted("tmp", "size=4k"), put("tmp/x", "x" * 4096), environment(TMPDIR=os.path.abspath("tmp"))()),
        "any",
    ),
    "a run on a disk of 300 kB": (FIT.replace(" o", " small/o"), lambda: mounted("small", "size=300k"), "any"),
    "a run on a disk with 12 inodes": (FIT.replace(" o", " small/o"), lambda: mounted("small", "size=9m,nr_inodes=12"), "any"),
    "an export to a disk with 3 inodes": (
        EXPORT.replace(" o", " small/o"),
        lambda: mounted("small", "size=9m,nr_inodes=3"),
        "refuse",
    ),
    "a resume on a disk that is read-only": (
        RESUME,
        lambda: (
            os.rename("run", "r"),
            mounted("run", "size=20m"),
            subprocess.run("cp -a r/. run/ && mount -o remount,ro run", shell=True),
        ),
        "any",
    ),
    "a resume on a disk that is full": (
        RESUME,
        lambda: (
            os.rename("run", "r"),
            mounted("run", "size=700k"),
            subprocess.run("cp -a r/. run/; head -c 900000 /dev/zero > run/zero", shell=True, stderr=subprocess.DEVNULL),
        ),
        "any",
    ),
    "a run folder that cannot change (chattr +i)": (RESUME, lambda: subprocess.run(["chattr", "+i", "run"]), "any"),
    "a run folder that cannot be written, as nobody": (RESUME, lambda: unwritable("run"), "any"),
    "generate from a folder that cannot be written": (
        GENERATE,
        lambda: (nobody(), [os.chmod(p, 0o555) for p in ("run", "run/checkpoints")]),
        "fine",
    ),
    "an umask of 777": (FIT, lambda: (nobody(), os.umask(0o777)), "any"),
    "an umask of 777, prepare": (PREPARE, lambda: (nobody(), os.umask(0o777)), "any"),
    "a deleted working directory, generate": ("generate --run run --prompt a", gone, "any"),
    "a deleted working directory, plan": ("plan --config quickstart", gone, "any"),
    "children that are not waited for": (CHAT, lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), "any"),
    "children that are not waited for, prepare": (
        PREPARE + " --workers 2",
        lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        "any",
    ),
    "SIGTERM blocked": (
        FIT,
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}),
        "fine",
    ),
    "SIGINT ignored": (FIT, lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), "fine"),
    "SIGPIPE as in a shell": (GENERATE, lambda: (signal.signal(signal.SIGPIPE, signal.SIG_DFL), closed_pipe()), "any"),
    "processor time of 1 s": (FIT, lambda: limit("RLIMIT_CPU", 1 + int(time.process_time()) + 1), "any"),
    "a Slurm job of 2 tasks": (
        FIT,
        environment(
            SLURM_JOB_ID="1",
            SLURM_NTASKS="2",
            SLURM_PROCID="0",
            SLURM_LOCALID="0",
            SLURM_NODEID="0",
            SLURM_JOB_NAME="x",
            SLURM_NTASKS_PER_NODE="2",
        ),
        "any",
    ),
    "a Slurm job with words": (
        FIT,
        environment(
            SLURM_JOB_ID="x", SLURM_NTASKS="many", SLURM_PROCID="?", SLURM_LOCALID="?", SLURM_NODEID="?", SLURM_JOB_NAME="x"
        ),
        "any",
    ),
    "torchrun's rank without the rest": (FIT, environment(RANK="5", WORLD_SIZE="2"), "any"),
    "torchrun's words": (
        FIT,
        environment(
            RANK="a", LOCAL_RANK="b", WORLD_SIZE="c", MASTER_ADDR="d", MASTER_PORT="e", GROUP_RANK="f", TORCHELASTIC_RUN_ID="g"
        ),
        "any",
    ),
    "a local rank in words": (GENERATE, environment(LOCAL_RANK="abc"), "any"),
    "a node's rank in words": (FIT, environment(NODE_RANK="abc"), "any"),
    "a seed of Lightning in words": (FIT, environment(PL_GLOBAL_SEED="abc", PL_SEED_WORKERS="x"), "any"),
    "screen of 0 columns": (DOCTOR, environment(COLUMNS="0", LINES="0"), "any"),
    "screen in words": (PLAN, environment(COLUMNS="wide", LINES="-1", TERM="\x1b"), "any"),
    "a time zone of nonsense": (FIT, lambda: (environment(TZ=":/dev/zero")(), time.tzset()), "any"),
    "proxies of nonsense": (GENERATE, environment(HTTP_PROXY="::::", HTTPS_PROXY="x y", ALL_PROXY="socks9://"), "fine"),
    "offline in words": (CHAT, environment(HF_HUB_OFFLINE="maybe", TRANSFORMERS_OFFLINE="x", HF_HOME="/dev/null/x"), "any"),
    "a clock in 1970": (FIT, lambda: setattr(time, "time", lambda: 1.0), "any"),
    "a clock that jumps back": (
        FIT,
        lambda: (lambda real: setattr(time, "time", lambda n=[0]: (n.__setitem__(0, n[0] + 1), real() - 1000 * n[0])[1]))(
            time.time
        ),
        "any",
    ),
    "a clock in 2262": (FIT, lambda: (lambda real: setattr(time, "time", lambda: real() + 7.6e9))(time.time), "any"),
    "a host name of 64 letters": (FIT, lambda: setattr(socket, "gethostname", lambda: "h" * 64), "any"),
    "no random device name": (GENERATE, lambda: setattr(os, "urandom", os.urandom), "fine"),
    "a low priority and one processor": (FIT, lambda: (os.nice(19), os.sched_setaffinity(0, {0})), "fine"),
    "no dumps and no new rights": (CHAT, lambda: ctypes.CDLL(None).prctl(38, 1, 0, 0, 0), "fine"),
    "a debugger's limit of recursion": (FIT, lambda: sys.setrecursionlimit(300), "any"),
}
for kind, (command, damage, expected) in MACHINE.items():
    case(f"machine: {kind}", command, damage, expected)


def own_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


FRESH = {  # a new interpreter: what is read when Python and torch start
    "the locale C, other letters": (
        FIT + " --data.paths texte-\u00e9",
        {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
    "ASCII output": (GENERATE + " --prompt \u00e9", {"PYTHONIOENCODING": "ascii"}),
    "an encoding that does not exist": (GENERATE, {"PYTHONIOENCODING": "utf-9"}),
    "threads in words": (GENERATE, {"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "-1"}),
    "optimised Python": (FIT, {"PYTHONOPTIMIZE": "2"}),
    "warnings as errors": (GENERATE, {"PYTHONWARNINGS": "error"}),
}


def fresh(command: str, values: dict[str, str]) -> Damage:
    def run() -> None:
        shutil.copytree("corpus", "texte-\u00e9")
        os.execve(
            sys.executable,
            [sys.executable, "-m", "lit_llm", *command.split()],
            {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **values},
        )

    return run


for kind, (command, values) in FRESH.items():
    case(f"machine: {kind}", command, fresh(command, values), "any")


# ---------------------------------------------------------------- the workplace

RECIPE = """\
run_dir: run
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 32}
data:
  class_path: TextFiles
  init_args: {paths: corpus, tokenizer: {class_path: BPE, init_args: {vocab_size: 300}}, micro_batch_size: 2, global_batch_size: 2, num_workers: 0}
"""
PARTS = """\
optimizer: {class_path: AdamW, init_args: {lr: 0.001}}
schedule: {class_path: Cosine, init_args: {warmup_steps: 1}}
checkpoint: {every_n_steps: 2}
validation: {every_n_steps: 2}
trainer: {max_steps: 4, precision: 32-true, limit_val_batches: 1, log_every_n_steps: 1, enable_progress_bar: false}
"""
PACKED = """\
run_dir: o
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 32, mask_documents: true}
data:
  class_path: TokenShards
  init_args: {path: shards, packing: best_fit, micro_batch_size: 2, global_batch_size: 2, num_workers: 0}
"""
TUNE = """\
run_dir: tuned
init_from: base
lora: {rank: 2}
data:
  class_path: TextFiles
  init_args: {paths: corpus, micro_batch_size: 2, global_batch_size: 2, num_workers: 0}
"""
TALKS = """\
run_dir: sftrun
init_from: base
model: {mask_documents: true}
data:
  class_path: TokenShards
  init_args: {path: chats, packing: best_fit, block_size: 32, micro_batch_size: 2, global_batch_size: 2, num_workers: 0}
"""


def build() -> None:
    """The workplace, by the real commands."""
    import random

    (BASE / "w").mkdir(parents=True)
    (BASE / "out/folder").mkdir(parents=True)
    os.chdir(BASE / "w")
    put("../out/keep.txt", "keep this\n")
    put("../out/folder/file.txt", "and this\n")
    words = "def return self class for in range print value import while true false none lambda".split()
    draw = random.Random(0)
    for name in ("t1", "t2", "t3"):
        put(f"corpus/{name}.txt", "".join(" ".join(draw.choice(words) for _ in range(9)) + "\n" for _ in range(400)))
    put(
        "chat.jsonl",
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"What is {i} + 1?"},
                        {"role": "assistant", "content": f"It is {i + 1}."},
                    ]
                }
            )
            + "\n"
            for i in range(60)
        ),
    )
    put(
        "quiz.jsonl",
        '{"query": "def", "choices": ["self", "else"], "gold": 0}\n{"query": "for i in", "choices": ["return", "range"], "gold": 1}\n',
    )
    put("tpl.jinja", START)
    put("base.yaml", RECIPE + PARTS)
    put("packed.yaml", PACKED + PARTS)
    put("tune.yaml", TUNE + PARTS)
    put("sft.yaml", TALKS + PARTS)
    made = (
        "fit --config base.yaml",
        "fit --config base.yaml --run_dir ../out/run --seed_everything 7",
        EXPORT.replace(" o", " hf"),
        "import --from hf --out base",
        TOKENIZER.replace(" o", " shards"),
        CHAT.replace(" o", " chats"),
        SHARDS.replace("packed.yaml", "packed.yaml --run_dir packedrun"),
        "fit --config tune.yaml",
        "fit --config sft.yaml",
        "export --run tuned --out adapter --adapter",
    )
    for command in made:
        code, said, *_ = attempt(command, lambda: None, BASE)
        assert code == 0, (command, code, said)
        for module in (ROOM / "modules").read_text().split():  # so that no fork imports it again
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    for name in (".shards.log", ".chats.log", ".sftrun.log"):
        Path(name).unlink(missing_ok=True)


def attempt(command: str | bytes, damage: Damage, folder: Path) -> tuple[int | None, str, dict[str, Any], int, float]:
    """Damage, and run a command, in a fork. Exit code (None: it did not end, -9 with too much memory), output, files before, peak, seconds."""
    words = [
        os.fsdecode(word)
        for word in (
            command.split(b" ")
            if isinstance(command, bytes)
            else [w.encode() for w in (command.split("\0") if "\0" in command else command.split())]
        )
    ]
    said, before = folder / "said.txt", folder / "before.pickle"
    began = time.monotonic()
    child = os.fork()
    if not child:
        code = 97
        try:
            os.setsid()
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            spare = os.dup(output)
            os.set_inheritable(spare, False)
            sys.stdin, sys.stdout, sys.stderr = (
                open(0, closefd=False),
                open(1, "w", closefd=False, errors="backslashreplace"),
                open(2, "w", closefd=False, errors="backslashreplace"),
            )
            os.chdir(folder / "w")
            os.environ["LIT_LLM_CACHE"] = "cache"
            sys.path.insert(0, os.getcwd())
            sys.argv = ["lit_llm", *words]
            # the files as the command finds them, and only then what belongs to the process
            record = lambda: (
                before.with_suffix(".new").write_bytes(pickle.dumps(files(folder))),
                os.replace(before.with_suffix(".new"), before),
            )
            record()
            damage_and_record(damage, record)
            for number, stream in enumerate(("stdin", "stdout", "stderr")):
                try:
                    os.fstat(number)
                except OSError:  # as Python finds it when it starts
                    setattr(sys, stream, None)
            from lit_llm.__main__ import main

            code = main(words)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
        except BaseException:
            with contextlib.suppress(BaseException):
                os.write(spare, traceback.format_exc().encode("utf-8", "backslashreplace"))
            code = 98
        finally:
            if folder == BASE:
                (ROOM / "modules").write_text(" ".join(sys.modules))
            for stream in (sys.stdout, sys.stderr):
                if stream is None:
                    continue
                with contextlib.suppress(BaseException):
                    stream.flush()
            os._exit(code if isinstance(code, int) else 99)
    peak, code, own = 0, None, int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    while time.monotonic() - began < SECONDS:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        now = memory(child)
        peak = max(peak, now - own)  # what the command added to the libraries
        if now - own > BYTES:
            break
        time.sleep(0.05)
    for number in members(child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    if code is None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    text_ = said.read_text(errors="replace") if said.exists() else ""
    found = pickle.loads(before.read_bytes()) if before.exists() else {}
    return code, text_, found, peak, time.monotonic() - began


def damage_and_record(damage: Damage, record: Callable[[], object]) -> None:
    """Record the files after the damage. What changes the process (limits, closed files, another user) may forbid it: then before."""
    damage()
    with contextlib.suppress(BaseException):
        record()


def members(session: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int(Path("/proc", name, "stat").read_text().rsplit(")", 1)[1].split()[3]) == session:
                    found.append(int(name))
    return found


def memory(session: int) -> int:
    """Bytes of the private and shared pages of the largest process, plus the private ones of the others."""
    sizes = []
    for number in members(session):
        with contextlib.suppress(OSError, ValueError):
            size = Path(f"/proc/{number}/statm").read_text().split()
            sizes.append((int(size[1]) * resource.getpagesize(), (int(size[1]) - int(size[2])) * resource.getpagesize()))
    sizes.sort(reverse=True)
    return sum(size[0] if i == 0 else size[1] for i, size in enumerate(sizes))


def files(folder: Path) -> dict[str, Any]:
    """Every name below the folder, with what it is and what it holds."""
    found: dict[str, Any] = {}
    stack = [os.fsencode(folder / "w"), os.fsencode(folder / "out")]
    while stack:
        here = stack.pop()
        with contextlib.suppress(OSError):
            for entry in os.scandir(here):
                is_ = entry.stat(follow_symlinks=False)
                name = os.fsdecode(entry.path)[len(str(folder)) + 1 :]
                if stat.S_ISDIR(is_.st_mode):
                    found[name] = "folder"
                    stack.append(entry.path)
                elif stat.S_ISLNK(is_.st_mode):
                    found[name] = ("link", os.readlink(entry.path))
                elif stat.S_ISREG(is_.st_mode) and is_.st_size < 1 << 20:
                    with open(entry.path, "rb") as file:
                        found[name] = hashlib.sha256(file.read()).hexdigest()
                else:
                    found[name] = (stat.S_IFMT(is_.st_mode), is_.st_size)
    return found


WORD = re.compile(
    r"warning|note:|damage|ignor|skip|cannot|left out|differ|change|unread|broken|is no |no row|not |another|error", re.I
)
WRITES = {  # command → what it is there to write, beside the output `o`, its partial folder and log
    "fit": (
        "w/o",
        "w/o/*",
        "w/run",
        "w/run/*",
        "w/cache",
        "w/cache/*",
        "w/small/*",
        "w/corpus/*",
        "w/*cache*",
        "out/run/*",
        "w/shards/train_pack*",
        "w/chats/*_pack*",
        "w/l/*",
        "w/HOME*",
    ),
    "find-lr": ("w/cache", "w/cache/*"),
}
COMMON = (
    "w/texte*",
    "w/a\nb*",
    "w/none*",
    "w/o\nx*",
    "w/o",
    "w/o.*",
    "w/o/*",
    "w/.o.*",
    "w/cache",
    "w/cache/*",
    "w/.cache*",
    "w/small/*",
    "w/x.yaml",
    "w/__pycache__*",
)
NOISE = re.compile("flicker|grows|while it is read")


def judged(
    name: str, expected: str, command: str | bytes, result: tuple[int | None, str, dict[str, Any], int, float], folder: Path
) -> list[str]:
    code, said, before, peak, _ = result
    verdicts = []
    if code is None:
        verdicts.append("memory" if peak > BYTES else "hang")
    elif (
        code not in (0, 1, 2, 75, 130)
        and not (code < 0 and "processor time" in name)
        and not (code == -13 and "SIGPIPE" in name)
    ):
        verdicts.append(f"code {code}")
    if "Traceback (most recent call last)" in said or "panicked at" in said:
        verdicts.append("traceback")
    if code == 0 and expected == "refuse" and not WORD.search(said):
        verdicts.append("silent")
    if code != 0 and expected == "fine":
        verdicts.append("refused although fine")
    if peak > 2 << 30 and "memory" not in verdicts:
        verdicts.append(f"peak {peak / 2**30:.1f} GB")
    if code and not said.strip() and "closed" not in name and "output" not in name and "SIGPIPE" not in name:
        verdicts.append("nothing said")
    if len(said) > 100_000:
        verdicts.append(f"{len(said):,} characters said")
    word = os.fsdecode(command).replace("\0", " ").split()[0]
    allowed = COMMON + WRITES.get(word, ())
    after = files(folder)
    changed = [
        n
        for n in sorted({*before, *after})
        if before.get(n) != after.get(n) and not any(fnmatch.fnmatch(n, p) for p in allowed)
    ]
    if changed and not NOISE.search(name):
        verdicts.append(f"changed elsewhere: {changed[:4]}")
    if any(n.startswith("out/") and "owned" in n for n in after):
        verdicts.append("EXECUTED")
    return verdicts


def clean_up(folder: Path) -> None:
    mounts = [
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1].startswith(str(folder))
    ]
    for mount in reversed(mounts):
        subprocess.run(["umount", "-l", mount], check=False)
    subprocess.run(["chattr", "-R", "-i", "-a", str(folder)], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this text, or one of several, with |")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--log", type=Path, help="a line of JSON for each case")
    given = parser.parse_args()
    chosen = {name: value for name, value in CASES.items() if not given.only or re.search(given.only, name)}
    chosen = dict(sorted(chosen.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()))  # a stop is a sample
    if given.log and given.log.exists():
        known = {json.loads(line)["name"] for line in given.log.read_text().splitlines()}
        chosen = {name: value for name, value in chosen.items() if name not in known}
    if given.list:
        print("\n".join(chosen), f"\n{len(chosen)} cases")
        return 0
    import lightning  # noqa: F401
    import torch  # noqa: F401

    import lit_llm.commands.fit
    import lit_llm.data  # noqa: F401

    ROOM.mkdir(parents=True)
    os.chmod(ROOM, 0o755)
    table: dict[str, Counter[str]] = {}
    worst: dict[str, int] = {}
    try:
        build()
        for number, (name, (expected, command, damage)) in enumerate(chosen.items()):
            folder = ROOM / f"c{number}"
            subprocess.run(["cp", "-a", str(BASE), str(folder)], check=True)
            os.chdir(ROOM)
            result = attempt(command, damage, folder)
            verdicts = judged(name, expected, command, result, folder)
            family = name.split(":")[0]
            counts = table.setdefault(family, Counter())
            counts["tried"] += 1
            counts.update({v.split(":")[0].split(" ")[0] for v in verdicts})
            worst[family] = max(worst.get(family, 0), result[3])
            last = [line for line in result[1].strip().splitlines() if line.strip()][-1:] or [""]
            if verdicts:
                print(
                    f"{name}: {'; '.join(verdicts)}\n    exit code {result[0]}, {result[4]:.0f} s: {last[0][:300]}", flush=True
                )
            if given.log:
                row = {
                    "name": name,
                    "verdicts": verdicts,
                    "code": result[0],
                    "seconds": round(result[4], 1),
                    "peak": result[3],
                    "said": result[1][-3000:],
                }
                with given.log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            clean_up(folder)
    finally:
        os.chdir("/")
        clean_up(ROOM)
    kinds = ("tried", "hang", "traceback", "code", "silent", "changed", "memory", "peak", "refused", "nothing", "EXECUTED")
    print("\n| family | " + " | ".join(kinds) + " | worst memory |\n|---|" + "---|" * (len(kinds) + 1))
    for family, counts in table.items():
        print(f"| {family} | " + " | ".join(str(counts[kind]) for kind in kinds) + f" | {worst[family] / 2**30:.1f} GB |")
    total = sum((counts for counts in table.values()), Counter())
    print("| all | " + " | ".join(str(total[kind]) for kind in kinds) + f" | {max(worst.values(), default=0) / 2**30:.1f} GB |")
    return 0 if set(total) <= {"tried"} else 1


if __name__ == "__main__":
    sys.exit(main())
