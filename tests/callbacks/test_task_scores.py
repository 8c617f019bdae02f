import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from asked import QUESTIONS, Asked, Letters, alone, expected, write
from foreign import Foreign, fit
from lightning.pytorch import Callback, Trainer
from missing_package import hide

from lit_llm.callbacks import EMA, StepCheckpoint, StopOnSignal, TaskScores
from lit_llm.callbacks.log_likelihoods import LogLikelihoods
from lit_llm.callbacks.multiple_choice import read_questions


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "quiz.jsonl")


def rows_of(rows, name="quiz"):
    return {
        step: {k.rpartition("/")[2]: v for k, v in row.items() if k.startswith(f"task/{name}/")} for step, row in rows.items()
    }


def test_scores_are_those_of_the_formula_at_due_steps_and_at_the_end(tmp_path, file):
    found = {}

    class Formula(Callback):  # after TaskScores: the weights are the same
        def on_train_batch_end(self, trainer, pl_module, *args):
            found[trainer.global_step] = expected(pl_module)

    module = Asked()
    trainer, _, rows = fit([TaskScores([file], every_n_steps=3, batch_size=2), Formula()], tmp_path, module=module)
    assert list(rows_of(rows)) == [3, 6, 8]
    for step, row in rows_of(rows).items():
        assert row == pytest.approx(found[step], rel=1e-5), step
    assert trainer.callback_metrics["task/quiz/acc"] == pytest.approx(rows[8]["task/quiz/acc"])
    assert all(batch <= 2 for _, (batch, _) in module.asked)


