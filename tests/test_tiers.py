"""docs/testing.md lists what `make test` leaves out."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_every_file_with_slow_tests_is_in_the_table():
    slow = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py") if "mark.slow" in path.read_text()}
    slow -= {Path(__file__).relative_to(ROOT).as_posix()}
    assert slow - set(re.findall(r"tests/[\w/]+\.py", PAGE)) == set()


def test_every_test_in_the_table_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"(?<![\w/])test_\w+(?!\w|\.py)", PAGE)
    assert len(named) >= 5
    assert [name for name in named if f"def {name}(" not in tests] == []
    assert [path for path in re.findall(r"tests/[\w/]+\.py", PAGE) if not (ROOT / path).is_file()] == []
