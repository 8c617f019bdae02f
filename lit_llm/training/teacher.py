"""Computes a teacher's likeliest next ids for each position of the training shards, for the objective Distillation."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_llm.checkpoint.adapters import base_sha256
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.hardware import device_problem
from lit_llm.data import TokenDataModule, Tokenizer, TokenShards
from lit_llm.data.blocks import StreamBlocks
from lit_llm.data.teacher import TeacherInfo, TeacherWriter, info_path, read_info
from lit_llm.ingest.progress import ProgressLog
from lit_llm.models.gpt import GPT
from lit_llm.models.loss import CHUNK_SIZE, logits
from lit_llm.runs.init_from import InitialWeights


def teacher_problems(
    teacher: InitialWeights, data: TokenDataModule, tokenizer: Tokenizer | None, ids: int | None, top_k: int, device: str
) -> list[str]:
    """Why `teacher` cannot predict the data, one sentence each.

    Args:
        tokenizer: the data's tokenizer, or None.
        ids: vocabulary size of the data. None: not known yet, so `top_k` and the teacher's vocabulary are not checked.
        top_k: number of the teacher's likeliest ids to store at each position.
        device: the device of the teacher, such as cuda.
    """
    config, problems = teacher.model, list(filter(None, [teacher.tokenizer_problem(tokenizer)]))
    if teacher.architecture is not None:
        problems.append(f"a teacher must be lit_llm's GPT, not {teacher.architecture.class_path} (--teacher)")
    if ids is not None and top_k > ids:
        problems.append(f"top_k is {top_k}, but there are {ids} ids (--top_k {ids})")
    if ids is not None and config.vocab_size is not None and config.vocab_size < ids:  # the teacher may have more, as padding
        problems.append(f"the teacher has {config.vocab_size} ids, but the data have {ids}: prepare them for it")
    problems += filter(None, [device_problem(device)])
    if (data.block_size or 0) > config.block_size:
        problems.append(f"the teacher reads at most {config.block_size} tokens (--data.block_size {config.block_size})")
    return problems


def write_teacher(
    data: TokenShards, teacher: InitialWeights, *, top_k: int, temperature: float, device: str, replace: bool
) -> str:
    """Write the teacher's top ids for each position of the training shards, beside the shards; returns a line about the file.

    Block size, packing and micro-batch are the settings of `data`. Document masks and bf16 autocast: as in the teacher's run.

    Raises:
        UserError: Teacher and data do not fit; without `replace`, another teacher's file exists; the folder cannot be written.
    """
    data.setup("fit")
    stream, config, block_size = data.corpus.streams["train"], teacher.model, data.block_size
    assert block_size is not None
    problems = teacher_problems(teacher, data, data.tokenizer, data.vocab_size, top_k, device)
    if len({str(layout.path).rpartition("_")[0] for layout in stream.layouts}) > 1:
        problems.append("the shards are of several folders or names, and one teacher's file is for one: prepare each alone")
    if data.pairs:
        problems.append("pairs of answers have no teacher: prepare texts or conversations")
    refuse(problems)
    weights, tokens = base_sha256(teacher.checkpoint), stream.scan(data.vocab_size)
    info = TeacherInfo(weights, data.vocab_size, top_k, temperature, block_size, data.packing, tokens, {})
    path = info_path(stream)
    if (old := read_info(path)) is not None and not replace:
        if dataclasses.replace(old, files={}) == info:
            return f"teacher: {path} is there already"
        raise UserError(f"{path} is of another teacher, or of other settings: replace it with --replace true")
    refuse(data.opened.files.problems())
    model = load_model(teacher.checkpoint, device)
    assert isinstance(model, GPT)
    data.gives_documents = config.mask_documents
    blocks = data.blocks("train")
    assert isinstance(blocks, StreamBlocks)
    batch, narrow = data.micro_batch_size or 8, str(teacher.saved.settings.get("trainer.precision")).startswith("bf16")
    loss: Any = partial(_top, ids=data.vocab_size, top_k=top_k, temperature=temperature)
    size = block_size * stream.itemsize
    try:
        with (
            TeacherWriter(stream, info) as writer,
            ProgressLog().stage("Teacher", total=len(blocks) * size, unit="MB of tokens") as report,
        ):
            for first in range(0, len(blocks), batch):
                numbers = np.arange(first, min(first + batch, len(blocks)))
                read = {name: tensor.to(device) for name, tensor in blocks[numbers].items()}
                with torch.inference_mode(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=narrow):
                    given: Any = model(read["input_ids"], read["targets"], loss=loss, documents=read.get("documents"))
                for block, ids, logp in zip(numbers.tolist(), *(each.cpu().numpy() for each in given), strict=True):
                    at = 0
                    for start, length in blocks.pieces(block):
                        writer.write(start, ids[at : at + length], logp[at : at + length])
                        at += length
                report(len(numbers) * size, len(numbers) * size)
            writer.finish()
    except OSError as error:
        raise UserError(f"{path.parent} cannot be written: {error.strerror}. Mend it, and repeat the command.") from error
    megabytes = len(stream) * info.record.itemsize / 1e6
    return f"teacher: top {top_k} of {data.vocab_size:,} ids for {len(blocks):,} blocks of {block_size}, {megabytes:,.1f} MB"


def _top(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ids: int, top_k: int, temperature: float, shards: None, **head: Any
) -> tuple[Tensor, Tensor]:
    """Return the `top_k` likeliest ids (B, T, k), the likeliest first, and their log-probabilities. Used as a loss function."""
    head["vocab_size"] = ids
    chunks = (logits(rows, weight, **head) for rows in hidden.flatten(0, 1).split(CHUNK_SIZE))
    parts = [torch.log_softmax(z / temperature, dim=-1).topk(top_k) for z in chunks]
    logp, likeliest = (torch.cat(each).view(*targets.shape, top_k) for each in zip(*parts, strict=True))
    return likeliest, logp
