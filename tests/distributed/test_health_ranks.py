"""Signals of health on several ranks are those of one process, and change nothing in training."""

import json
from pathlib import Path

import callback_script
import layouts
import pytest
from launch import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(callback_script.__file__)
MESHES = {
    "fsdp2": {"shard": 2},
    "tp": {"shard": 1, "tensor_parallel": 2},
    "pp": {"shard": 1, "pipeline": 2},
    "cp": {"shard": 1, "context": 2},
}
ROWS = {"tp": 4, "cp": 4}
"""Of a micro-batch, where ranks share the samples: two micro-batches a step, as elsewhere."""
TWO = {"ddp": {"strategy": "ddp"}}
TWO |= {name: {"strategy": mesh, "micro_batch_size": ROWS.get(name, 2)} for name, mesh in MESHES.items()}
TWO["pp, tied"] = {"strategy": MESHES["pp"], "settings": {"tie_embeddings": True}}
TWO["fsdp2, bf16, compiled"] = {"strategy": {"shard": 2}, "precision": "bf16-mixed", "compute": {"compile": True}}
TWO |= {f"{name}, dropout": {**TWO[name], "settings": {"dropout": 0.2}} for name in ("tp", "pp")}
TWO["differ"] = {"strategy": "ddp", "differ": True}
OF_ONE = ("first_gradient_share", "micro_batches", "leftover_gradient")
"""Signals of one process."""
FOUR = {"hsdp": {"strategy": {"replicate": 2, "shard": 2}}, "fsdp2-tp": {"strategy": {"shard": 2, "tensor_parallel": 2}}}


@pytest.mark.parametrize(("ranks", "jobs"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_every_layout_gives_the_norms_of_one_process_and_trains_as_without_them(tmp_path, ranks, jobs):
    (tmp_path / "text.txt").write_text(layouts.TEXT)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(SCRIPT, ranks, tmp_path, "health", tmp_path / "jobs.json", timeout=600)
    alone: dict[str, dict[int, dict[str, float]]] = {}
    for name, job in jobs.items():
        for each in reports:
            assert each[name]["rows"] == reports[0][name]["rows"], name
            assert list(each[name]["rows"]) == [1, 2, 4]
        rows = reports[0][name]["rows"]
        if name == "differ":
            assert rows[1]["health/rank_difference"] == pytest.approx(0.2, abs=0.05)  # 1 - 1 / 1.25; squares: 0.18
            continue
        assert all(each[name]["same"] and each[name]["parameters"] > 0 for each in reports), name
        if "dropout" in name:  # what is dropped depends on the number of ranks
            continue
        key = json.dumps(job.get("settings", {}))
        if key not in alone:
            alone[key] = callback_script.compare(tmp_path, "health", settings=json.loads(key))["rows"]
        tags = {tag for tag in alone[key][1] if not tag.endswith(OF_ONE)}
        own = {tag for tag in tags if not any(part in tag for part in ("norm/", "ratio/", "_targets"))}
        missing = tags - set(rows[1])
        if "pp" in name:
            seen = {
                "untouched_embeddings",
                "largest_id",
                "repeated_samples",
                "repeated_spans",
                "unigram_loss",
                "bigram_loss",
                "commonest_target",
                "counted_pairs",
                "unlearned_inputs",
            }
            seen |= {
                "consecutive_sequences",
                "rounded/weights",
                "rounded/averages",
                "rounded/gradients",
                "alike/weights",
                "alike/averages",
                "alike/gradients",
                "zero_gradients",
                "stateless",
                "changed_after_step",
            }
            assert missing == own - {f"health/{each}" for each in seen}
        else:
            # Ranks that share a sequence may have padding of it, so their gradients are scaled by the step's count afterwards.
            assert missing == ({"health/backward_loss_ratio"} if "cp" in name else set())
            assert rows[1]["health/future_leak"] < (0.02 if "bf16" in name else 1e-4)
        assert rows[1].get("health/rank_difference", 0.0) == 0.0
        assert ("health/rank_difference" in rows[1]) == (name == "ddp")
        assert rows[1].get("health/shared_samples", 0.0) == 0.0
        for tag in tags - own:
            tolerance = 2e-2 if "bf16" in name else 1e-3
            assert rows[2][tag] == pytest.approx(alone[key][2][tag], rel=tolerance, abs=1e-5), (name, tag)
        assert rows[4]["health/untouched_embeddings"] == pytest.approx(alone[key][4]["health/untouched_embeddings"], abs=1e-6)
