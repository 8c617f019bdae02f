"""The default dataset: the source code of the running Python's standard library. It needs no download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_llm.data.text import TextDataModule
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.split import path_hash

# Third-party code, and the test suites, which some distributions omit: without them the text differs less between machines.
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_VAL, _TEST = 0.04, 0.02  # fractions of the files


class PythonStdlib(TextDataModule):
    """The ``.py`` files of the standard library: about 13 MB of real text, no download.

    A hash of each file's path within the library assigns about 4 % of the files to validation, 2 % to test, and the rest to
    training. The split is the same on every machine. Each file is one document, followed by an end-of-text token.

    Args:
        kwargs: the arguments of ``TextDataModule``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = Path(sysconfig.get_paths()["stdlib"])

    def source_problems(self) -> list[str]:
        if next(self._sources(), None) is None:
            return [f"{self.root} has no Python sources: train on your own text (--data TextFiles --data.paths my.txt)."]
        return []

    def inputs(self) -> list[Input]:
        splits: dict[str, list[Input]] = {"train": [], "val": [], "test": []}
        for path in sorted(self._sources()):
            position = path_hash(path.relative_to(self.root).as_posix())
            name = "val" if position < _VAL else "test" if position < _VAL + _TEST else "train"
            splits[name].append(Input.of_file(path, name))
        return [one for split in splits.values() for one in split]

    def _sources(self) -> Iterator[Path]:
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _EXCLUDED]
            paths = (Path(folder, name) for name in names if name.endswith(".py"))
            yield from (path for path in paths if path.is_file() and path.stat().st_size > 0)
