"""Run folders of small random models that write text, without a training."""

from dataclasses import asdict
from pathlib import Path

import torch
from ingest import chat_templates

from lit_llm.checkpoint import disk_format
from lit_llm.ingest.chat import AUTO, ChatEncoder, ChatTemplate
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.tokenizers import Bytes, load_tokenizer

SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "zero_init_projections": False, "init_std": 0.5}


def save(run: Path, tokenizer, **settings) -> GPT:
    """A checkpoint of a random model."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZE | {"vocab_size": tokenizer.vocab_size, "block_size": 96} | settings)).eval()
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    (run / "checkpoints").mkdir(parents=True)
    disk_format.write({"state_dict": weights, "model_config": asdict(model.config)}, run / "checkpoints/last.ckpt")
    return model


def base_run(run: Path, **settings) -> GPT:
    """Of bytes, without a chat template."""
    for name, content in Bytes().files().items():
        run.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)
    return save(run, Bytes(), **settings)


def chat_run(run: Path, name: str = "qwen3", **settings) -> tuple[GPT, ChatEncoder]:
    """With a chat template."""
    chat_templates.write_tokenizer(name, run)
    (run / "chat_template.jinja").write_text(chat_templates.unmarked(name))
    tokenizer = load_tokenizer(run)
    return save(run, tokenizer, **settings), ChatEncoder(tokenizer, ChatTemplate.find(AUTO, run, tokenizer))
