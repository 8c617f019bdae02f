"""Scores while training are those of `lm_eval --model hf` on the exported model, question by question."""

import json

import pytest
import yaml
from recipe_runs import RECIPE, TEXT, curve

from lit_llm.__main__ import main
from lit_llm.callbacks.log_likelihoods import LogLikelihoods

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

WORDS = TEXT.split()
FILE = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}}, "test_split": "test"}
CHOICE = {"output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "gold"}
ACCURACIES = [{"metric": metric} for metric in ("acc", "acc_norm", "acc_bytes")]
# Longer than the model's context, and without periods: where the same tokens are split at two places, the cache of logits of
# `lm_eval --model hf` (its logits_cache) takes those of other positions for one of them.
TEXT_OF = "{{query}}, {{choices | join(' or ')}}; {{gold}} of {{choices | length}} is {{choices[gold]}}! {{query | upper}}"
TASKS = {
    "choice": {**CHOICE, "metric_list": ACCURACIES},
    "shown": {**CHOICE, "metric_list": ACCURACIES, "fewshot_split": "test", "num_fewshot": 2, "description": "Lines:\n"},
    "text": {
        **{"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": TEXT_OF},
        "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "answer": {
        **{"output_type": "generate_until", "doc_to_text": "{{query}}", "doc_to_target": "{{choices[gold]}}"},
        "generation_kwargs": {"until": ["\n", "7"], "max_gen_toks": 9},
        "metric_list": [{"metric": "exact_match"}],
    },
}
QUESTIONS = [
    {"query": " ".join(WORDS[i : i + 2 + i % 4]), "choices": [WORDS[i + 5], f"{WORDS[3 * i]} é", WORDS[i + 9]], "gold": i % 3}
    for i in range(1, 25)
]
RUNS = {
    "bytes": ["--data.tokenizer", "Bytes"],
    "bpe": [
        *("--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "300", "--model.mask_documents", "true"),
        *("--model.mlp", "swiglu", "--model.tie_embeddings", "true"),
    ],
}


def record(monkeypatch, owner, name, request, found):
    """Store what a method finds for each pair of contexts and continuations, in ids."""
    inner = getattr(owner, name)

    def method(self, requests, *args, **kwargs):
        scores = inner(self, requests, *args, **kwargs)
        for each, score in zip(requests, scores, strict=True):
            found[tuple(map(tuple, request(each)))] = score
        return scores

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("kind", RUNS)
def test_every_log_likelihood_and_score_equals_lm_eval_on_the_exported_model(kind, tmp_path, monkeypatch, capsys):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    files = []
    for name, task in TASKS.items():
        files.append(f"{name}.yaml")
        (tmp_path / files[-1]).write_text(yaml.safe_dump({"task": name, **FILE, **task}))
    ours, theirs = {}, {}
    record(monkeypatch, LogLikelihoods, "score", lambda pair: pair, ours)
    record(monkeypatch, HFLM, "_loglikelihood_tokens", lambda request: request[1:], theirs)
    size = ["--model.n_embd", "32", "--model.block_size", "32", "--schedule.total_steps", "40", "--trainer.max_steps", "40"]
    scored = ["--tasks", "TaskScores", "--tasks.tasks", json.dumps(["quiz.jsonl", *files]), "--tasks.batch_size", "5"]
    flags = [*size, *RUNS[kind], *scored, "--optimizer.lr", "0.02", "--trainer.log_every_n_steps", "40"]
    assert main(["fit", "--config", "tiny.yaml", "--run_dir", "run", *flags]) == 0, capsys.readouterr().err
    assert main(["export", "--run", "run", "--out", "exported"]) == 0
    model = HFLM(pretrained="exported", dtype="float32", device="cpu", batch_size=7)
    manager = TaskManager(include_defaults=False)
    results = lm_eval.simple_evaluate(model, tasks=files, task_manager=manager, bootstrap_iters=0, num_fewshot=None)["results"]
    assert len(theirs) > 4 * len(QUESTIONS) and theirs.keys() <= ours.keys()
    for pair, (log_likelihood, is_greedy) in theirs.items():
        assert ours[pair].log_likelihood == pytest.approx(log_likelihood, rel=1e-5, abs=1e-4), pair
        assert ours[pair].is_greedy == is_greedy
    names = [f"{task}/{metric['metric']}" for task, settings in TASKS.items() for metric in settings["metric_list"]]
    assert len(names) == 10
    for name in names:
        task, metric = name.split("/")
        assert curve(tmp_path / "run", f"task/{name}")[40] == pytest.approx(results[task][f"{metric},none"], rel=1e-5), name
    for metric in ("acc", "acc_norm"):  # the file itself, with no package
        assert curve(tmp_path / "run", f"task/quiz/{metric}")[40] == pytest.approx(results["choice"][f"{metric},none"])
    assert 0 < results["choice"]["acc,none"] < 1, "some are right, and some are wrong"
