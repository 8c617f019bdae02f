"""Clean a folder, in small jobs. Usage: clean_script.py FOLDER OUT WORKERS RULES"""

import sys
import unittest.mock
from pathlib import Path

from clean.clean_runs import run

from lit_llm.core.disk import delete
from lit_llm.ingest import inputs
from lit_llm.ingest.token_parts import PARTS


def clean_folder(folder: Path, out: Path, workers: int, *, rules: bool = False) -> None:
    """Normalise and remove duplicates; with ``rules``, after redaction, decontamination and a rule of quality."""
    judged = {"secrets": "redact", "emails": "redact", "against": [str(folder / "z.jsonl")], "gopher_repetition": True}
    duplicates = {"normalise": True, "exact_duplicates": True, "near_duplicates": 0.6}
    with unittest.mock.patch.object(inputs, "JOB_BYTES", 20_000):
        run(sorted(folder.iterdir()), out, workers=workers, **duplicates, **(judged if rules else {}))
    delete(out / PARTS)


if __name__ == "__main__":
    clean_folder(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), rules=sys.argv[4] == "rules")
