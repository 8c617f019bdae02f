"""Compare predicted with published tokens per second, for each run of benchmarks/published.yaml.

    python benchmarks/published_speed.py          # with the constants of lit_llm/plan/speed.py
    python benchmarks/published_speed.py --fit    # fits them again by least squares of the relative error, and prints them
    python benchmarks/published_speed.py --mixtures    # runs with experts, to which nothing is fitted
    python benchmarks/published_speed.py --unseen      # runs to which nothing is fitted, and the band that `plan` prints

Each run is also predicted with constants fitted to all other runs, and with constants fitted to all runs of other sources.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lit_llm.distributed.pipeline_order import bubble
from lit_llm.plan.collectives import Exchange, exchange_of
from lit_llm.plan.memory import resolved
from lit_llm.plan.planned_run import PlannedRun
from lit_llm.plan.speed import FITTED, Constants, Options, Work, band, gpu_seconds, step_times, work_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
from published_runs import Run, runs

NAMES = tuple(asdict(FITTED))
STIFFNESS = 0.03
"""Weight of the change of a constant's logarithm in the fit, so that constants which few runs determine change little."""


@dataclass(frozen=True)
class Known:
    """The work and communication of a run, which do not depend on the fitted constants."""

    run: Run
    settings: PlannedRun
    work: Work
    exchange: Exchange

    @classmethod
    def of(cls, run: Run) -> Known:
        settings = resolved(run.settings, run.hardware)
        exchange = exchange_of(settings, run.hardware)
        assert exchange is not None
        return cls(run, settings, work_of(settings, cuda=True), exchange)

    def ratio(self, constants: Constants) -> float:
        """Return predicted over published tokens per second, by the formula of `lit_llm.plan.speed.step_times`."""
        settings, count = self.settings, self.settings.accumulation
        computing = gpu_seconds(self.work, settings, self.run.hardware, constants)
        assert computing is not None
        exposed = self.exchange.exposed(computing / count, constants.exposed, constants.waiting)
        step = (computing + exposed) / (1 - bubble(settings.layout.pipeline, count))
        return settings.tokens_per_step / settings.layout.devices / step / self.run.tokens_per_second


def fitted(known: Sequence[Known], start: Constants, iterations: int = 30) -> Constants:
    """Return the constants with the least sum of squares of log(ratio) over `known`, by the Levenberg-Marquardt method."""
    prior = np.log([getattr(start, name) for name in NAMES])

    def errors(logs: np.ndarray) -> np.ndarray:
        constants = constants_of(logs)
        return np.array([np.log(each.ratio(constants)) for each in known] + list(STIFFNESS * (logs - prior)))

    logs, damping = prior.copy(), 1e-2
    error = errors(logs)
    for _ in range(iterations):
        steps = np.eye(len(NAMES)) * 1e-4
        slopes = np.array([(errors(logs + step) - error) / 1e-4 for step in steps]).T
        before = error @ error
        while damping < 1e6:
            matrix = slopes.T @ slopes + damping * np.eye(len(NAMES))
            tried = logs + np.clip(np.linalg.solve(matrix, -slopes.T @ error), -0.5, 0.5)
            if (found := errors(tried)) @ found < before:
                logs, error, damping = tried, found, max(damping / 3, 1e-6)
                break
            damping *= 4
        if before - error @ error < 1e-7 * before:
            break
    return constants_of(logs)


def constants_of(logs: np.ndarray) -> Constants:
    return Constants(**dict(zip(NAMES, np.exp(logs).tolist(), strict=True)))


def without(known: Sequence[Known], keys: Sequence[object], start: Constants) -> list[float]:
    """Return the ratio of each run with constants fitted to the runs with another key. `keys`: the key of each run."""
    found = {key: fitted([k for k, other in zip(known, keys, strict=True) if other != key], start, 8) for key in set(keys)}
    return [each.ratio(found[key]) for each, key in zip(known, keys, strict=True)]


def summary(what: str, known: Sequence[Known], ratios: Sequence[float]) -> str:
    off = [abs(ratio - 1) for ratio in ratios]
    worst = off.index(max(off))
    within = f"{sum(each <= 0.15 for each in off)} of {len(off)} within 15 %, median {np.median(off):.1%} off"
    return f"{what}: {within}; worst {ratios[worst]:.2f}, {known[worst].run}"


def unseen() -> None:
    """Print predicted and published speeds, and the band that `plan` prints, of the runs to which nothing is fitted."""
    print("| run | published tokens/s | predicted | ratio | band | |\n|---|---|---|---|---|---|")
    found: dict[bool, list[tuple[float, bool]]] = {False: [], True: []}
    for run in runs(of="unseen"):
        settings = resolved(run.settings, run.hardware)
        times = step_times(settings, run.hardware, Options())
        assert times.step is not None
        speed = settings.tokens_per_step / settings.layout.devices / times.step
        fast, slow = band(settings, run.hardware, times, Options()) or (1.0, 1.0)
        found[run.sealed].append((speed / run.tokens_per_second, speed / slow <= run.tokens_per_second <= speed / fast))
        cells = (f"{run.tokens_per_second:,.0f}", f"{speed:,.0f}", f"{speed / run.tokens_per_second:.2f}")
        print(f"| {run} | {' | '.join(cells)} | {speed / slow:,.0f} to {speed / fast:,.0f} | {'sealed' * run.sealed} |")
    for sealed, each in found.items():
        near, inside = sum(abs(ratio - 1) <= 0.15 for ratio, _ in each), sum(is_inside for _, is_inside in each)
        print(f"\n{'sealed' if sealed else 'open'}: {inside} of {len(each)} inside the band, {near} within 15 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--brief", action="store_true", help="no fits without a run or a source")
    parser.add_argument("--mixtures", action="store_true", help="of runs with experts, which do not say what they recompute")
    parser.add_argument("--unseen", action="store_true", help="of runs to which nothing is fitted, with their bands")
    options = parser.parse_args()
    if options.unseen:
        unseen()
        return
    if options.mixtures:
        print("| run | published tokens/s | predicted/published | with full recomputation |\n|---|---|---|---|")
        for run in runs(of="mixtures"):
            full = replace(
                run, settings=replace(run.settings, compute=replace(run.settings.compute, activation_checkpointing="full"))
            )
            ratios = [Known.of(each).ratio(FITTED) for each in (run, full)]
            print(f"| {run} | {run.tokens_per_second:,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
        return
    known = [Known.of(run) for run in runs()]
    constants = fitted(known, FITTED) if options.fit else FITTED
    ratios = [each.ratio(constants) for each in known]
    columns = {"predicted/published": ratios}
    if not options.brief:
        columns["without this run"] = without(known, range(len(known)), constants)
        columns["without this source"] = without(known, [each.run.group.split(",")[0] for each in known], constants)
    print(f"| run | published tokens/s | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
    for each, *values in zip(known, *columns.values(), strict=True):
        cells = " | ".join(f"{value:.3f}" for value in values)
        print(f"| {each.run} | {each.run.tokens_per_second:,.0f} | {cells} |")
    print()
    for name, values in columns.items():
        print(summary(name, known, values))
    if options.fit:
        print("\n".join(f"    {name}: float = {value:.3g}" for name, value in asdict(constants).items()))


if __name__ == "__main__":
    main()
