"""`python -m lit_llm clean`: the share of planted duplicates that are found, wrongly removed documents, and speed of each step.

    python benchmarks/clean.py                                   # Python files of the installation, pages of /usr/share/doc
    python benchmarks/clean.py --ngram 3 5 --threshold 0.5 0.7 --text corpus

Some documents get a planted copy, in which a share of the words is replaced by words of the corpus. Originals, copies and other
documents are in a random order. Recall: the share of pairs (original, copy) that lose one of both documents. Wrong: removed
documents of no pair that have less than half of their lines in common with every remaining document.
Speed: megabytes of text for each processor second, from the report of one process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from planted_copies import edited

from lit_llm.clean.clean_pipeline import clean
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.source import Source

EDITS = (0.0, 0.02, 0.08, 0.2)
COMMON_LINES = 0.5
SUFFIXES = {".py", ".txt", ".md", ".rst", ".html"}
LONGEST = 2**20  # bytes
FEWEST_WORDS = 50  # the fewest words of a document that gets a planted copy


def documents(folders: Sequence[Path], most: int) -> list[str]:
    """Return at most `most` different texts of files below `folders`, in a random order."""
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    random.Random(0).shuffle(paths)
    found: dict[str, None] = {}
    for path in paths:
        if len(found) == most:
            break
        if path.stat().st_size <= LONGEST and (text := path.read_text(encoding="utf-8", errors="replace")).strip():
            found[text] = None
    return list(found)


def run(texts: Sequence[str], folder: Path, **settings: Any) -> tuple[set[int], dict[str, Any]]:
    """Clean `texts` with `settings` of CleanSettings. Return (indices of the texts that remain, content of report.json)."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path, out = Path(name) / "a.jsonl", Path(name) / "out"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        out.mkdir()
        wanted = CleanSettings((str(path),), **settings)
        clean([Input(Source.local(path), "train", wanted.read_settings())], wanted, out)
        lines = [line for part in sorted(out.glob("part-*")) for line in part.read_text().splitlines()]
        kept = {int(json.loads(line)["source"].rpartition(":")[2]) - 1 for line in lines}
        return kept, json.loads((out / "report.json").read_text())


def lines_of(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


def wrongly_removed(texts: Sequence[str], kept: set[int], planted: set[int]) -> int:
    """Return how many removed texts have less than COMMON_LINES of their lines in common with every remaining text.

    `kept`: indices of the remaining texts. `planted`: indices of originals and copies, which do not count."""
    with_line = defaultdict(list)
    for number in kept:
        for line in lines_of(texts[number]):
            with_line[line].append(number)
    wrong = 0
    for number in set(range(len(texts))) - kept - planted:
        own = lines_of(texts[number])
        common = Counter(other for line in own for other in with_line[line])
        wrong += not common or max(common.values()) < COMMON_LINES * len(own)
    return wrong


def planted_copies(texts: Sequence[str], copies: int, ngrams: Sequence[int], thresholds: Sequence[float], folder: Path) -> None:
    generator = random.Random(1)
    words = [word for text in texts[:200] for word in text.split(" ") if word.strip()]
    originals = [number for number, text in enumerate(texts) if len(text.split()) >= FEWEST_WORDS][: copies * len(EDITS)]
    pairs = [(number, EDITS[i % len(EDITS)]) for i, number in enumerate(originals)]
    added = [edited(texts[number], share, words, generator) for number, share in pairs]
    order = list(range(len(texts) + len(added)))
    generator.shuffle(order)
    place = {number: at for at, number in enumerate(order)}
    mixed = [[*texts, *added][number] for number in order]
    copy_of = [(place[number], place[len(texts) + i], share) for i, (number, share) in enumerate(pairs)]
    planted = {at for one, other, _ in copy_of for at in (one, other)}
    print(f"{len(mixed)} documents, {sum(len(text.encode()) for text in mixed) / 1e6:.0f} MB; {copies} copies of each kind")
    print("\n| words changed | " + " | ".join(f"{share:.0%}" for share in EDITS) + " | others removed | of these wrong |")
    print("|---|" + "---|" * (len(EDITS) + 2))
    for name, settings in {
        "exact_duplicates": {"exact_duplicates": True},
        **{
            f"near_duplicates {threshold}, n-grams of {ngram}": {"near_duplicates": threshold, "near_ngram": ngram}
            for ngram in ngrams
            for threshold in thresholds
        },
    }.items():
        kept, _ = run(mixed, folder, **settings)
        found = Counter(share for one, other, share in copy_of if one not in kept or other not in kept)
        total = Counter(share for *_, share in copy_of)
        others = len(set(range(len(mixed))) - kept - planted)
        cells = [*(f"{found[share] / total[share]:.0%}" for share in EDITS), others, wrongly_removed(mixed, kept, planted)]
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |", flush=True)


def speed(texts: Sequence[str], settings: dict[str, Any], folder: Path) -> None:
    _, report = run(texts, folder, **settings)
    print("\n| step | MB of text each cpu-second |\n|---|---|")
    size = report["read"]["bytes"]
    for name, step in report["steps"].items():
        print(f"| {name} | {size / 1e6 / step['seconds']:.0f} |")
        size -= sum(count["bytes"] for count in step["removed"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    parser.add_argument("--text", nargs="*", default=[*installed, "/usr/share/doc"], help="folders with text")
    parser.add_argument("--documents", type=int, default=6000)
    parser.add_argument("--copies", type=int, default=200, help="of each kind")
    parser.add_argument("--ngram", type=int, nargs="*", default=[3, 5])
    parser.add_argument("--threshold", type=float, nargs="*", default=[0.5, 0.7, 0.8])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    texts = documents([Path(folder) for folder in arguments.text], arguments.documents)
    planted_copies(texts, arguments.copies, arguments.ngram, arguments.threshold, arguments.folder)
    speed(texts, {"normalise": True, "exact_duplicates": True, "near_duplicates": 0.7}, arguments.folder)


if __name__ == "__main__":
    main()
