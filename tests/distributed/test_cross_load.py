"""Any strategy continues from any other's checkpoint, whole or in shards, with several parameter groups."""

import layouts
import pytest
import torch
from cross_load import COMMON, LAYOUTS, checkpoint, moves, run, save_all

from lit_llm.checkpoint import format

pytestmark = pytest.mark.slow  # `make test` has one change of layout: tests/resume/test_elastic.py

SAVED_AT, STEPS = 3, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cross-load")
    (folder / "text.txt").write_text(layouts.TEXT)
    return folder


@pytest.fixture(scope="module")
def straight(folder):
    return layouts.train(folder, steps=STEPS, parameters=True, **COMMON)


@pytest.fixture(scope="module")
def saved(folder):
    return save_all(folder, SAVED_AT)


def test_all_of_them_hold_the_same(folder, saved):
    """Read on one process without any strategy: the same keys, shapes and (up to rounding) values."""
    reference = format.read(folder / checkpoint("single", SAVED_AT))
    for name, place in saved.items():
        content = format.read(folder / checkpoint(place, SAVED_AT))
        assert content.keys() == reference.keys(), name
        for key, tensor in reference["state_dict"].items():
            torch.testing.assert_close(content["state_dict"][key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
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
    assert result["val/loss"] == pytest.approx(straight["val/loss"], rel=1e-5), name


def test_one_process_continues_from_each(folder, saved, straight):
    for name, place in saved.items():
        result = layouts.train(folder, steps=STEPS, resume=checkpoint(place, SAVED_AT), **COMMON)
        continued(result, straight, f"{name} → single")


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.soak) if n == 4 else n for n in LAYOUTS])
def test_each_layout_continues_from_each(folder, saved, straight, ranks):
    sources = {name: place for name, place in saved.items() if "async" not in name}
    jobs = moves(sources, SAVED_AT, ranks, STEPS)
    for rank, results in enumerate(run(folder, ranks, jobs)):
        for name, result in results.items():
            continued(result, straight, f"rank {rank}: {name}")


@pytest.mark.soak
def test_resumed_in_the_same_layout_it_is_bit_for_bit_the_straight_run(folder, saved):
    for ranks, of in LAYOUTS.items():
        jobs = {}
        for name, strategy in of.items():
            jobs[f"{name} straight"] = {"strategy": strategy, "steps": STEPS, "parameters": True}
            for source in [name, f"{name}, shards"]:
                if source in saved:
                    jobs[f"{source} resumed"] = {**jobs[f"{name} straight"], "resume": checkpoint(saved[source], SAVED_AT)}
        for results in run(folder, ranks, jobs):
            for name, result in results.items():
                if not name.endswith("resumed"):
                    continue
                base = results[f"{name.split(',')[0].removesuffix(' resumed')} straight"]
                for key in ("train/loss", "grad/norm"):
                    assert result[key] == base[key][SAVED_AT:], (name, key)
                for parameter, value in base["parameters"].items():
                    assert torch.equal(result["parameters"][parameter], value), (name, parameter)
