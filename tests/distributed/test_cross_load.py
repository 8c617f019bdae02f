"""Any strategy continues from any other's checkpoint, whole or in shards, with several parameter groups."""

import layouts
import pytest
import torch
from cross_load import COMMON, LAYOUTS, checkpoint, moves, run, save_all

from lit_llm.callbacks.ema import AVERAGE
from lit_llm.checkpoint import disk_format

pytestmark = pytest.mark.slow  # `make test` has one change of layout: tests/resume/test_elastic.py

SAVED_AT, STEPS = 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cross-load")
    (folder / "text.txt").write_text(layouts.TEXT)
    return folder


@pytest.fixture(scope="module")
def straight(folder):
    return layouts.train(folder, steps=STEPS, parameters=True, **COMMON)


PARTS = ("fsdp2-tp, shards", "tp, shards", "pp, shards")


@pytest.fixture(scope="module")
def saved(folder):
    """Of up to 4 processes."""
    return save_all(folder, SAVED_AT, [2, 4])


@pytest.fixture(scope="module")
def everything_saved(folder, saved):
    return saved | save_all(folder, SAVED_AT, [8])


def test_all_of_them_hold_the_same(folder, saved):
    """Read on one process without any strategy: the same keys, shapes and (up to rounding) values."""
    hold_the_same(folder, saved)


def hold_the_same(folder, saved, of="single"):
    reference = disk_format.read(folder / checkpoint(of, SAVED_AT))
    for name, place in saved.items():
        content = disk_format.read(folder / checkpoint(place, SAVED_AT))
        assert content.keys() == reference.keys(), name
        assert list(content["state_dict"]) == list(reference["state_dict"]), name
        for key, tensor in reference["state_dict"].items():
            torch.testing.assert_close(content["state_dict"][key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
        assert list(content[AVERAGE]) == list(reference[AVERAGE]), name
        for key, tensor in reference[AVERAGE].items():
            torch.testing.assert_close(content[AVERAGE][key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: average of {key}")
        ours, theirs = content["callbacks"]["SpikeGuard"], reference["callbacks"]["SpikeGuard"]
        for key in ("losses", "norms"):  # what all ranks decide by
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (name, key)
        ours, theirs = content["optimizer_states"][0], reference["optimizer_states"][0]
        assert ours["param_groups"] == theirs["param_groups"], name
        assert {i: s.keys() for i, s in ours["state"].items()} == {i: s.keys() for i, s in theirs["state"].items()}, name
        parts = sorted(p.name for p in (folder / checkpoint(place, SAVED_AT)).glob("shard-*"))
        ranks = next((r for r, of in LAYOUTS.items() if name.split(",")[0] in of), 1)
        assert parts == ([f"shard-{r:05d}-of-{ranks:05d}.pt" for r in range(ranks)] if "shards" in name else []), name


def continued(result: dict, straight: dict, name: str) -> None:
    assert result["steps"] == list(range(SAVED_AT + 1, STEPS + 1)), name
    assert result["lr"] == straight["lr"][SAVED_AT:], name
    for key in ("train/loss", "grad/norm"):
        assert result[key] == pytest.approx(straight[key][SAVED_AT:], rel=1e-5), (name, key)
    average = {key: straight["average"][key] for key in result["average"]}  # a pipeline's rank has some
    assert result["average"] and result["average"] == pytest.approx(average, rel=1e-5, abs=1e-5), name
    assert result["val/loss"] == pytest.approx(straight["val/loss"], rel=1e-5), name


def test_one_process_continues_from_each(folder, saved, straight):
    """All whole checkpoints hold the same, as the test above shows. Parts are cut by one dimension, by layers, or by two."""
    for name in ("ddp", *PARTS):
        result = layouts.train(folder, steps=STEPS, resume=checkpoint(saved[name], SAVED_AT), **COMMON)
        continued(result, straight, f"{name} → single")


def test_each_layout_continues_from_whole_tensors_and_from_parts(folder, saved, straight):
    moved = moves({name: saved[name] for name in ("single", *PARTS)}, SAVED_AT, 2, STEPS)
    wanted = [f"{source} → {name}" for number, name in enumerate(LAYOUTS[2]) for source in ("single", PARTS[number % 3])]
    continue_with(folder, {name: moved[name] for name in wanted}, straight, 2)


def continue_with(folder, jobs, straight, ranks):
    for rank, results in enumerate(run(folder, ranks, jobs)):
        for name, result in results.items():
            continued(result, straight, f"rank {rank}: {name}")


@pytest.mark.soak
def test_three_dimensions_continue_from_each_and_each_from_three_dimensions(folder, everything_saved, straight):
    three = {name: place for name, place in everything_saved.items() if name.startswith("3d")}
    assert len(three) == 2
    hold_the_same(folder, three)
    for name, place in three.items():
        result = layouts.train(folder, steps=STEPS, resume=checkpoint(place, SAVED_AT), **COMMON)
        continued(result, straight, f"{name} → single")
    for ranks in (2, 4):
        continue_with(folder, moves(three, SAVED_AT, ranks, STEPS), straight, ranks)
    continue_with(folder, moves(everything_saved, SAVED_AT, 8, STEPS), straight, 8)


TIED = {"model": "gpt2", "optimizer": "AdamW", "ema": 0.9}  # one matrix on the first and the last rank of a pipeline


def test_a_matrix_that_two_stages_hold_is_saved_once(folder):
    straight = layouts.train(folder, steps=STEPS, save_at=SAVED_AT, to="tied", **TIED)
    stages = {"strategy": LAYOUTS[2]["pp"], "steps": STEPS, "save_at": SAVED_AT, **TIED}
    jobs = {
        "saved whole": {**stages, "to": "tied-whole"},
        "saved in shards": {**stages, "to": "tied-shards", "sharded": True, "background": True},
        "from one process": {**stages, "resume": checkpoint("tied", SAVED_AT)},
    }
    for results in run(folder, 2, jobs):
        for key in ("train/loss", "grad/norm"):
            for name in ("saved whole", "saved in shards"):
                assert results[name][key] == pytest.approx(straight[key], rel=1e-5), (name, key)
        continued(results["from one process"], straight, "from one process")
    hold_the_same(folder, {"pp": "tied-whole", "pp, shards": "tied-shards"}, of="tied")
    first, last = [
        torch.load(file, weights_only=True) for file in sorted((folder / checkpoint("tied-shards", SAVED_AT)).glob("sh*"))
    ]
    assert "state_dict.model.embedding.weight" in first and not first.keys() & last.keys()
    result = layouts.train(folder, steps=STEPS, resume=checkpoint("tied-shards", SAVED_AT), **TIED)
    continued(result, straight, "on one process")
