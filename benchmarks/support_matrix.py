"""Write the tables of docs/evidence/support-matrix.md and .csv from the certificates docs/evidence/certificates/*.json.

    python benchmarks/support_matrix.py          # write both
    python benchmarks/support_matrix.py --check  # exit code 1 if the files differ from what would be written

A cell of the CSV names the numbers of devices on which a check passed; the page counts the layouts. A cell is stale if the
code that the check covers had changed between certificate and page. The page records the fingerprints of the code at its
writing, so that a test can write the same page after later changes of the code. `--check` compares with the code of today.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from lit_llm.certify.cells import AXES, layouts
from lit_llm.certify.promises import HOW
from lit_llm.commands.certify import fingerprints

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
PAGE, CELLS, CERTIFICATES = EVIDENCE / "support-matrix.md", EVIDENCE / "support-matrix.csv", EVIDENCE / "certificates"
BEGIN, END = "<!-- from certificates: python benchmarks/support_matrix.py -->\n", "<!-- end -->\n"
CODE = "<!-- code: {} -->"
LAYOUTS = tuple(layouts(1) | layouts(4))
TRAINING = ("models", "distributed", "optim", "data", "training", "callbacks", "core", "certify")
COVERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("losses", "graphs", "waits", "speed"), TRAINING),
    **dict.fromkeys(("resume", "checkpoint"), (*TRAINING, "checkpoint")),
    **{"plan": (*TRAINING, "plan"), "links": ("certify",), "disk": ("checkpoint", "certify")},
}
"""{first part of a check's name: rooms (folders) of lit_llm whose code the check covers}."""
NAMES = {
    **{"False": "eager", "True": "compiled", "none": "no recomputation", "full": "recomputation: full"},
    **{"attention": "recomputation: attention", "cheap": "recomputation: cheap"},
}


def rows_of(check: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (feature, layout) of each cell of the matrix to which the outcome of `check` belongs."""
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


def certificates() -> list[dict[str, Any]]:
    """Return the contents of all certificates, sorted by kind and number of devices."""
    found = [json.loads(path.read_text()) for path in CERTIFICATES.glob("*.json")]
    return sorted(found, key=lambda each: (each["machine"]["device"], each["machine"]["devices"]))


def kinds_of(found: list[dict[str, Any]]) -> list[str]:
    """Return "CPU process" and the kinds of devices that have a certificate, sorted."""
    return sorted({"CPU process", *(each["machine"]["device"] for each in found)})


def tables(now: dict[str, str]) -> str:
    """Return the page's tables and a comment with `now`, {room: fingerprint of its code}, which decides what is stale."""
    found = certificates()
    lines = ["| machine | result | date | versions | stale kinds of checks |", "|---|---|---|---|---|"]
    for each in found:
        machine = each["machine"]
        kinds = {check["name"].split("/")[0] for check in each["checks"] if check["outcome"] != "skipped"} & COVERS.keys()
        stale = {kind for kind in kinds if is_stale(each, kind, now)}
        shown = "none" if not stale else f"all but {', '.join(sorted(kinds - stale))}" if kinds - stale else "all"
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        named, result = f"{machine['devices']} × {machine['device']}", each["said"].partition(" on ")[0]
        lines.append(f"| {' | '.join((named, result, machine['date'], versions, shown))} |")
    for kind in kinds_of(found):
        lines += ["", f"### {kind}", "", *summary([each for each in found if each["machine"]["device"] == kind], now)]
    return "\n".join([*lines, "", CODE.format(json.dumps(now))]) + "\n"


def cells(now: dict[str, str]) -> str:
    """Return the CSV file's text: for each kind of device, a row for each feature and a column for each layout."""
    found, file = certificates(), io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["device", "feature", *LAYOUTS])
    for kind in kinds_of(found):
        rows.writerows([kind, *row] for row in matrix([each for each in found if each["machine"]["device"] == kind], now))
    return file.getvalue()


def is_stale(certificate: dict[str, Any], kind: str, now: dict[str, str]) -> bool:
    """Whether code that checks of the kind `kind` cover has changed since the certificate."""
    return any(certificate["machine"]["code"].get(room) != now[room] for room in COVERS[kind])


def outcomes_of(found: list[dict[str, Any]], now: dict[str, str]) -> dict[tuple[str, str], dict[int, set[str]]]:
    """Return {(feature, layout): {number of devices: outcomes of the checks, where an outdated "passed" is "stale"}}."""
    outcomes: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in found:
        for check in each["checks"]:
            for place in rows_of(check):
                old = check["outcome"] == "passed" and is_stale(each, check["name"].split("/")[0], now)
                outcomes[place][each["machine"]["devices"]].add("stale" if old else check["outcome"])
    return outcomes


def matrix(found: list[dict[str, Any]], now: dict[str, str]) -> list[list[str]]:
    """Return a row for each feature: the feature's name, and a cell for each layout."""
    outcomes = outcomes_of(found, now)
    return [[feature, *(cell(outcomes[feature, layout]) for layout in LAYOUTS)] for feature in features()]


def summary(found: list[dict[str, Any]], now: dict[str, str]) -> list[str]:
    """Return a Markdown table: for each feature and number of devices, on how many layouts the feature's checks passed."""
    outcomes, devices = outcomes_of(found, now), [each["machine"]["devices"] for each in found]
    lines = [f"| feature | {' | '.join(f'{n} devices' for n in devices)} |", "|---" * (len(devices) + 1) + "|"]
    for feature in features():
        row = []
        for n in devices:
            at = {layout: outcomes[feature, layout][n] for layout in layouts(n)}
            failed = [layout for layout, words in at.items() if "failed" in words]
            passed = sum(bool(words & {"passed", "stale"}) and "failed" not in words for words in at.values())
            named = f", failed: {', '.join(failed)}" if failed else ""
            row.append(f"{passed} of {len(at)}{named}" if passed or failed else "not run")
        lines.append(f"| {feature} | {' | '.join(row)} |")
    return lines


def cell(outcomes: dict[int, set[str]]) -> str:
    """Return a cell's text: numbers of devices, with "failed" or "stale" if a check was. `outcomes`: by number of devices."""
    found: dict[str, list[int]] = {}
    for devices, of in sorted(outcomes.items()):
        worst = next((name for name in ("failed", "stale", "passed") if name in of), None)
        if worst is not None:
            found.setdefault(worst, []).append(devices)
    words = (f"{', '.join(map(str, numbers))}{'' if name == 'passed' else f' {name}'}" for name, numbers in found.items())
    return "; ".join(words) or "not run"


def written() -> dict[str, str]:
    """Return {room: fingerprint of its code} as the page records it."""
    first, last = CODE.split("{}")
    return dict(json.loads(PAGE.read_text(encoding="utf-8").partition(first)[2].partition(last)[0]))


def page(now: dict[str, str]) -> str:
    """Return the page's text with new tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{tables(now)}{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    rooms = {room for covered in COVERS.values() for room in covered}
    now = {room: code for room, code in fingerprints().items() if room in rooms}
    made = {PAGE: page(now), CELLS: cells(now)}
    if parser.parse_args().check:
        return int(any(text != path.read_text(encoding="utf-8") for path, text in made.items()))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
