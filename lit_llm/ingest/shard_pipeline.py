"""Turn inputs (sources of text) into a folder of token shards.

1. If documents are to be held out, they are chosen and indexed.
2. If the tokenizer has to learn its vocabulary, it reads the training documents.
3. Each job (a few inputs) is tokenised by one process into a part: files with the tokens of each split.
4. The parts are joined into shards, in the order of the inputs.

The result of a job does not depend on the process or on other jobs, so any number of workers gives the same bytes. The name of
a job's part is a hash of everything that its content depends on, so an interrupted run continues with the missing parts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from lit_llm.core.errors import UserError
from lit_llm.ingest.chat import ChatEncoder, ChatForm, ChatTemplate
from lit_llm.ingest.inputs import Input, Job, jobs_of
from lit_llm.ingest.progress import ProgressLog, Report
from lit_llm.ingest.selection import Selection
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.ingest.shards import ShardWriter
from lit_llm.ingest.source import public_name
from lit_llm.ingest.survey import select
from lit_llm.ingest.token_parts import Part, PartCounts, read_part, start_parts, token_type
from lit_llm.ingest.tokenise import JobRunner
from lit_llm.ingest.workers import finish
from lit_llm.tokenizers import Learned, Tokenizer, load_tokenizer
from lit_llm.tokenizers.encoder import EncoderChoice, choose_encoder

FORMAT = 3
"""A number in the hash that names a part. Increment it when the same inputs and settings would give other tokens."""

SHORT_BYTES = 2**22
"""Inputs with fewer bytes in total take less time to tokenise than the check whether tiktoken gives the same ids."""

_LIBRARY = {"tiktoken": "tiktoken", "tokenizers": "tokenizers", "own": "the tokenizer's class"}
_SPLITS = ("train", "val", "test")
_SAMPLE_INPUTS = 16
_SAMPLE_BYTES = 2**16  # about the number of bytes in the sample from each input


class Summary(NamedTuple):
    """Record of the result of `ingest`: the shards' manifest; numbers of documents without text (``skipped``) and of training
    documents that nearly repeat held-out ones; whether masks were written; and the sources that are not UTF-8 (``invalid``)."""

    manifest: Manifest
    skipped: int
    near_duplicates: int
    masked: bool
    invalid: list[str]


def ingest(
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    out: Path,
    *,
    shard_tokens: int,
    val_fraction: float = 0.0,
    drop_near_duplicates: bool = False,
    chat_template: ChatTemplate | None = None,
    workers: int = 0,
    progress: ProgressLog | None = None,
) -> Summary:
    """Tokenise ``inputs``, and write shards, document ends, the tokenizer and ``meta.json`` into the folder ``out``.

    Args:
        inputs: the inputs, in the order in which their tokens are written.
        tokenizer: encodes the text. If its vocabulary is still to be learned, a copy learns it from the training documents.
        out: an existing folder. The results of jobs are stored in ``out/parts``, which the caller deletes at the end. A call
            reuses results of an interrupted call with the same arguments. All other files in ``out`` are deleted first.
        shard_tokens: tokens per shard.
        val_fraction: share of the documents to hold out, in inputs without a split.
        drop_near_duplicates: leave out training documents that nearly repeat a held-out document.
        chat_template: the template that writes conversations as text and decides the targets. None: documents are text.
        workers: number of processes. 0 or 1: this process does all the work.

    Raises:
        UserError: A source cannot be read as text, or no text is left for training or validation.
        OSError: The disk is full, or refuses otherwise.
    """
    progress = progress or ProgressLog()
    parts = start_parts(out)
    selection = select(
        inputs,
        parts,
        val_fraction=val_fraction,
        drop_near_duplicates=drop_near_duplicates,
        workers=workers,
        progress=progress,
    )
    if isinstance(tokenizer, Learned) and not tokenizer.trained:
        tokenizer = _learned(inputs, tokenizer, selection, parts, progress)
    runner = JobRunner(tokenizer, chat_template or _encoder(inputs, tokenizer, selection, progress), selection, parts)

    jobs = list(jobs_of(inputs))
    settings = [str(FORMAT), tokenizer.identity(), *selection.identity()]
    if chat_template is not None:
        settings.append(chat_template.identity())
    keys = [job.key(settings) for job in jobs]
    finished = finish(
        jobs,
        keys,
        functools.partial(Part.read, parts),
        runner.run,
        stage="Tokenising",
        workers=workers,
        progress=progress,
        finished=lambda job, part: progress.note(f"finished {_named(job)}: {_counts(part)}"),
    )
    total = Part()
    for part in finished:
        total.add(part)
    _refuse_empty(total, inputs)
    documents, tokens = (sum(getattr(one, name) for one in total.splits.values()) for name in ("documents", "tokens"))
    if total.pairs and 2 * total.pairs != documents:
        raise UserError(
            f"The data have {total.pairs:,} pairs of a chosen and a rejected answer, and {documents - 2 * total.pairs:,} "
            "conversations: prepare each kind in a folder of its own (--data.paths)."
        )
    splits = {}
    dtype = token_type(tokenizer.vocab_size)
    with progress.stage("Writing shards", total=tokens * dtype.itemsize, unit="MB") as report:
        for name in _SPLITS:
            if name not in total.splits:
                continue
            writer = ShardWriter(out, name, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens, masked=runner.masked)
            with writer:
                for key, part in zip(keys, finished, strict=True):
                    if name not in part.splits:
                        continue
                    for ids, mask, is_end in read_part(parts / f"{key}.{name}", dtype, masked=runner.masked):
                        writer.write(ids, mask)
                        if is_end:
                            writer.end_document()
                    size = part.splits[name].tokens * dtype.itemsize
                    report(size, size)
            splits[name] = SplitInfo(
                tokens_blake2b=writer.tokens_blake2b,
                shards=tuple(writer.shards),
                targets=writer.targets,
                mask_blake2b=writer.mask_blake2b,
                **asdict(total.splits[name]),
            )
    tokenizer.save(out)
    if chat_template is not None:
        ChatForm(chat_template.text, ChatEncoder(tokenizer, chat_template).end_of_turn_id()).write(out)
    pairs = True if total.pairs else None
    manifest = Manifest(tokenizer.identity(), tokenizer.vocab_size, *runner.document_ids, splits, pairs)
    manifest.write(out)
    return Summary(manifest, total.skipped, total.near_duplicates, runner.masked, sorted(set(total.invalid)))


def _encoder(inputs: Sequence[Input], tokenizer: Tokenizer, selection: Selection, progress: ProgressLog) -> EncoderChoice:
    is_long = any(not one.source.size for one in inputs) or sum(one.size for one in inputs) >= SHORT_BYTES  # 0: not known
    choice = choose_encoder(tokenizer, _sample(inputs, selection), try_tiktoken=is_long)
    progress.note(f"encoded by {_LIBRARY[choice.kind]}: {choice.reason}")
    return choice


def _refuse_empty(total: Part, inputs: Sequence[Input]) -> None:
    kind = "conversation" if any(part.settings.messages for part in inputs) else "document"
    undecided = all(one.split is None for one in inputs)
    for name in _SPLITS:
        counts = total.splits.get(name, PartCounts())
        if counts.tokens >= 2 or (name == "test" and all(one.split != name for one in inputs)):
            continue
        held_out = total.splits.get("val", PartCounts()).documents if name == "train" and undecided else 0
        others = {
            f"{held_out:,} held out for validation": held_out,
            f"{total.skipped:,} records of all data without any": total.skipped,
            f"{total.near_duplicates:,} that nearly repeat held-out ones (--data.drop_near_duplicates)": total.near_duplicates,
        }
        also = "".join(f"; {what}" for what, count in others.items() if count)
        raise UserError(
            f"The {name} data have {counts.documents} {kind}s with {counts.tokens} tokens{also}: give more (--data.paths, or "
            "--data.train and --data.val), or name the key that holds them (--data.text_key, --data.messages_key)."
        )


def _learned(
    inputs: Sequence[Input], tokenizer: Learned, selection: Selection, folder: Path, progress: ProgressLog
) -> Tokenizer:
    """A copy of the tokenizer that has learned its vocabulary from the training documents, loaded from ``folder`` if an
    interrupted call has saved it there."""
    training = [part for part in inputs if part.split in (None, "train")]
    saved = (
        folder / f"{Job(tuple(training)).key(['learn', str(FORMAT), tokenizer.identity(), *selection.identity()])}.tokenizer"
    )
    if saved.exists():
        return load_tokenizer(saved)
    tokenizer = copy(tokenizer)  # the configured one stays untrained: its identity is part of the cache key
    with progress.stage("Learning the vocabulary", total=sum(part.size for part in training)) as report:
        tokenizer.train(_training_texts(training, selection, report))
    partial = folder / f"{saved.name}.tmp"
    partial.mkdir(exist_ok=True)
    tokenizer.save(partial)
    os.rename(partial, saved)
    return tokenizer


def _training_texts(training: Sequence[Input], selection: Selection, report: Report) -> Iterator[str]:
    """Yield the text of the training documents in pieces. Of a document that nearly repeats held-out text, only the last piece
    is left out: the repetition is known at the last piece, when the earlier pieces have been yielded."""
    for part in training:
        for piece in selection.pieces(part, report):
            if piece.split == "train" and not piece.repeats_held_out:
                yield piece.text.decode("utf-8", errors="replace")


def _sample(inputs: Sequence[Input], selection: Selection) -> list[str]:
    """A sample of the text, on which `choose_encoder` compares two encoders: beginnings of documents of up to 16 inputs."""
    step = max(1, len(inputs) // _SAMPLE_INPUTS)
    texts = []
    for part in inputs[::step][:_SAMPLE_INPUTS]:
        size = 0
        for piece in Selection(selection.hold_out_below).pieces(part):
            text = piece.text.decode("utf-8", errors="replace")[:_SAMPLE_BYTES]
            texts.append(text)
            size += len(text)
            if size >= _SAMPLE_BYTES:
                break
    return texts


def _named(job: Job) -> str:
    first = public_name(job.inputs[0].source.path)
    return first if len(job.inputs) == 1 else f"{first} and {len(job.inputs) - 1} more"


def _counts(part: Part) -> str:
    splits = [f"{name} {c.documents:,} documents, {c.bytes:,} bytes, {c.tokens:,} tokens" for name, c in part.splits.items()]
    return "; ".join(splits) or "no text"
