"""Multiple-choice questions in a file, and the scores of their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .errors import UserError
from .files import read_text


class Question(NamedTuple):
    """Record of a question: the text `query`, its possible answers `choices`, and `gold`, the index of the right answer."""

    query: str
    choices: list[str]
    gold: int

    def pairs(self) -> list[tuple[str, str]]:
        """(context, continuation) for each possible answer: the query, and the answer after a space."""
        return [(self.query, f" {choice}") for choice in self.choices]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a JSONL file: `{"query": "…", "choices": ["…", "…"], "gold": 0}` on each line.

    Args:
        limit: read only this many questions, the first ones. None: all.

    Raises:
        UserError: the file cannot be read, or a line is not a question.
    """
    lines = read_text(path, mend=".").split("\n")
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            questions.append(_question(line, f"{path}, line {number}"))
        if len(questions) == limit:
            break
    if not questions:
        raise UserError(f"{path} has no questions.")
    return questions


def _question(line: str, place: str) -> Question:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {getattr(error, 'msg', error)}.") from None
    query, choices, gold = (value.get(name) for name in Question._fields) if isinstance(value, dict) else (None,) * 3
    if not (isinstance(query, str) and isinstance(choices, list) and type(gold) is int):
        raise UserError(
            f'{place} is not a question: it needs "query" (text), "choices" (a list of texts) and "gold" (the index of the '
            "right one)."
        )
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise UserError(f'{place}: "choices" must be at least two texts that are not empty.')
    if not 0 <= gold < len(choices):
        raise UserError(f'{place}: "gold" is {gold}, but must be the index of a choice, from 0 to {len(choices) - 1}.')
    return Question(query, choices, gold)


def scores(questions: Sequence[Question], log_likelihoods: Sequence[Sequence[float]]) -> dict[str, float]:
    """Scores of a file's questions, from the log-likelihood in nats of each choice of each question.

    Returns:
        `acc`: share of questions whose most likely choice is right. `acc_norm`: this share with log-likelihoods divided by
        the choice's number of characters, as in lm_eval. `bits_per_byte`: -log2 of the likelihood of all right choices,
        divided by their bytes; this score falls smoothly even while the accuracies are no better than chance.
    """
    right = right_norm = nats = size = 0.0
    for question, values in zip(questions, log_likelihoods, strict=True):
        per_character = [value / len(choice) for value, choice in zip(values, question.choices, strict=True)]
        right += int(np.argmax(values)) == question.gold
        right_norm += int(np.argmax(per_character)) == question.gold
        nats -= values[question.gold]
        size += len(question.choices[question.gold].encode())
    count = len(questions)
    return {"acc": right / count, "acc_norm": right_norm / count, "bits_per_byte": nats / size / math.log(2)}
