"""Decontamination: the share of planted held-out texts that are found, and of other documents that are removed.

    python benchmarks/decontamination.py                     # Python files of the installation, pages of /usr/share/doc
    python benchmarks/decontamination.py --ngram 8 13 --share 0 0.1 --text corpus

Held-out documents and documents to clean are of different folders, so that few of them are copies of each other. Each held-out
text is planted in the middle of a document to clean, with a share of its words replaced. ``documents`` are planted whole;
``passages`` are 40 words of a held-out document, as long as a question of a test set. Recall: the share of documents with a
planted text that are removed. Others: the share of documents without a planted text that are removed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planted_copies import edited

from lit_llm.clean.contamination import Contamination, ReferenceIndex
from lit_llm.clean.rules import Document, Removed

EDITS = (0.0, 0.02, 0.08, 0.2)
SUFFIXES = {".py", ".txt", ".md", ".rst", ".html"}
LICENCES = re.compile("licen[sc]e|copying|notice|dist-info", re.IGNORECASE)  # names of files whose texts are copies
NOTICE = re.compile(r"\A(?:#.*\n|\s*\n)+")  # the licence notice at the top of a Python file
LONGEST = 2**17  # characters
FEWEST_WORDS = 200  # of every document
PASSAGE = 40  # words


def index_of(texts: Sequence[str], n: int) -> ReferenceIndex:
    return ReferenceIndex((Document(text, f"held out:{i}") for i, text in enumerate(texts, start=1)), n=n)


def by_folder(roots: Sequence[Path]) -> list[list[str]]:
    """Return one list of different texts for each folder directly below a root, the folders in a random order."""
    folders = []
    seen: set[str] = set()
    for folder in sorted(child for root in roots for child in root.iterdir() if child.is_dir()):
        texts = []
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            if LICENCES.search(str(path.relative_to(folder.parent))):
                continue
            text = NOTICE.sub("", path.read_text(encoding="utf-8", errors="replace"))
            if len(text) <= LONGEST and text not in seen:
                seen.add(text)
                texts += [text] if len(text.split()) >= FEWEST_WORDS else []
        folders.append(texts)
    random.Random(0).shuffle(folders)
    return [texts for texts in folders if texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = sysconfig.get_paths()["purelib"]
    parser.add_argument(
        "--text", type=Path, nargs="*", default=[Path(installed), Path("/usr/share/doc")], help="folders of folders"
    )
    parser.add_argument("--documents", type=int, default=3000, help="to clean")
    parser.add_argument("--held_out", type=int, default=200)
    parser.add_argument("--ngram", type=int, nargs="*", default=[8, 13])
    parser.add_argument("--share", type=float, nargs="*", default=[0.0, 0.05, 0.1, 0.25, 0.5])
    args = parser.parse_args()

    generator = random.Random(1)
    held_out: list[str] = []
    cleaned: list[str] = []
    for texts in by_folder(args.text):  # at most 20 texts of a folder, so that no package dominates
        few = generator.sample(texts, min(20, len(texts)))
        if len(held_out) < args.held_out:
            held_out += few
        else:
            cleaned += few
    held_out, cleaned = held_out[: args.held_out], cleaned[: args.documents]
    vocabulary = [word for text in cleaned[:200] for word in text.split()]
    passages = []
    for text in held_out:
        words = text.split()
        start = generator.randrange(len(words) - PASSAGE + 1)
        passages.append(" ".join(words[start : start + PASSAGE]))
    size = sum(len(text.encode()) for text in cleaned) / 1e6
    print(f"{len(cleaned)} documents to clean, {size:.0f} MB; {len(held_out)} held-out documents")
    print(
        "\n| held out | n-gram | share | " + " | ".join(f"recall, {edit:.0%} changed" for edit in EDITS) + " | others removed |"
    )
    print("|---|---|---|" + "---|" * (len(EDITS) + 1))
    for name, references in {"documents": held_out, "passages": passages}.items():
        planted = {}
        for edit in EDITS:
            hosts = [text.splitlines(keepends=True) for text in cleaned[: len(references)]]
            copies = [edited(text, edit, vocabulary, generator) for text in references]
            parts = zip(hosts, copies, strict=True)
            planted[edit] = ["".join([*host[: len(host) // 2], copy, "\n", *host[len(host) // 2 :]]) for host, copy in parts]
        for n in args.ngram:
            index = index_of(references, n)
            for share in args.share:
                rule = Contamination(index, share=share)
                recall = [sum(isinstance(rule(text), Removed) for text in planted[edit]) / len(references) for edit in EDITS]
                others = sum(isinstance(rule(text), Removed) for text in cleaned) / len(cleaned)
                print(
                    f"| {name} | {n} | {share:g} | " + " | ".join(f"{one:.0%}" for one in recall) + f" | {others:.1%} |",
                    flush=True,
                )
    started = time.process_time()
    index = index_of(held_out, args.ngram[-1])
    middle = time.process_time()
    for text in cleaned:
        index.matches(text)
    end = time.process_time()
    read = sum(len(text.encode()) for text in held_out) / 1e6
    print(f"\nMB of text each cpu-second: index {read / (middle - started):.0f}, search {size / (end - middle):.0f}")


if __name__ == "__main__":
    main()
