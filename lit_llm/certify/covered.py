"""Which code a kind of check covers, and a fingerprint of it: a certificate of other code is stale. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

_TRAINING = ("models", "distributed", "optim", "data", "training", "callbacks", "core", "certify")
COVERS: dict[str, tuple[str, ...]] = {
    "attention": ("models", "certify"),
    "losses": _TRAINING,
    "resume": (*_TRAINING, "checkpoint"),
    "checkpoint": (*_TRAINING, "checkpoint"),
    "plan": (*_TRAINING, "plan"),
    "graphs": _TRAINING,
    "waits": _TRAINING,
    "links": ("certify",),
    "disk": ("checkpoint", "certify"),
    "speed": _TRAINING,
}
"""First word of a check's name → rooms of lit_llm."""


def fingerprints() -> dict[str, str]:
    """Of the code of this installation, by kind of check. Comments and blank lines change nothing."""
    root = Path(__file__).parents[1]
    rooms = {room: _of_room((root / room).resolve()) for room in {room for rooms in COVERS.values() for room in rooms}}
    return {kind: _short("".join(rooms[room] for room in covered)) for kind, covered in COVERS.items()}


def _of_room(folder: Path) -> str:
    lines: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        lines.append(path.relative_to(folder).as_posix())
        code = path.read_text(encoding="utf-8").splitlines()
        lines += [line.rstrip() for line in code if line.strip() and not line.lstrip().startswith("#")]
    return _short("\n".join(lines))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
