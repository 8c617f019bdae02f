"""Steps with NaN, infinite or huge gradients, through the command line. The run must equal one without those steps."""

from __future__ import annotations

import matrix
import pytest
import torch
from matrix import Cell
from run_comparison import curves, values
from victims import overlay

from lit_llm.checkpoint.disk_format import damage, read

SPOILT = {3: "nan", 12: "inf", 13: "1000", 16: "nan", 17: "-inf", 20: "1000"}
ADAMW = ["--optimizer", "AdamW", "--optimizer.fused", "true"]
ADAFACTOR = ["--optimizer", "torch.optim.Adafactor"]  # does not read found_inf: the host reads the result
LION = ["--optimizer", "Lion", "--optimizer.lr", "0.001"]
CELLS = [
    pytest.param(Cell("1 single", 2, 0, 0.2, "bf16-mixed"), [], id="muon bf16-mixed"),
    pytest.param(Cell("1 single", 1, 0, 0.0, "bf16-true"), ADAMW, id="fused adamw bf16-true", marks=pytest.mark.slow),
    pytest.param(Cell("1 single", 1, 0, 0.0, "32-true"), ADAFACTOR, id="adafactor", marks=pytest.mark.slow),
    pytest.param(Cell("2 ddp", 1, 0, 0.2, "32-true"), LION, id="lion ddp", marks=pytest.mark.soak),
    pytest.param(Cell("2 fsdp2", 2, 0, 0.0, "32-true"), [], id="muon fsdp2", marks=pytest.mark.slow),
]


def bits(checkpoint, part: str) -> dict[str, list[int]]:
    tensors = {path: value for path, value in values(checkpoint[part], part) if isinstance(value, torch.Tensor)}
    return {path: tensor.contiguous().flatten().view(torch.uint8).tolist() for path, tensor in tensors.items()}


@pytest.mark.parametrize(("cell", "flags"), CELLS)
def test_skipped_steps_leave_no_trace_in_weights_moments_and_counters(launcher, folder, cell, flags):
    name = f"{cell.straight}-{len(flags)}"
    runs = {
        "guarded": [*overlay(folder, "spoil.yaml", ("Spoil", {"factors": SPOILT})), *flags, "--spike_guard.sigma", "20"],
        "left-out": [*overlay(folder, "leave.yaml", ("Leave", {"steps": list(SPOILT)})), *flags, "--spike_guard", "null"],
    }
    saved = {}
    for kind, more in runs.items():
        run = launcher.run(matrix.fit(cell, f"{name}-{kind}", *more), folder, ranks=cell.ranks, log=f"{name}.log")
        assert set(run.codes) == {0}, run.said()
        saved[kind] = read(folder / f"{name}-{kind}" / "checkpoints" / "last.ckpt")
    skipped = curves(folder / f"{name}-guarded")["spike/skipped"]
    assert [step for step, count in skipped.items() if count] == list(SPOILT)
    assert "optimizer step 3 (loss" in run.said() and "global samples 8 to 11" in run.said()
    for part in ("state_dict", "optimizer_states"):
        guarded, left_out = (bits(saved[kind], part) for kind in runs)
        assert guarded and guarded == left_out


SICK = [
    pytest.param(Cell("1 single", 1, 0, 0.0, "32-true"), id="one"),
    pytest.param(Cell("2 ddp", 1, 0, 0.0, "32-true"), id="two", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", SICK)
def test_too_many_skipped_steps_in_a_row_exit_with_1_a_diagnosis_and_the_last_good_weights(launcher, folder, cell):
    name = f"{cell.straight}-sick"
    sick = overlay(folder, "sick.yaml", ("Spoil", {"factors": {}, "forever_from": 12}))
    run = launcher.run(
        matrix.fit(cell, name, *sick, "--spike_guard.max_consecutive", "4"), folder, ranks=cell.ranks, log=f"{name}.log"
    )
    assert run.codes == [1] * cell.ranks, run.said()
    assert run.said().count("SpikeGuard stops training at optimizer step 15: the last 4 steps were all skipped") == 1
    last = folder / name / "checkpoints" / "last.ckpt"
    assert last.readlink().name == "step-00000015.ckpt" and damage(last) is None
    well = overlay(folder, "well.yaml", ("Leave", {"steps": list(range(12, matrix.STEPS + 1))}))
    run = launcher.run(
        matrix.fit(cell, f"{name}-well", *well, "--spike_guard", "null"), folder, ranks=cell.ranks, log=f"{name}.log"
    )
    assert set(run.codes) == {0}, run.said()
    for part in ("state_dict", "optimizer_states"):
        assert bits(read(last), part) == bits(read(folder / f"{name}-well" / "checkpoints" / "last.ckpt"), part)
