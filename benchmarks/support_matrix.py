"""The tables of docs/evidence/support-matrix.md that certificates fill, from docs/evidence/certificates/*.json.

    python benchmarks/support_matrix.py          # write them into the page
    python benchmarks/support_matrix.py --check  # exit code 1 if the page is not what this writes

A cell names the numbers of devices on which a check passed. It is stale if the code that the check covers had changed when
the page was written. The page records the fingerprints of that code, so that a test can write it again at any time: a commit
that makes a certificate stale does not change what the page must say. `--check` compares with the code of today.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from lit_llm.certify.cells import AXES, layouts
from lit_llm.certify.promises import HOW
from lit_llm.commands.certify import fingerprints

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
PAGE, CERTIFICATES = EVIDENCE / "support-matrix.md", EVIDENCE / "certificates"
BEGIN, END = "<!-- from certificates: python benchmarks/support_matrix.py -->\n", "<!-- end -->\n"
CODE = "<!-- code: {} -->"
LAYOUTS = tuple(layouts(1) | layouts(4))
TRAINING = ("models", "distributed", "optim", "data", "training", "callbacks", "core", "certify")
COVERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("losses", "graphs", "waits", "speed"), TRAINING),
    **dict.fromkeys(("resume", "checkpoint"), (*TRAINING, "checkpoint")),
    **{
        "plan": (*TRAINING, "plan"),
        "attention": ("models", "certify"),
        "links": ("certify",),
        "disk": ("checkpoint", "certify"),
    },
}
"""First word of a check's name → rooms of lit_llm whose code it covers."""
NAMES = {
    **{"False": "eager", "True": "compiled", "none": "no recomputation", "full": "recomputation: full"},
    **{"attention": "recomputation: attention", "cheap": "recomputation: cheap"},
}


def rows_of(check: dict[str, Any]) -> list[tuple[str, str]]:
    """(feature, layout) of the cells that a check fills."""
    kind, *words = check["name"].split("/")
    if kind == "losses" and len(words) == 5:
        layout, precision, mode, recomputation, optimizer = words
        return [(feature, layout) for feature in (precision, mode, NAMES[recomputation], optimizer)]
    if kind == "resume":
        return [(f"resume, {words[1]} checkpoint", words[0])]
    if kind == "checkpoint":
        return [("continues from other layouts", words[2]), ("other layouts continue from it", words[0])]
    return [(f"plan = measured, {words[0]}", words[1])] if kind == "plan" else []


def features() -> list[str]:
    values = [str(value) for axis in AXES.values() for value in axis]
    resumed = [f"resume, {how} checkpoint" for how in HOW]
    moved = ["continues from other layouts", "other layouts continue from it"]
    planned = [f"plan = measured, {what}" for what in ("memory", "traffic")]
    return [*(NAMES.get(value, value) for value in values), *resumed, *moved, *planned]


def tables(now: dict[str, str]) -> str:
    """The tables, and the fingerprints `now` that decide what is stale."""
    certificates = [json.loads(path.read_text()) for path in sorted(CERTIFICATES.glob("*.json"))]
    certificates.sort(key=lambda each: (each["machine"]["device"], each["machine"]["devices"]))
    lines = ["| machine | result | date | versions | minutes | stale kinds of checks |", "|---|---|---|---|---|---|"]
    for each in certificates:
        machine = each["machine"]
        kinds = {check["name"].split("/")[0] for check in each["checks"] if check["outcome"] != "skipped"}
        stale = ", ".join(sorted(kind for kind in kinds if is_stale(each, kind, now))) or "none"
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        named, result = f"{machine['devices']} × {machine['device']}", each["said"].partition(" on ")[0]
        cells = (named, result, machine["date"], versions, f"{machine['seconds'] / 60:.1f}", stale)
        lines.append(f"| {' | '.join(cells)} |")
    for kind in sorted({"CPU process", *(each["machine"]["device"] for each in certificates)}):
        lines += ["", f"### {kind}", "", *matrix([each for each in certificates if each["machine"]["device"] == kind], now)]
    if all(each["machine"]["device"] == "CPU process" for each in certificates):
        lines += ["", "### GPUs", "", "Not run: there is no certificate of a GPU."]
    return "\n".join([*lines, "", CODE.format(json.dumps(now))]) + "\n"


def is_stale(certificate: dict[str, Any], kind: str, now: dict[str, str]) -> bool:
    """Whether the code that a kind of check covers has changed."""
    return any(certificate["machine"]["code"].get(room) != now[room] for room in COVERS[kind])


def matrix(certificates: list[dict[str, Any]], now: dict[str, str]) -> list[str]:
    """A row for each feature, a column for each layout."""
    outcomes: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in certificates:
        for check in each["checks"]:
            for place in rows_of(check):
                old = check["outcome"] == "passed" and is_stale(each, check["name"].split("/")[0], now)
                outcomes[place][each["machine"]["devices"]].add("stale" if old else check["outcome"])
    lines = [f"| feature | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for feature in features():
        lines.append(f"| {feature} | {' | '.join(cell(outcomes[feature, layout]) for layout in LAYOUTS)} |")
    return lines


def cell(outcomes: dict[int, set[str]]) -> str:
    """Of one feature on one layout: the numbers of devices by what was found. One failure or stale check is named."""
    found: dict[str, list[int]] = {}
    for devices, of in sorted(outcomes.items()):
        worst = next((name for name in ("failed", "stale", "passed") if name in of), None)
        if worst is not None:
            found.setdefault(worst, []).append(devices)
    words = (f"{', '.join(map(str, numbers))}{'' if name == 'passed' else f' {name}'}" for name, numbers in found.items())
    return "; ".join(words) or "not run"


def written() -> dict[str, str]:
    """The fingerprints that the page records."""
    first, last = CODE.split("{}")
    return dict(json.loads(PAGE.read_text(encoding="utf-8").partition(first)[2].partition(last)[0]))


def page(now: dict[str, str]) -> str:
    """The page with its tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{tables(now)}{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    rooms = {room for covered in COVERS.values() for room in covered}
    made = page({room: code for room, code in fingerprints().items() if room in rooms})
    if parser.parse_args().check:
        return int(made != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
