"""The shipped curve that a run should follow: that of the recipe whose settings it has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from lit_llm.config.arguments import leaves
from lit_llm.config.recipe_files import SHIPPED
from lit_llm.core.yaml_reading import read_yaml
from lit_llm.runs.curve import TOLERANCE, Curve
from lit_llm.runs.curve_follower import CurveFollower
from lit_llm.runs.loaded_run import setting_in
from lit_llm.runs.setting_changes import Change, rule

_ONLY_ROUNDING = (
    *("compute.activation_checkpointing", "compute.compile", "compute.attention", "compute.matmul_precision"),
    *("loss.chunk_size", "data.micro_batch_size", "optimizer.fused", "optimizer.foreach", "optimizer.ns_dtype"),
    *("trainer.accelerator", "trainer.strategy", "trainer.devices", "trainer.num_nodes", "trainer.precision"),
    *("trainer.deterministic", "trainer.benchmark"),
)
"""Settings that change losses by less than the tolerance: a run that differs in them is compared, and the page names them."""
OTHER_CURVES = ("init_from", "resume", "use_ema", "trainer.limit_val_batches", "trainer.fast_dev_run")
"""Settings that may change where a run continues, but make other curves of a run from its start."""
_FEW = 3
"""Settings in which a run may differ so that the page says why it was not compared."""


class Evidence(NamedTuple):
    """A curve and what the page says of the run's settings. `follower` is None if the run has others than the curve's."""

    follower: CurveFollower | None
    said: str


def shipped_evidence(config: Mapping[str, Any]) -> Evidence | None:
    """The shipped curve of a recipe with these settings. None: there is none like it.

    Args:
        config: of the run.
    """
    steps = setting_in(config, "trainer.max_steps")
    nearest: tuple[str, list[str]] | None = None
    for path in sorted((SHIPPED / "evidence").glob("*.csv")):
        curve = Curve.read(path)
        command = shlex.split(curve.facts.get("command", ""))
        if "fit" not in command or curve.rows[-1].step != steps:
            continue
        rounding, other = _differences(_settings(command[command.index("fit") + 1 :]), dict(leaves(dict(config))))
        name = f"evidence/{path.name}"
        if not other:
            return Evidence(CurveFollower(curve, name, TOLERANCE), f"; its {'; '.join(rounding)}" if rounding else "")
        if len(other) <= _FEW:
            nearest = min(nearest or (name, other), (name, other), key=lambda found: len(found[1]))
    if nearest is None:
        return None
    return Evidence(None, f"not compared with {nearest[0]}, because settings differ: {'; '.join(nearest[1])}")


def _settings(arguments: list[str]) -> dict[str, Any]:
    from lit_llm.config.resolve import resolved  # imports torch and takes seconds

    at = arguments.index("--config") + 1
    arguments[at] = str(SHIPPED / f"{arguments[at]}.yaml")  # not one of the same name in the working folder
    return dict(leaves(read_yaml(resolved(arguments))))


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Settings of the run that differ from the recipe's: (those that only change rounding, the others)."""
    rounding: list[str] = []
    other: list[str] = []
    for key in sorted(theirs.keys() | ours.keys()):
        one, two = ours.get(key), theirs.get(key)
        if one == two or (rule(key) is Change.FREE and key not in OTHER_CURVES):
            continue
        said = f"{key} is {one}, not {two}"
        (rounding if key.startswith(_ONLY_ROUNDING) else other).append(said)
    return rounding, other
