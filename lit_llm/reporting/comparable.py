"""Decide which runs have comparable losses: runs with the same task and the same held-out text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lit_llm.reporting.ranking import BITS, VALIDATION
from lit_llm.reporting.run_curves import RunCurves
from lit_llm.reporting.setting_texts import ABSENT, exact, settings_of, text
from lit_llm.runs.saved_run import tokenizer_sha256

T = TypeVar("T")

_NO_TEXT = re.compile(
    r"data\.(tokenizer\b.*|seed|num_workers|cache_dir|(micro|global)_batch_size|block_size|packing|vocab_size|[be]os_id|phases"
    r"|headerless|drop_near_duplicates|sources\.[^.]+\.(train|max_epochs))"
)
"""Keys of data settings that change no byte of the held-out text."""
_TRAINED_ON = ("data.train", "data.paths", "data.path", "data.val_fraction")
"""Settings that do not change the held-out text if `data.val` names files for validation."""
_FILES = (".val", ".paths", ".path", ".val_fraction")
_GZIP = "val/gzip_bits_per_byte"


def grouped(items: Sequence[T], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """Return groups of `items`: each item joins the first group whose first item is `alike` to it, or else begins a group."""
    parts: list[list[T]] = []
    for item in items:
        part = next((part for part in parts if alike(part[0], item)), None)
        if part is None:
            parts.append(part := [])
        part.append(item)
    return parts


def comparable(one: RunCurves, other: RunCurves) -> bool:
    """Whether two runs have the same task and held-out text, and the same tokenizer unless both logged bits per byte.

    Held-out texts count as the same if gzip needs equally many bits per byte for both, wherever the files are. The texts also
    count as the same if the settings of both runs name the same text, and gzip's bits per byte differ by at most 5 %.
    """
    marks = [run.last(_GZIP) for run in (one, other)]
    known = [mark for mark in marks if mark is not None]
    same = len(known) == 2 and math.isclose(*known, rel_tol=1e-9)
    changed = len(known) == 2 and not math.isclose(*known, rel_tol=0.05)  # samples of long texts differ by tokenizer
    if _task(one) != _task(other) or not (same or (_text(one) == _text(other) and not changed)):
        return False
    return _tokenizer(one) == _tokenizer(other) or all(run.last(BITS) is not None for run in (one, other))


def conditions(parts: Sequence[Sequence[RunCurves]]) -> list[str]:
    """Return for each group of comparable runs a text with the facts by which groups differ: task, files of the held-out text,
    tokenizer, and gzip's bits per byte. If two of these texts are equal, the texts have every differing data setting instead.
    """
    facts = []
    for part in parts:
        gzip, tokenizers = part[0].last(_GZIP), {_tokenizer(run) for run in part}
        named = {} if gzip is None else {"gzip": f"{gzip:.3f} bits per byte"}
        named |= {"tokenizer": tokenizers.pop()} if len(tokenizers) == 1 else {}
        facts.append({"task": _task(part[0]), **_text(part[0]), **named})
    keys = list(dict.fromkeys(key for each in facts for key in each))
    differ = [key for key in keys if len({each.get(key, ABSENT) for each in facts}) > 1]
    for shown in ([key for key in differ if not key.startswith("data.") or key.endswith(_FILES)], differ):
        said = [", ".join(f"{key} {each[key]}" for key in shown if key in each) for each in facts]
        if len(set(said)) == len(said):
            break
    return said


def _task(run: RunCurves) -> str:
    """Return the run's task as text: "cross-entropy", also for distillation, or the objective's loss with its arguments."""
    settings = settings_of(run)
    if settings.get("objective.loss") is None:
        name = text(settings.get("objective", "CrossEntropy"))
        return "cross-entropy" if name in ("CrossEntropy", "Distillation", "null") else name
    arguments = {key.rpartition(".")[2]: text(value) for key, value in settings.items() if key.startswith("objective.")}
    return ", ".join([arguments.pop("loss"), *(f"{key} {value}" for key, value in arguments.items())])


def _text(run: RunCurves) -> dict[str, str]:
    """Return {key: text of the value} of the settings that determine the held-out text, or, without validation, the training
    text."""
    settings: dict[str, Any] = settings_of(run)
    text_settings = {key: value for key, value in settings.items() if key.startswith("data.") and not _NO_TEXT.fullmatch(key)}
    if settings.get("data.val") is not None and run.last(VALIDATION) is not None:
        text_settings = {key: value for key, value in text_settings.items() if key not in _TRAINED_ON}
    text_settings["trainer.limit_val_batches"] = settings.get("trainer.limit_val_batches")
    return {key: exact(value) for key, value in text_settings.items() if value is not None}


def _tokenizer(run: RunCurves) -> str:
    try:
        return tokenizer_sha256(run.run.path)[:8]
    except OSError:  # the run folder has no copy of the tokenizer
        named = [text(value) for key, value in settings_of(run).items() if f"{key}.".startswith("data.tokenizer.")]
        return ", ".join(named)
