"""From conversations to a model that answers in the form of the template, also in transformers."""

from __future__ import annotations

import json

import pytest
import torch
from ingest import chat_templates
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.models.gpt import KVCache
from lit_llm.runs.loaded_run import LoadedRun
from lit_llm.runs.saved_run import SavedRun

CAPITALS = {"Norway": "Oslo", "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Japan": "Tokyo"}
ASKED = ["What is the capital of {}?", "Name the capital of {}.", "Tell me the capital of {}", "capital of {}?"]
QUESTION = {"role": "user", "content": "What is the capital of Japan?"}


def run(*words):
    assert main([str(word) for word in words]) == 0


# In Zephyr's, a turn ends with the id that also ends documents.
ENDS = {"chatml": ("<|endoftext|>", "<|im_end|>"), "zephyr": ("</s>", "</s>")}


@pytest.fixture(scope="module", params=["chatml", pytest.param("zephyr", marks=pytest.mark.soak)])
def project(request, tmp_path_factory):
    """A small model of transformers, and conversations."""
    folder = tmp_path_factory.mktemp("project")
    model = folder / "their-model"
    eos, end_of_turn = ENDS[request.param]
    chat_templates.write_tokenizer(request.param, model)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), eos_token=eos)
    tokenizer.save_pretrained(model)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.convert_tokens_to_ids(eos)}
    config = LlamaConfig(**size, vocab_size=len(tokenizer), max_position_embeddings=128, **ids)
    LlamaForCausalLM(config).save_pretrained(model)
    (model / "chat_template.jinja").write_text(chat_templates.unmarked(request.param))
    turns = [
        [{"role": "user", "content": asked.format(country)}, {"role": "assistant", "content": f"It is {city}."}]
        for country, city in CAPITALS.items()
        for asked in ASKED
    ]
    for name, some in (("train", turns * 4), ("val", turns[::5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in some))
    return folder, end_of_turn


@pytest.mark.slow
def test_chats_become_a_model_that_answers_here_and_in_transformers(project, monkeypatch, capsys):
    folder, end_of_turn = project
    monkeypatch.chdir(folder)
    run("import", "--from", "their-model", "--out", "runs/base")
    read_by = ["--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "runs/base"]
    files = ["--data.train", "train.jsonl", "--data.val", "val.jsonl"]
    run("prepare", "--chat_template", "auto", *files, *read_by, "--out", "chats")
    short = [
        "--data.block_size",
        "128",
        "--data.micro_batch_size",
        "2",
        "--data.global_batch_size",
        "4",
        "--optimizer.lr",
        "5e-3",
    ]
    short += ["--trainer.max_steps", "80", "--schedule.warmup_steps", "10", "--trainer.precision", "32-true"]
    short += ["--checkpoint.every_n_steps", "40", "--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", "1"]
    fit = ["fit", "--config", "sft", "--init_from", "runs/base", "--data.path", "chats", *short]
    run(*fit)

    losses = {row.step: row.loss for row in LoadedRun(folder / "runs/sft", of_lit_llm=False).curve.rows}
    # ln 1502 = 7.3; only answers count, and they follow from the questions.
    assert losses[1] > 6 and losses[80] < 0.2
    run("fit", "--run", "runs/sft", "--resume", "runs/sft/checkpoints/step-00000040.ckpt", "--run_dir", "runs/again")
    weights = [read(folder / name / "checkpoints/last.ckpt")["state_dict"] for name in ("runs/sft", "runs/again")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    capsys.readouterr()
    for country, city in CAPITALS.items():
        asked = ASKED[0].format(country)
        run("generate", "--run", "runs/sft", "--chat", "--prompt", asked, "--temperature", "0")
        assert capsys.readouterr().out == f"It is {city}.\n"  # the whole answer, and nothing after the end of the turn
    assert (
        SavedRun.read(folder / "runs/sft/checkpoints/last.ckpt").prompt_start == []
    )  # conversations begin as the template says

    run("export", "--run", "runs/sft", "--out", "answers-hf")
    theirs, tokenizer = (kind.from_pretrained("answers-hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = theirs.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == f"It is Tokyo.{end_of_turn}"
    ours = load_model(folder / "runs/sft/checkpoints/last.ckpt", "cpu")
    with torch.no_grad():
        logits = ours(prompt["input_ids"], cache=KVCache(ours.config))
        torch.testing.assert_close(logits, theirs(**prompt).logits, rtol=1e-4, atol=1e-4)
