"""What `make test` leaves out has a quick case, in the same file or in one that docs/testing.md names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "testing.md").read_text()
ROWS = re.findall(r"^\| (`tests/.*) \| (.*) \|$", PAGE, re.M)
MARKS = re.compile(r"^pytest\.mark\.(slow|soak)")


def has_quick_tests(file: Path) -> bool:
    body = ast.parse(file.read_text()).body
    whole = [ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    marks = [[ast.unparse(mark) for mark in test.decorator_list] for test in tests]
    return not any(map(MARKS.match, whole)) and any(not any(map(MARKS.match, names)) for names in marks)


def test_every_file_with_slow_tests_alone_is_in_the_table():
    slow = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()}
    alone = {path.relative_to(ROOT).as_posix() for path in slow if not has_quick_tests(path)}
    assert alone == set(re.findall(r"tests/[\w/]+\.py", " ".join(files for files, _ in ROWS)))


def test_the_table_names_a_quick_case_or_says_why_there_is_none():
    for files, case in ROWS:
        named = re.findall(r"tests/[\w/]+\.py", case)
        assert all(has_quick_tests(ROOT / file) for file in named), files
        assert named or case.startswith("none: "), files
