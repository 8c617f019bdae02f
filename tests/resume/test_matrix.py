"""Runs killed anywhere continue exactly: a few cells of the matrix, or all of them with `make soak`."""

import random

import matrix
import pytest
import run_comparison
import yaml
from matrix import CELLS, Cell

from lit_llm.checkpoint.disk_format import read

QUICK = [
    pytest.param(Cell("1 single", 2, 2, 0.2, "bf16-mixed"), marks=pytest.mark.slow),
    pytest.param(Cell("2 ddp", 2, 0, 0.2, "32-true"), marks=pytest.mark.slow),
    Cell("2 fsdp2", 1, 2, 0.2, "bf16-mixed"),
    *(pytest.param(Cell(f"2 {layout}", 2, 2, 0.2, "32-true"), marks=pytest.mark.slow) for layout in ("pp", "cp")),
]


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_a_run_killed_repeatedly_equals_the_uninterrupted_run_bit_for_bit(launcher, folder, known, cell):
    kills = 1 if cell.layout in ("2 pp", "2 cp") else 2  # at an operation on a checkpoint's files; then at a random moment
    result = matrix.run_cell(launcher, cell, folder, known, kills=kills, rng=random.Random(str(cell)))
    assert result.differing == 0 and not result.found, "\n".join(result.found)
    assert result.kills >= 1 and result.values > 400


@pytest.mark.slow
def test_a_run_with_log_windows_a_batch_ramp_and_other_callbacks_is_bit_exact_too(launcher, tmp_path):
    """Rows come every 3 steps, saves at steps 3, 4, 6, 8, …, so kills interrupt counts since the last row."""
    matrix.prepare(tmp_path)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 50}}
    recipe["trainer"] |= {"log_every_n_steps": 3, "callbacks": [*recipe["trainer"]["callbacks"], stopping]}
    recipe["samples"] = {"class_path": "TextSamples", "init_args": {"prompts": ["7 times"], "every_n_steps": 5}}
    recipe["batch_ramp"] = {"class_path": "BatchRamp", "init_args": {"tokens_per_batch": [[0, 32], [300, 64]]}}
    (tmp_path / "recipe.yaml").write_text(yaml.dump(recipe))
    cell = Cell("1 single", 2, 0, 0.2, "32-true")
    result = matrix.run_cell(launcher, cell, tmp_path, {}, kills=3, rng=random.Random(3))
    assert result.differing == 0, "\n".join(result.found)
    assert result.kills >= 2


@pytest.mark.soak
def test_the_whole_matrix(launcher, folder, capsys):
    with capsys.disabled():
        results, summary = matrix.report(launcher, CELLS, folder, kills=4, seed=1)
    assert [result.found for result in results if result.differing] == [], summary
    assert all(result.kills for result in results) and sum(result.in_a_save for result in results) > len(CELLS)


def test_every_value_of_a_checkpoint_but_those_about_time_is_compared(launcher, folder):
    run = launcher.run(matrix.fit(matrix.CELLS[0], "compared"), folder, log="compared.log")
    assert run.codes == [0], run.said()
    content = read(folder / "compared" / "checkpoints" / "last.ckpt")
    paths = {path for part in content for path, _ in run_comparison.values(content[part], part)}
    for path in (
        "state_dict.model.head.weight",
        "optimizer_states.0.state.0.momentum_buffer",
        "optimizer_states.0.param_groups.0.lr",
        "callbacks.SpikeGuard.losses.0",
        "callbacks.GradientNorm.clipped",
        "callbacks.Throughput.tokens",
        "callbacks.StepCheckpoint.best_score",
        "TextFiles.consumed_samples",
        "loops.fit_loop.epoch_loop.batch_progress.total.ready",
    ):
        assert path in paths, sorted(paths)
