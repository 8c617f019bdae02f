"""Scores of tasks while training on several ranks are those of one process, and change nothing in training."""

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
    "fsdp2, cpu offload": {"shard": 2, "cpu_offload": True},
    "tp": {"shard": 1, "tensor_parallel": 2},
    "pp": {"shard": 1, "pipeline": 2},
    "context": {"shard": 1, "context": 2},
}
ROWS = {"tp": 4, "context": 4}
"""Of a micro-batch, where ranks share the samples: two micro-batches a step, as elsewhere."""
JOBS = {"ddp": {"strategy": "ddp"}}
JOBS |= {name: {"strategy": mesh, "micro_batch_size": ROWS.get(name, 2)} for name, mesh in MESHES.items()}
JOBS["fsdp2"]["averages"] = True
JOBS["documents, bf16"] = {"strategy": {"shard": 2}, "settings": {"mask_documents": True}, "precision": "bf16-mixed"}


def prepare(folder: Path) -> Path:
    (folder / "text.txt").write_text(layouts.TEXT)
    words = layouts.TEXT.split()
    questions = [
        {"query": " ".join(words[i : i + 1 + i % 5]), "choices": [words[i + 7], words[3 * i], words[i + 9]], "gold": i % 3}
        for i in range(1, 20)  # 19 questions of 3 choices: no number of ranks and batches divides them
    ]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return folder


FOUR = {
    "hsdp": {"strategy": {"replicate": 2, "shard": 2}},
    "fsdp2-pp": {"strategy": {"shard": 2, "pipeline": 2}, "averages": True},  # stages keep weights whole after a forward pass
}


@pytest.mark.parametrize(("ranks", "jobs"), [(2, JOBS), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_every_layout_gives_the_scores_of_one_process_and_trains_as_without_them(tmp_path, ranks, jobs):
    folder = prepare(tmp_path)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    reports = run_ranks(SCRIPT, ranks, folder, "scores", folder / "jobs.json", timeout=400)
    alone = {}
    for name, job in jobs.items():
        settings = {key: value for key, value in job.items() if key != "strategy"}
        key = json.dumps(settings)
        if key not in alone:
            alone[key] = callback_script.compare(folder, "scores", **settings)["rows"]
        assert list(alone[key]) == [2, 3, 4] and alone[key][2] == alone[key][3], "the callback's metrics stay"
        for each in reports:
            assert each[name]["same"] and each[name]["parameters"] > 0, name
            assert each[name]["rows"] == reports[0][name]["rows"], name
            tolerance = 1e-3 if "bf16" in name else 1e-4
            for step, row in alone[key].items():
                assert each[name]["rows"][step] == pytest.approx(row, rel=tolerance), (name, step)