@pytest.mark.parametrize("validate", [True, False])
def test_with_an_average_of_the_weights_the_scores_are_those_that_validation_measures(tmp_path, file, validate):
    ema = EMA(decay=0.9, validate=validate)
    _, module, rows = fit([ema, TaskScores([file])], tmp_path, module=Asked())
    weights = expected(module)
    state = {**module.state_dict(), **ema.by_name(module)}
    module.load_state_dict(state)
    average = expected(module)
    assert average["bits_per_byte"] != pytest.approx(weights["bits_per_byte"], rel=1e-3)
    assert rows_of(rows)[8] == pytest.approx(average if validate else weights, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_an_interval_only_the_final_model_is_scored(tmp_path, file, accumulate):
    _, module, rows = fit([TaskScores([file])], tmp_path, module=Asked(), accumulate_grad_batches=accumulate)
    assert list(rows) == [8] and {step for step, _ in module.asked} == {8}
    _, _, rows = fit([TaskScores([file], 3, at_end=False, limit=2)], tmp_path, module=(module := Asked()))
    assert list(rows) == [3, 6]
    assert max(step for step, _ in module.asked) == 6


def test_a_run_that_ends_before_its_last_step_is_scored_at_its_end_unless_a_signal_ends_it(tmp_path, file):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.should_stop = trainer.global_step == 5

    _, _, rows = fit([TaskScores([file], 3), Stop()], tmp_path, module=Asked())
    assert list(rows) == [3, 5]
    signals = StopOnSignal()
    with mock.patch.object(StopOnSignal, "on_train_start", lambda self, *args: setattr(self, "stopped_by", "SIGTERM")):
        _, _, rows = fit([TaskScores([file], 3), Stop(), signals], tmp_path, module=Asked())
    assert list(rows) == [3]


@pytest.mark.parametrize("every", [2, 5])
def test_a_score_at_the_end_of_training_makes_that_step_the_best(tmp_path, file, every):
    """It is made after the last step, which may be saved already. The metric is that of the second of two callbacks."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.should_stop = trainer.global_step == 5

    tasks = [TaskScores([write(tmp_path / "other.jsonl")], 3, at_end=False), TaskScores([file])]
    checkpoint = StepCheckpoint(every, monitor="task/quiz/bits_per_byte")
    _, _, rows = fit([*tasks, Stop(), checkpoint], tmp_path, module=Asked())
    assert Path(checkpoint.best_model_path).name == "step-00000005.ckpt"
    assert float(checkpoint.best_model_score) == pytest.approx(rows[5]["task/quiz/bits_per_byte"])


def test_the_best_may_wait_for_a_score_of_lm_eval_which_a_sanity_check_does_not_have(tmp_path, recwarn):
    tasks, checkpoint = TaskScores(["mine"], 3), StepCheckpoint(4, monitor="task/mine/acc", mode="max")
    tasks._lm_eval = SimpleNamespace(check=lambda scorer: ["mine/acc"], scores=lambda scorer: {"mine/acc": 0.5})
    fit([tasks, checkpoint], tmp_path, module=Asked(), num_sanity_val_steps=1, limit_val_batches=1)
    assert Path(checkpoint.best_model_path).name == "step-00000003.ckpt"
    assert not [each for each in recwarn if "StepCheckpoint monitors" in str(each.message)]


def test_training_is_bit_identical_with_and_without(tmp_path, file):
    def losses(*callbacks):
        class Random(Asked):
            def training_step(self, batch, batch_idx):  # reads all three generators
                noise = torch.rand(1).item() + np.random.rand() + random.random()
                return super().training_step(batch, batch_idx) * noise

            def forward(self, ids):
                torch.rand(1), np.random.rand(), random.random()
                return super().forward(ids)

        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        module = Random()
        module.drop.p = 0.5
        module.head.eval()  # frozen on purpose
        torch.manual_seed(1)
        fit(list(callbacks), tmp_path, module=module)
        assert not module.head.training and module.embed.training and module.training
        return module.seen, [p.tolist() for p in module.parameters()]

    assert losses() == losses(TaskScores([file], every_n_steps=1))


def test_a_run_killed_in_an_evaluation_continues_as_if_it_had_not_been(tmp_path, file):
    class Killed(Asked):
        def forward(self, ids):
            if self.trainer.global_step == 6:
                raise KeyError("killed")
            return super().forward(ids)

    def callbacks():
        return [TaskScores([file], every_n_steps=3), StepCheckpoint(3, monitor=None)]

    _, straight, wanted = fit(callbacks(), tmp_path / "straight", module=Asked())
    with pytest.raises(KeyError, match="killed"):
        fit(callbacks(), tmp_path / "killed", module=Killed())
    _, resumed, rows = fit(callbacks(), tmp_path / "killed", module=Asked(), resume=tmp_path / "killed/checkpoints/last.ckpt")
    assert resumed.seen == straight.seen[3:] and list(rows) == [6, 8]
    assert rows == {step: wanted[step] for step in (6, 8)}


def test_a_finished_run_is_not_scored_again_and_validate_scores_any(tmp_path, file, capsys):
    callbacks = [TaskScores([file], every_n_steps=3), StepCheckpoint(8, monitor=None)]
    _, module, rows = fit(callbacks, tmp_path, module=Asked())
    _, _, again = fit([TaskScores([file], 3)], tmp_path, module=Asked(), resume=tmp_path / "checkpoints/last.ckpt")
    assert again == {}
    capsys.readouterr()
    trainer = Trainer(callbacks=[TaskScores([file])], accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(module, verbose=False)
    assert trainer.callback_metrics["task/quiz/bits_per_byte"] == pytest.approx(rows[8]["task/quiz/bits_per_byte"])
    out = capsys.readouterr().out
    assert "tasks (0s)\n  quiz  acc " in out and "bits_per_byte " in out


# -- what is scored -----------------------------------------------------------------------------------------------------


def scorer(module, batch_size=16):
    module.eval()
    return LogLikelihoods(alone(module), module, batch_size)


def test_white_space_before_a_continuation_belongs_to_it():
    plain, started = scorer(Asked()), scorer(Asked(prefix=[7]))
    for found, context, continuation, pair in [
        (plain, "a b  ", "c", ([1, 0, 2], [0, 0, 3])),
        (plain, "", " c", ([10], [0, 3])),
        (plain, "", ".c", ([10], [3])),  # a text begins after the last one
        (started, "a", " b", ([7, 1], [0, 2])),
        (started, "", "b", ([7], [2])),
        (started, "  ", "b", ([7], [0, 0, 2])),
        (started, "ga", " b", ([7, 1], [0, 2])),  # the text says the start itself
    ]:
        assert found.pair("", context, continuation) == pair


def test_batches_padding_and_truncation_do_not_change_a_score():
    torch.manual_seed(3)
    module = Asked()
    pairs = [([1, 2], [3, 4, 5]), ([1], [2]), ([5] * 30, [6, 7]), ([1, 2], [3, 4, 9]), ([4], [8] * 12)]
    table = module.log_probabilities()
    wanted = []
    for context, continuation in pairs:
        kept = [*context, *continuation][-13:]
        steps = list(pairwise(kept))[len(kept) - 1 - len(continuation) :]
        greedy = all(table[a].argmax() == b for a, b in steps)
        wanted.append((sum(table[a, b] for a, b in steps), greedy))
    with torch.no_grad():
        for batch_size in (1, 2, 16):
            found = scorer(module, batch_size).score(pairs)
            assert [score.log_likelihood for score in found] == pytest.approx([value for value, _ in wanted], rel=1e-5)
            assert [score.is_greedy for score in found] == [greedy for _, greedy in wanted]
    likeliest = [9]
    for _ in range(3):
        likeliest.append(int(table[likeliest[-1]].argmax()))
    with torch.no_grad():
        assert scorer(module).score([(likeliest[:1], likeliest[1:])])[0].is_greedy


# -- what is refused ----------------------------------------------------------------------------------------------------


class Joined(Letters):
    """As `Letters`, and without word splitting: "d a" is one token."""

    def encode(self, text):
        return super().encode(text.replace("d a", "i"))


@pytest.mark.parametrize(
    ("query", "choices", "named"),
    [
        ("bad", ["b", "a"], "' a' has no token of its own"),
        ("  ", ["a", "b"], "' a' follows no token"),
        ("bad", ["b", "i" * 12], f"' {'i' * 12}' has 13 tokens, but the model reads 12"),
    ],
)
def test_a_choice_without_a_token_to_score_is_refused_before_the_first_step(tmp_path, query, choices, named):
    """lm_eval asserts these: a sum over no token would be the best score there is."""
    module = Asked()
    module.tokenizer = Joined()
    file = write(tmp_path / "quiz.jsonl", [*QUESTIONS[:2], {"query": query, "choices": choices, "gold": 0}])
    with pytest.raises(ValueError, match=f"task quiz, row 3: {named}"):
        fit([TaskScores([file])], tmp_path, module=module)
    assert module.seen == [] and module.asked == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no questions"),
        ("{", "line 1 is not JSON"),
        ("[1]", 'line 1 is not a question: it needs "query"'),
        ('{"query": "a", "choices": ["b", "c"], "gold": "0"}', "line 1 is not a question"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "line 1 is not a question"),
        ('\n{"query": "a", "choices": ["b"], "gold": 0}', 'line 2: "choices" must be at least two texts'),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "texts that are not empty"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', '"gold" is 2, but must be the index of a choice, from 0 to 1'),
    ],
)
def test_a_file_that_has_no_questions_is_refused_with_its_line(tmp_path, content, said):
    (tmp_path / "q.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at_end": False}, "never scored"),
        ({"tasks": []}, r"TaskScores\(tasks\) is empty"),
    ],
)
def test_settings_that_score_nothing_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        TaskScores(**{"tasks": ["a.jsonl"], **options})


@pytest.mark.parametrize(
    ("module", "tasks", "said"),
    [
        (
            Foreign,
            ["quiz.jsonl"],
            "TaskScores needs a tokenizer and a context_length of the module, which Foreign does not have",
        ),
        (Asked, ["missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (Asked, ["quiz.jsonl", "other/quiz.jsonl"], "two tasks have the name quiz"),
        (Asked, ["arc_easy"], "arc_easy: tasks other than .jsonl files need the package lm-eval: pip install lm-eval"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_the_first_step(tmp_path, file, monkeypatch, module, tasks, said):
    hide("lm_eval", monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    write(tmp_path / "other/quiz.jsonl")
    module = module()
    with pytest.raises(ValueError, match=said):
        fit([TaskScores(tasks)], tmp_path, module=module)
    assert module.seen == []
