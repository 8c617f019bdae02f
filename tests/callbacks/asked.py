"""A module whose log-likelihoods have a formula, and files of questions for it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from foreign import VOCAB, Foreign

LETTERS = " abcdefghi."  # id → character
QUESTIONS = [
    {"query": "abc", "choices": ["a", "bad", "cab ", "i.i"], "gold": 1},
    {"query": "a fig ", "choices": ["face", "bed"], "gold": 0},
    {"query": "", "choices": ["hi.", "hedge", "big"], "gold": 2},
    {"query": "egg", "choices": ["a", "b", "c", "d", "e"], "gold": 4},
    {"query": "a bad cabbage did ", "choices": ["hide", "ahead a he"], "gold": 1},
]


class Letters:
    """One id per character."""

    eos_id = VOCAB - 1

    def __init__(self, prefix: list[int] | None = None) -> None:
        self.prefix_token_ids = prefix or []
        self.bos_id = prefix[0] if prefix else None

    def encode(self, text: str) -> np.ndarray:
        return np.array([LETTERS.index(c) for c in text], dtype=np.int64)

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids)


class Asked(Foreign):
    """Predicts the next token from the current one, so a text's log-likelihood is a sum over pairs of letters."""

    context_length = 12

    def __init__(self, prefix: list[int] | None = None, **kwargs) -> None:
        super().__init__(**kwargs)
        self.tokenizer = Letters(prefix)
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled() and ids.shape[1] <= self.context_length
        self.asked.append((self.trainer.global_step, tuple(ids.shape)))
        return self.head(self.embed(ids))

    def log_probabilities(self) -> np.ndarray:
        """(V, V) float64: row i has those of the id after i."""
        logits = (self.embed.weight.double() @ self.head.weight.double().T + self.head.bias.double()).detach().numpy()
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def expected(module: Asked, questions: list[dict] = QUESTIONS) -> dict[str, float]:
    """The scores of the questions by the formula: of a long text, the last 12 pairs of letters are read."""
    table = module.log_probabilities()
    right = normed = nats = size = 0.0
    for question in questions:
        values = []
        for choice in question["choices"]:
            text = [LETTERS.index(c) for c in question["query"] + " " + choice]
            text = text if question["query"] else [VOCAB - 1, *text]
            new = 1 + len(choice) + len(question["query"]) - len(question["query"].rstrip())
            steps = list(pairwise(text))[-min(new, 12) :]
            values.append(sum(table[a, b] for a, b in steps))
        lengths = [len(choice) for choice in question["choices"]]
        gold = question["gold"]
        right += values[gold] == max(values)
        normed += values[gold] / lengths[gold] == max(v / n for v, n in zip(values, lengths, strict=True))
        nats -= values[gold]
        size += lengths[gold]
    return {"acc": right / len(questions), "acc_norm": normed / len(questions), "bits_per_byte": nats / size / np.log(2)}


def write(path: Path, questions: list[dict] = QUESTIONS) -> str:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return str(path)


def alone(module: Asked) -> SimpleNamespace:
    """A Trainer of one process, as far as scoring needs one."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda tensor, reduce_op: tensor)
    module._trainer = trainer = SimpleNamespace(strategy=strategy, global_rank=0, world_size=1, global_step=0)
    return trainer
