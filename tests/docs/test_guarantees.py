"""Every promise of docs/evidence/guarantees.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/evidence/guarantees.md").read_text().splitlines() if line.startswith("| ")]


def test_every_promise_names_tests_that_exist():
    rows = [cells for row in ROWS if len(cells := row.strip("| ").split(" | ")) == 3 and cells[0] != "fault"]
    assert len(rows) > 20
    for fault, promise, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests)
        assert promise and named, fault
        for file, function in named:
            tree = ast.parse((ROOT / file).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in functions if function else any(name.startswith("test_") for name in functions), (file, function)
