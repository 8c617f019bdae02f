"""What somebody may have put in the place of a file: each damage takes the path, where nothing is, and the former content."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

OUTSIDE = "outside/secret.txt"
Damage = Callable[[Path, bytes], Any]


def outside(path: Path) -> Path:
    """A file that no command owns, beside the folder where `path` is."""
    return next(parent / OUTSIDE for parent in path.parents if (parent / OUTSIDE).is_file())


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as endpoint:
        endpoint.bind(path.name)
    os.chdir(here)


def _change(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path, before: path.write_bytes(change(before))


def _flipped(content: bytes, at: float, bit: int) -> bytes:
    if not content:
        return b"x"
    place = min(int(at * len(content)), len(content) - 1)
    return bytes([*content[:place], content[place] ^ bit, *content[place + 1 :]])


def _loop(path: Path) -> None:
    other = path.with_name(f"{path.name}.other")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


def _noise(content: bytes) -> bytes:
    return random.Random(len(content)).randbytes(max(len(content), 64))


KINDS: dict[str, Damage] = {
    "fifo": lambda path, _: os.mkfifo(path),
    "zero": lambda path, _: path.symlink_to("/dev/zero"),
    "full": lambda path, _: path.symlink_to("/dev/full"),
    "memory": lambda path, _: path.symlink_to("/proc/self/mem"),
    "self link": lambda path, _: path.symlink_to(path.name),
    "loop of links": lambda path, _: _loop(path),
    "dangling link": lambda path, _: path.symlink_to("nowhere"),
    "link outside": lambda path, _: path.symlink_to(outside(path)),
    "link to its folder": lambda path, _: path.symlink_to("."),
    "folder": lambda path, _: path.mkdir(),
    "full folder": lambda path, _: ((path / "a").mkdir(parents=True), (path / "a/b").touch()),
    "socket": lambda path, _: _socket(path),
    "missing": lambda path, _: None,
    "sparse": lambda path, _: (path.touch(), os.truncate(path, 2**38)),
}
"""No ordinary file is there, or an endless one."""
CONTENTS: dict[str, Damage] = {
    "empty": _change(lambda _: b""),
    "NUL": _change(lambda _: b"\0" * 4096),
    "brackets": _change(lambda _: b"[" * 200_000),
    "braces": _change(lambda _: b'{"a":' * 200_000),
    "null": _change(lambda _: b"null\n"),
    "number": _change(lambda _: b"3\n"),
    "list": _change(lambda _: b"[1, {}]\n"),
    "object": _change(lambda _: b"{}\n"),
    "no UTF-8": _change(lambda before: b"\xff\xfe\xfa" + before),
    "long line": _change(lambda _: b"a" * 5_000_000),
    "noise": _change(_noise),
    "compressed": _change(gzip.compress),
    "many keys": _change(lambda _: json.dumps({f"key {i}": i for i in range(100_000)}).encode()),
    "huge number": _change(lambda _: b'{"step": 1' + b"0" * 5000 + b', "pid": 1e999}'),
    "surrogate": _change(lambda _: b'{"\\ud800": "\\udfff", "model": "\\ud800"}'),
    "tag": _change(lambda _: b"a: !!python/object/apply:os.mkdir [outside/made]\n"),
    "aliases": _change(
        lambda _: b"".join(b"a%d: &a%d [%s]\n" % (i, i, b"*a%d, " % (i - 1) * 9 if i else b"x") for i in range(30))
    ),
}
"""Another content, which is right for nothing but a text."""
EDITS: dict[str, Damage] = {
    "half": _change(lambda before: before[: len(before) // 2]),
    "twice": _change(lambda before: before * 2),
    "one byte less": _change(lambda before: before[:-1]),
    "NUL at the end": _change(lambda before: before + b"\0" * 16),
    "mark at the start": _change(lambda before: b"\xef\xbb\xbf" + before),
    "CRLF": _change(lambda before: before.replace(b"\n", b"\r\n")),
    **{
        f"bit {bit} at {at:.0%}": _change(lambda before, at=at, bit=bit: _flipped(before, at, bit))  # type: ignore[misc]
        for at, bit in ((0.0, 1), (0.01, 128), (0.3, 2), (0.5, 8), (0.7, 64), (0.9, 4), (1.0, 1))
    },
}
"""Nearly the former content, which a checksum tells."""
WRONG = {
    "null": None,
    "minus": -7,
    "fraction": 2.5,
    "word": "seven",
    "true": True,
    "list": [],
    "dict": {},
    "huge": 2**70,
    "infinite": float("inf"),
    "nested": {"a": [[[{"b": None}]]]},
    "long": "x" * 100_000,
}


def _everywhere(tree: Any, value: Any) -> Any:
    """The tree with this value in place of each that is no dict and no list."""
    if isinstance(tree, dict):
        return {key: _everywhere(below, value) for key, below in tree.items()}
    return [_everywhere(below, value) for below in tree] if isinstance(tree, list) else value


def _tree(content: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The tree in a file of JSON, YAML, lines of JSON or safetensors, and how one is written."""
    text = content.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        return json.loads(text), lambda tree: json.dumps(tree).encode()
    with contextlib.suppress(ValueError):
        return [json.loads(line) for line in text.splitlines()], lambda tree: "".join(
            f"{json.dumps(x)}\n" for x in tree
        ).encode()
    with contextlib.suppress(ValueError, OverflowError):
        size = int.from_bytes(content[:8], "little")
        head, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        return head, lambda tree: len(new := json.dumps(tree).encode()).to_bytes(8, "little") + new + data
    with contextlib.suppress(yaml.YAMLError):
        if isinstance(found := yaml.safe_load(text), dict):
            return found, lambda tree: yaml.safe_dump(tree).encode()
    return None, lambda tree: b""


