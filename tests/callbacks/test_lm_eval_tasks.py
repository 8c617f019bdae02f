"""Tasks of lm_eval that cannot be scored are refused before training, and nothing is downloaded."""

import random
import socket

import numpy as np
import pytest
import torch
import yaml
from asked import Asked, write
from foreign import fit

from lit_llm.callbacks import TaskScores

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

TASK = {
    **{"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}}, "test_split": "test"},
    **{"output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "gold"},
}
HUB = {"dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy", "dataset_kwargs": None}
MISSING = {"dataset_kwargs": {"data_files": {"test": "no.jsonl"}}}
ANSWER = {"output_type": "generate_until", "doc_to_target": "{{choices[gold]}}", "doc_to_choice": None}
SAMPLED = {**ANSWER, "generation_kwargs": {"do_sample": True, "temperature": 0.7, "until": ["."]}}
BEAMS = {**ANSWER, "generation_kwargs": {"num_beams": 4, "repetition_penalty": 1.0, "until": ["."]}}
LONG = {**ANSWER, "generation_kwargs": {"until": ["."]}}
REFUSED = {
    "a data set of the hub": ("mine.yaml", HUB, "cannot be loaded .* nothing is downloaded during training: .*allenai/ai2_arc"),
    "an unknown name": ("arc_esy", {}, "arc_esy is neither a task of lm_eval nor a file that ends in .yaml or .jsonl"),
    "a missing file": ("other.yaml", {}, "other.yaml does not exist"),
    "missing data": ("mine.yaml", MISSING, "Unable to find '.*no.jsonl'"),
    "a mistyped key": ("mine.yaml", {"doc_to_text": "{{qery}}"}, "'qery' is undefined"),
    "an unknown metric": ("mine.yaml", {"metric_list": [{"metric": "acuracy"}]}, "the tasks mine.yaml cannot be loaded"),
    "sampled answers": ("mine.yaml", SAMPLED, "task mine sets do_sample: True"),
    "other answers": ("mine.yaml", BEAMS, "task mine sets num_beams: 4"),
    "long answers": ("mine.yaml", LONG, "generates up to 256 tokens, but the model's context has 12"),
}


@pytest.fixture(autouse=True)
def own_tasks(tmp_path, monkeypatch):
    """A file of questions here. Without the bundled tasks: reading their 14,000 files takes 5 to 20 seconds."""
    from lit_llm.callbacks import lm_eval_tasks

    inner = lm_eval_tasks.TaskManager
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", lambda include_defaults: inner(include_defaults=False))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "quiz.jsonl")


@pytest.mark.parametrize("case", REFUSED)
def test_a_task_that_cannot_be_scored_is_refused_before_the_first_step(case, tmp_path, monkeypatch):
    name, changes, said = REFUSED[case]
    task = {key: value for key, value in (TASK | changes).items() if value is not None}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
    module = Asked()
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("the network is used"))
    with pytest.raises(ValueError, match=said):
        fit([TaskScores([name])], tmp_path, module=module)
    assert module.seen == []


def test_loading_and_scoring_leave_the_random_state_alone_and_repeat_their_examples(tmp_path, capfd):
    shown = TASK | {"num_fewshot": 2, "fewshot_split": "test", "fewshot_delimiter": "."}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(shown))

    def run(*callbacks):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        _, module, rows = fit(list(callbacks), tmp_path, module=Asked(lr=0.0))
        return module.seen, torch.rand(3).tolist(), np.random.rand(), random.random(), rows

    *without, _ = run()
    capfd.readouterr()
    *scored, rows = run(TaskScores(["mine.yaml"], every_n_steps=4))
    assert scored == without
    assert rows[4] == rows[8] and rows[4].keys() == {"task/mine/acc", "task/mine/acc_norm"}, "the rate is 0, so is the change"
    assert "it/s]" not in capfd.readouterr().err, "no bars of other packages"
