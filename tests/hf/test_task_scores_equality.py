"""Scores while training are those of `lm_eval --model hf` on the exported model, question by question."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from ingest import chat_templates
from recipe_runs import RECIPE, TEXT, curve, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lit_llm.callbacks.log_likelihoods import LogLikelihoods

WORDS = TEXT.split()
FILE = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}}, "test_split": "test"}
CHOICE = {"output_type": "multiple_choice", "doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "gold"}
ANSWER = {"output_type": "generate_until", "doc_to_text": "{{query}}", "doc_to_target": "{{choices[gold]}}"}
ACCURACIES = [{"metric": metric} for metric in ("acc", "acc_norm", "acc_bytes")]
ACCURACY, EXACT = ACCURACIES[:1], [{"metric": "exact_match"}]
# Longer than the model's context.
TEXT_OF = "{{query}}. {{choices | join(' or ')}}; {{gold}} of {{choices | length}} is {{choices[gold]}}! {{query | upper}}."
ASKED = "<|im_start|>user\n{{query}}<|im_end|>\n<|im_start|>assistant\n"
TASKS = {
    "choice": {**CHOICE, "metric_list": ACCURACIES},
    "shown": {**CHOICE, "metric_list": ACCURACIES, "fewshot_split": "test", "num_fewshot": 2, "description": "Lines:\n"},
    # Each choice is also scored without a context.
    "alone": {**CHOICE, "metric_list": [*ACCURACY, {"metric": "acc_mutual_info"}]},
    "glued": {**CHOICE, "metric_list": ACCURACY, "doc_to_text": "<s>{{query}}  ", "target_delimiter": ""},
    "likely": {
        **{"output_type": "loglikelihood", "doc_to_text": ASKED, "doc_to_target": "{{choices[gold]}}<|im_end|>"},
        **{"target_delimiter": "", "metric_list": ACCURACY},
    },
    "text": {
        **{"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": TEXT_OF},
        "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "answer": {**ANSWER, "metric_list": EXACT, "generation_kwargs": {"until": ["\n", "7"], "max_gen_toks": 9}},
    "ended": {**ANSWER, "metric_list": EXACT, "doc_to_text": ASKED, "generation_kwargs": {"until": [], "max_gen_toks": 9}},
}
QUESTIONS = [
    {"query": " ".join(WORDS[i : i + 2 + i % 4]), "choices": [WORDS[i + 5], f"{WORDS[3 * i]} é", WORDS[i + 9]], "gold": i % 3}
    for i in range(1, 25)
]
SPECIAL = {  # of imported tokenizers, as in LLaMA, Qwen and GPT-2; the last ends texts
    "bos": ["<s>", "</s>"],
    "chat": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "joined": ["<|endoftext|>"],
}
IMPORTED = ["--init_from", "runs/base"]
RUNS = {
    "own": [
        *("--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "300", "--model.mask_documents", "true"),
        *("--model.mlp", "swiglu", "--model.tie_embeddings", "true"),
    ],
    "bos": [*IMPORTED, "--data.tokenizer.bos_token", "<s>"],
    "chat": IMPORTED,
    "chat-documents": IMPORTED,  # a chat model that is tuned on plain text
    "joined": IMPORTED,
}


MERGES = [("t", "Ġ"), ("s", "Ġ"), ("f", "Ġ"), (",", "Ġ"), ("y", "Ġ"), ("yĠ", "n")]
"""Of "joined": across words, as where no words are split."""


def write_model(kind, folder):
    """A random LLaMA of transformers with a byte-level BPE."""
    backend, special = Tokenizer(models.BPE()), SPECIAL[kind]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "joined")
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "joined":
        vocab = [*special, *sorted(alphabet), *map("".join, MERGES)]
        backend.model = models.BPE({token: i for i, token in enumerate(vocab)}, MERGES)
        backend.add_special_tokens(special)
    else:
        settings = {"vocab_size": 310, "special_tokens": special, "initial_alphabet": alphabet}
        backend.train_from_iterator([TEXT], trainers.BpeTrainer(**settings))
    if kind == "bos":
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    torch.manual_seed(0)
    ids = {"bos_token_id": 0 if kind == "bos" else None, "eos_token_id": len(special) - 1}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = LlamaConfig(**sizes, vocab_size=backend.get_vocab_size() + 6, max_position_embeddings=32, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1]}
    settings |= {"bos_token": "<s>"} if kind == "bos" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind == "chat":
        (folder / "chat_template.jinja").write_text(chat_templates.unmarked("chatml"))


def write_project(kind):
    """Everything in this folder; returns the flags of `fit`."""
    Path("text.txt").write_text(TEXT)
    Path("quiz.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    turns = [[{"role": "user", "content": q["query"]}, {"role": "assistant", "content": q["choices"][0]}] for q in QUESTIONS]
    for name, some in (("train", turns[2:]), ("val", turns[:2])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in some * 9))
    recipe = yaml.safe_load(RECIPE)
    recipe["model"] |= {"n_embd": 32, "block_size": 32}
    if kind != "own":
        write_model(kind.partition("-")[0], Path("theirs"))
        del recipe["model"]
    if kind == "chat":
        recipe["data"]["class_path"] = "ChatFiles"
        recipe["data"]["init_args"] |= {"paths": None, "train": "train.jsonl", "val": "val.jsonl"}
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe))
    return [*RUNS[kind], "--schedule.total_steps", "40", "--optimizer.lr", "0.02", "--trainer.log_every_n_steps", "40"]


def record(monkeypatch, owner, name, request, found):
    """Store what a method finds for each request, such as pairs of contexts and continuations in ids."""
    inner = getattr(owner, name)

    def method(self, requests, *args, **kwargs):
        results = inner(self, requests, *args, **kwargs)
        for each, result in zip(requests, results, strict=True):
            found[request(each)] = result
        return results

    monkeypatch.setattr(owner, name, method)


def task_files(tasks):
    for name, task in tasks.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **FILE, **task}))
    return [f"{name}.yaml" for name in tasks]


def ids_of(pair):
    return tuple(pair[-2]), tuple(pair[-1])


def test_a_file_of_questions_is_scored_with_the_tokens_of_the_exported_model(tmp_path, monkeypatch, capsys):
    """Without lm_eval: the expected value is that of transformers."""
    monkeypatch.chdir(tmp_path)
    flags = write_project("chat")
    questions = [{"query": query, "choices": ["line", "text"], "gold": 0} for query in ("", "<|im_start|>user\nof<|im_end|>")]
    Path("quiz.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    assert run(capsys, "import", "--from", "theirs", "--out", "runs/base")[0] == 0
    flags += ["--tasks", "TaskScores", "--tasks.tasks", '["quiz.jsonl"]', "--trainer.max_steps", "4"]
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "run", *flags)
    assert code == 0, err
    assert run(capsys, "export", "--run", "run", "--out", "exported")[0] == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained("exported"), AutoTokenizer.from_pretrained("exported")
    nats = 0.0
    for question in questions:
        context = tokenizer(question["query"])["input_ids"] or [tokenizer.eos_token_id]
        ids = torch.tensor([[*context, *tokenizer(" line")["input_ids"]]])
        loss = model(ids, labels=ids.where(torch.arange(ids.shape[1]) >= len(context), -100)).loss
        nats += float(loss) * (ids.shape[1] - len(context))
    expected = nats / (2 * len("line") * math.log(2))
    assert curve(tmp_path / "run", "task/quiz/bits_per_byte")[4] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_every_log_likelihood_answer_and_score_equals_lm_eval_on_the_exported_model(kind, tmp_path, monkeypatch, capsys):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from lit_llm.callbacks import lm_eval_tasks

    monkeypatch.chdir(tmp_path)
    flags, files = write_project(kind), task_files(TASKS)
    if kind != "own":
        assert run(capsys, "import", "--from", "theirs", "--out", "runs/base")[0] == 0
    ours, theirs, answers, their_answers = {}, {}, {}, {}
    record(monkeypatch, LogLikelihoods, "score", ids_of, ours)
    record(monkeypatch, HFLM, "_loglikelihood_tokens", ids_of, theirs)
    record(monkeypatch, lm_eval_tasks._Running, "generate_until", lambda request: request.args[0], answers)
    record(monkeypatch, HFLM, "generate_until", lambda request: request.args[0], their_answers)
    scored = ["--tasks", "TaskScores", "--tasks.tasks", json.dumps(["quiz.jsonl", *files]), "--tasks.batch_size", "5"]
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "run", *flags, *scored, "--trainer.max_steps", "40")
    assert code == 0, err
    assert run(capsys, "export", "--run", "run", "--out", "exported")[0] == 0
    # Several texts at once would begin with BOS if the first of them does not say it; a cache of logits may mix up positions.
    model = HFLM(pretrained="exported", dtype="float32", device="cpu", batch_size=1, logits_cache=False)
    manager = TaskManager(include_defaults=False)
    results = lm_eval.simple_evaluate(model, tasks=files, task_manager=manager, bootstrap_iters=0, num_fewshot=None)["results"]
    assert len(theirs) > 4 * len(QUESTIONS) and theirs.keys() <= ours.keys()
    for pair, (log_likelihood, is_greedy) in theirs.items():
        assert ours[pair].log_likelihood == pytest.approx(log_likelihood, rel=1e-5, abs=1e-4), pair
        assert ours[pair].is_greedy == is_greedy
    assert answers == their_answers and len(answers) > len(QUESTIONS)
    names = [f"{task}/{metric['metric']}" for task, settings in TASKS.items() for metric in settings["metric_list"]]
    assert len(names) == 15
    for name in names:
        task, metric = name.split("/")
        assert curve(tmp_path / "run", f"task/{name}")[40] == pytest.approx(results[task][f"{metric},none"], rel=1e-4), name
    for metric in ("acc", "acc_norm"):  # the file itself, with no package
        assert curve(tmp_path / "run", f"task/quiz/{metric}")[40] == pytest.approx(results["choice"][f"{metric},none"])
    assert 0 < results["choice"]["acc,none"] < 1, "some are right, and some are wrong"
    if kind == "chat":
        assert any(len(text) < 6 for text in answers.values()), "some answers end with their turn"
