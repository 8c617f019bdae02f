"""Commands and complete files that README, docs and recipe headers show."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_STARTS = re.compile(
    r"(?:\.venv/bin/)?(?:python -m (?:lit_llm|tensorboard)|python \S+\.py|torchrun|sbatch|make|pip install|lm_eval)\b"
)


@dataclass(frozen=True)
class Command:
    """One command line of a page, with continuation lines joined and the comment removed."""

    page: str
    """Path within the repository."""
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def pages() -> list[Path]:
    """README, every page of docs, and every recipe."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.yaml"))]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a Markdown page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


_NAMED = re.compile(r"# ([\w.-]+\.(?:py|yaml))|\{# ([\w.-]+\.jinja) #\}")


def blocks(text: str) -> list[str]:
    """Indented code blocks of a Markdown page, without the indentation. `# name.ext` after an empty line starts a new block."""
    found: list[list[str]] = []
    inside = after_empty = False
    for line in text.splitlines():
        if line.startswith("    "):
            if not inside or (after_empty and _NAMED.fullmatch(line[4:])):
                found.append([])
            inside = True
            found[-1].append(line[4:])
        elif line:
            inside = False
        elif inside:
            found[-1].append("")
        after_empty = not line
    return ["\n".join(lines).strip("\n") + "\n" for lines in found]


def files(page: Path) -> dict[str, str]:
    """Complete files on a page, by name: blocks whose first line is the file's name in a comment."""
    found = {}
    for block in blocks(page.read_text()):
        first, _, rest = block.partition("\n")
        if named := _NAMED.fullmatch(first):
            found[named[1] or named[2]] = rest
    return found


def flag_lines(page: Path) -> list[list[str]]:
    """Lines of blocks that start with a flag; two or more spaces separate flags, and text after them is ignored."""
    found = []
    for block in blocks(page.read_text()):
        for line in block.splitlines():
            if line.startswith("--"):
                parts = re.split(r" {2,}", line)
                found.append(shlex.split(" ".join(part for part in parts if part.startswith("--"))))
    return found


def commands(page: Path) -> list[Command]:
    """Every command line of a page in order: those in blocks, then those in backquotes."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    if page.suffix == ".yaml":
        header = "\n".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
        lines = re.sub(r"^plan {2,}", "", header.replace("\\\n", " "), flags=re.M).splitlines()
    else:
        whole = set(files(page))
        lines = []
        for block in blocks(text):
            if (named := re.match(r"# ([\w.-]+)\n", block)) is None or named[1] not in whole:
                lines += block.replace("\\\n", " ").splitlines()
        lines += [quoted for quoted in re.findall(r"`([^`\n]+)`", text) if " " in quoted]
    return [Command(name, tuple(shlex.split(line, comments=True))) for line in lines if _STARTS.match(line.strip())]
