"""A run saved with one layout or micro-batch and continued with another: same samples, same losses up to rounding."""

from __future__ import annotations

import matrix
import pytest
from launcher import Launcher
from run_comparison import LEDGER, curves, ledger

SAVED_AT, STEPS = 10, matrix.STEPS
# Layout, micro-batch size; the global batch is 4.
PAIRS = [
    pytest.param("1 single", 4, "2 ddp", 1, marks=pytest.mark.slow),
    pytest.param("2 ddp", 2, "1 single", 2, marks=pytest.mark.slow),
    pytest.param("1 single", 4, "1 single", 2, marks=pytest.mark.slow),
    pytest.param("2 ddp", 2, "2 fsdp2", 2, marks=pytest.mark.slow),
    ("2 fsdp2", 2, "2 ddp", 1),
    pytest.param("2 fsdp2", 2, "4 fsdp2", 1, marks=pytest.mark.soak),
    pytest.param("4 fsdp2", 1, "1 single", 1, marks=pytest.mark.soak),
    pytest.param("4 ddp", 1, "2 ddp", 1, marks=pytest.mark.soak),
]


def fit(layout: str, micro: int, run_dir: str, *more: str) -> tuple[list[str], int]:
    ranks, strategy = layout.split()
    flags = ["--config", str(matrix.OVERLAYS / f"{strategy}.yaml"), "--trainer.devices", ranks]
    size = ["--data.micro_batch_size", str(micro)]
    return ["fit", "--config", "recipe.yaml", "--run_dir", run_dir, *flags, *size, *more], int(ranks)


def samples(run) -> dict[int, list[int]]:
    """The checksums of each step's samples in global order: rank after rank."""
    ranks = [ledger(run, rank) for rank in range(len(list(run.glob(LEDGER.format("*")))))]
    return {step: [checksum for rank in ranks for checksum in rank[step]] for step in ranks[0]}


@pytest.fixture(scope="module")
def known():
    return set()


@pytest.mark.parametrize(("layout", "micro", "then", "then_micro"), PAIRS)
def test_a_run_continued_on_another_layout_reads_the_same_samples_and_its_losses_differ_by_rounding(
    launcher: Launcher, folder, known, layout, micro, then, then_micro
):
    first = f"{layout} {micro}".replace(" ", "-")
    if first not in known:
        arguments, ranks = fit(layout, micro, first)
        run = launcher.run(arguments, folder, ranks=ranks, log=f"{first}.log")
        assert set(run.codes) == {0}, run.said()
        known.add(first)
    second = f"{first}-then-{then}-{then_micro}".replace(" ", "-")
    saved = f"{first}/checkpoints/step-{SAVED_AT:08d}.ckpt"
    arguments, ranks = fit(then, then_micro, second, "--resume", saved)
    run = launcher.run(arguments, folder, ranks=ranks, log=f"{second}.log")
    assert set(run.codes) == {0}, run.said()

    order = samples(folder / first)
    assert [len(order[step]) for step in range(1, STEPS + 1)] == [4] * STEPS
    assert len({checksum for step in order.values() for checksum in step}) > 40  # the samples differ
    assert samples(folder / second) == {step: order[step] for step in range(SAVED_AT + 1, STEPS + 1)}
    before, after = curves(folder / first), curves(folder / second)
    for name in ("lr", "progress/tokens"):
        assert after[name] == {step: value for step, value in before[name].items() if step > SAVED_AT}, name
    for name in ("train/loss", "val/loss", "grad/norm"):
        expected = {step: value for step, value in before[name].items() if step > SAVED_AT}
        assert after[name] == pytest.approx(expected, rel=1e-4), name