def _in_tree(change: Callable[[Any], Any]) -> Damage:
    def damage(path: Path, before: bytes) -> None:
        tree, write = _tree(before)
        path.write_bytes(before[::-1] if tree is None else write(change(tree)))

    return damage


def _each_in_turn(tree: Any) -> Any:
    """Each value of the top replaced by one of `WRONG`, in turn."""
    values = [value for value in WRONG.values() if value != float("inf")]
    if isinstance(tree, dict):
        return {key: values[i % len(values)] for i, key in enumerate(tree)}
    return values


def _dropped(tree: Any) -> Any:
    return dict(list(tree.items())[1::2]) if isinstance(tree, dict) else tree[1::2] if isinstance(tree, list) else None


TREES: dict[str, Damage] = {
    **{f"all {name}": _in_tree(lambda tree, value=value: _everywhere(tree, value)) for name, value in WRONG.items()},  # type: ignore[misc]
    "each another": _in_tree(_each_in_turn),
    "keys dropped": _in_tree(_dropped),
    "keys added": _in_tree(lambda tree: {**tree, "more": WRONG} if isinstance(tree, dict) else [tree, WRONG]),
    "keys upper": _in_tree(lambda tree: {str(k).upper(): v for k, v in tree.items()} if isinstance(tree, dict) else [[tree]]),
    "in a list": _in_tree(lambda tree: [tree]),
    "in itself": _in_tree(lambda tree: {key: tree for key in tree} if isinstance(tree, dict) else [tree, tree]),
}
"""The right form with wrong values."""
DAMAGES = {**KINDS, **CONTENTS, **EDITS, **TREES}
TEMPLATES = {
    "ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3,
    "power": "{{ 9 ** 99999999 }}",
    "times": "{{ 'a' * 3000000000 }}",
    "zeros": "{{ [0] * 10**9 }}",
    "format": "{{ '%3000000000d' % 1 }}",
    "surrogate": "{{ '\\ud800' }}{{ messages[0].content }}",
    "self import": "{% include 'chat_template.jinja' %}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "undefined": "{{ nothing.at.all }}",
    "nested": "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
    "not closed": "{% for m in messages %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long output": "{% for m in messages %}{{ m.content * 1000000 }}{% endfor %}",
    "filter": "{{ messages | map('nope') | list }}",
    "raise": "{{ raise_exception('no') }}",
}
TOKENIZERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "split that panics": lambda t: t | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False}},  # noqa: E501
    "charsmap": lambda t: t | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "unigram without unknown": lambda t: t | {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "byte_fallback": False}},
    "huge id": lambda t: t | {"model": {"type": "WordLevel", "vocab": {"a": 2**31, "[UNK]": 0}, "unk_token": "[UNK]"}},
    "million": lambda t: t | {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "x" * 1_000_000}},
    "prepend": lambda t: t | {"normalizer": {"type": "Prepend", "prepend": "x" * 10_000_000}},
    "no model": lambda t: {key: value for key, value in t.items() if key != "model"},
    "no vocabulary": lambda t: t | {"model": t["model"] | {"vocab": {}}},
    "same ids": lambda t: t | {"model": t["model"] | {"vocab": dict.fromkeys(t["model"]["vocab"], 3)}},
    "added twice": lambda t: t | {"added_tokens": t["added_tokens"] * 2},
    "added far": lambda t: t | {"added_tokens": [{**a, "id": 2**30} for a in t["added_tokens"]]},
    "truncation": lambda t: t | {"truncation": {"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 9}},
    "padding": lambda t: t | {"padding": {"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},  # noqa: E501
    "decoder": lambda t: t | {"decoder": {"type": "Nope"}},
}  # fmt: skip


def template(name: str) -> Damage:
    return lambda path, _: path.write_text(TEMPLATES[name])


def tokenizer(name: str) -> Damage:
    return lambda path, before: path.write_text(json.dumps(TOKENIZERS[name](json.loads(before))))


# -- values of a checkpoint whose checksums are right ----------------------------------------------------------------------

TENSORS: dict[str, Callable[[], Any]] = {
    "int8": lambda: torch.ones(3, dtype=torch.int8),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "not finite": lambda: torch.full((3,), float("nan")),
    "integer keys": lambda: {0: {1: 2}},
    "placeholder": lambda: {"sharded tensor": "w", "shape": [-1], "dtype": "os"},
    "deep": lambda: _deep(100),
    "bytes": lambda: b"\x80\x04",
}
VALUES: dict[str, Callable[[], Any]] = {**{name: lambda value=value: value for name, value in WRONG.items()}, **TENSORS}  # type: ignore[misc]
ABSENT = "absent"


def _deep(levels: int) -> Any:
    tree: Any = {}
    for _ in range(levels):
        tree = {"a": [tree]}
    return tree


def paths(tree: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """The places in a checkpoint: every key of the top, and below it the first and last of each dict and list."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, below in items if depth == 0 else {id(item): item for item in items[:1] + items[-1:]}.values():
        yield (key,)
        if depth < 4:
            yield from ((key, *rest) for rest in paths(below, depth + 1))


def change_value(folder: Path, place: tuple[Any, ...], damage: str) -> None:
    """Put a wrong value into the checkpoint in a folder; its manifest describes the file as it then is."""
    data, manifest = folder / "checkpoint.pt", folder / "manifest.json"
    tree = checkpoint = torch.load(data, weights_only=True)
    for key in place[:-1]:
        tree = tree[key]
    if damage == ABSENT:
        del tree[place[-1]]
    else:
        tree[place[-1]] = VALUES[damage]()
    torch.save(checkpoint, data)
    content = data.read_bytes()
    values = json.loads(manifest.read_text())
    del values["checksum"]
    values["files"][data.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    checksum = hashlib.sha256(json.dumps(values, indent=2).encode()).hexdigest()
    manifest.write_text(json.dumps(values | {"checksum": checksum}, indent=2) + "\n")
