"""Compare the settings of several runs: which settings differ, and their values as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_llm.config.arguments import leaves
from lit_llm.reporting.charts import number
from lit_llm.reporting.run_curves import RunCurves
from lit_llm.runs.setting_changes import Change, rule

ABSENT = "–"
_OTHER_CURVES = ("init_from", "resume", "use_ema", "trainer.limit_val_batches", "trainer.fast_dev_run")
"""Settings that may change when a run is continued, but that change the curves of a run that has them from its first step."""


def settings_of(run: RunCurves) -> dict[str, Any]:
    """Return {dotted key: value} of a run's settings. A class comes before its arguments, whose keys lack `init_args`."""
    return dict(leaves(run.run.config))


def varying_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of settings that differ between runs and affect training. `settings`: of each run, {key: value}.

    An argument of a class that only some runs use is left out if these runs have the same value of the argument.
    """
    keys = list(dict.fromkeys(key for each in settings for key in each))
    classes = {key for key in keys if any(_is_class(each.get(key)) for each in settings)}
    varying_keys: list[str] = []
    for key in keys:
        values = {exact(each.get(key, ABSENT)) for each in settings}
        if key.rpartition(".")[0] in classes:
            values.discard(ABSENT)
        if len(values) > 1 and (rule(key) is not Change.FREE or key in _OTHER_CURVES):
            varying_keys.append(key)
    return varying_keys


def text(value: Any) -> str:
    """Return the text of a setting's value for a page: a class without its module; a float by `number` if that is exact."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    if _is_class(value):
        return str(value).rpartition(".")[2]
    if isinstance(value, list) and value and all(isinstance(each, dict) and "class_path" in each for each in value):
        return ", ".join(text(each["class_path"]) for each in value)
    if not isinstance(value, float):
        return str(value)
    short = number(value)
    return short if math.isclose(float(short.replace(",", "")), value, rel_tol=1e-12) else repr(value)


def texts(values: Sequence[Any]) -> list[str]:
    """Return texts for the values of one setting in several runs: the short ones of `text`, unless these hide a difference."""
    short, whole = [text(value) for value in values], [exact(value) for value in values]
    return short if len(set(short)) == len(set(whole)) else whole


def exact(value: Any) -> str:
    """Return a setting's value as text. Two values have the same text only if the values are equal."""
    return str(value) if _is_class(value) or isinstance(value, list) else text(value)


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"([A-Za-z_]\w*\.)+[A-Z]\w*", value) is not None
