"""Distillation: a student learns from the text, and from probabilities of a teacher, which `prepare` wrote beside the data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_llm.core.number_domain import at_least, range_problems
from lit_llm.data.teacher import TeacherInfo
from lit_llm.data.token_shards import ShardDataModule
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import CustomModel
from lit_llm.models.distillation_loss import TeacherLogits
from lit_llm.models.gpt import GPT, LossFunction
from lit_llm.models.loss import LossConfig, chunked_cross_entropy
from lit_llm.training.objective import CrossEntropy


class Distillation(CrossEntropy):
    """Cross-entropy, mixed with the divergence from a teacher: (1 - weight) · nll + weight · τ² · KL(teacher ‖ student).

    `prepare --teacher` writes the teacher's top k probabilities at temperature τ. `lit_llm.models.distillation_loss` has the
    formulas. Logs train/kl, in nats per token. train/loss and val/loss are the cross-entropy
    alone; validation has no teacher.

    Args:
        weight: weight of the KL divergence, from 0 to 1. With 1, the cross-entropy has no weight.
    """

    needs_gpt = True
    loss_head = "with a teacher"

    def __init__(self, weight: Annotated[float, at_least(0, 1)] = 0.5) -> None:
        self.weight = weight
        self.teacher: TeacherInfo | None = None

    def use(self, data: Any, stage: str) -> None:
        super().use(data, stage)
        if stage == "fit":
            self.teacher = data.find_teachers()

    def means(self, model: GPTConfig) -> tuple[str, ...]:
        return ("kl",)

    def problems(self, parts: Mapping[str, Any]) -> list[str]:
        problems = range_problems(Distillation, "objective", vars(self))
        model, loss, data = (parts.get(group) for group in ("model", "loss", "data"))
        if model is not None and model.predict_ahead:
            problems.append("a teacher says nothing about tokens further ahead (--model.predict_ahead 0)")
        if loss is not None and loss.z_loss:
            problems.append("distillation has no z-loss (--loss.z_loss 0)")
        if data is not None and not isinstance(data, ShardDataModule):
            problems.append(f"{type(data).__name__} has no teacher: prepare --teacher RUN --out DIR, then --data TokenShards")
        return problems

    def function(self, batch: Mapping[str, Tensor], loss: LossConfig, model: GPT | CustomModel) -> LossFunction:
        if self.teacher is None or "teacher_ids" not in batch:
            return super().function(batch, loss, model)
        assert isinstance(model, GPT), "`needs_gpt`"
        ids, logp = (model.own_positions(batch[name], 0) for name in ("teacher_ids", "teacher_logp"))
        teacher = TeacherLogits(ids, logp.view(torch.float16), self.teacher.temperature, self.weight)
        rows = loss.chunk_size or batch["targets"].numel()
        return partial(chunked_cross_entropy, teacher=teacher, by_row="sources" in batch, chunk_size=rows)
