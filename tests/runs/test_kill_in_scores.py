"""SIGKILL in the middle of an evaluation of tasks."""

import json
import signal
import sys
from pathlib import Path

import fork_server
import pytest
from recipe_runs import TEXT, curve, run

pytestmark = pytest.mark.slow

KILLED = """
import os, signal, sys
from lit_llm.__main__ import main
from lit_llm.training.language_model import LanguageModel

inner = LanguageModel.forward

def forward(self, input_ids):
    logits = inner(self, input_ids)
    if self.trainer.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return logits

LanguageModel.forward = forward
main(sys.argv[1:])
"""


def test_a_run_killed_while_tasks_are_scored_equals_the_uninterrupted_run(folder, capsys):
    words = TEXT.split()
    questions = [{"query": words[i], "choices": words[i + 1 : i + 4], "gold": i % 3} for i in range(20)]
    Path("quiz.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    flags = ["--tasks", "TaskScores", "--tasks.tasks", '["quiz.jsonl"]', "--tasks.every_n_steps", "2", "--model.dropout", "0.1"]
    fit = ["fit", "--config", "tiny.yaml", *flags, "--checkpoint.every_n_steps", "1"]
    code, _, err = run(capsys, *fit, "--run_dir", "runs/straight")
    assert code == 0, err
    done = fork_server.run([sys.executable, "-c", KILLED, *fit, "--run_dir", "runs/killed"], capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    straight, killed = Path("runs/straight"), Path("runs/killed")
    assert list(curve(killed, "task/quiz/acc")) == [2]
    code, out, _ = run(capsys, "fit", "--run", "runs/killed", "--resume", "auto")
    assert code == 0 and "resume: from step 3" in out
    for name in ("train/loss", "val/loss", "grad/norm", "task/quiz/acc", "task/quiz/acc_norm", "task/quiz/bits_per_byte"):
        assert curve(killed, name) == curve(straight, name), name
    assert list(curve(killed, "task/quiz/acc")) == [2, 4, 6, 8]
