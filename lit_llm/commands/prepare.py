"""`python -m lit_llm prepare`: tokenise text into shards. With `--teacher`, also write a teacher's predictions beside them."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from lit_llm.commands.launch import launch
from lit_llm.commands.new_output import log_beside, new_folder
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.errors import UserError, refuse
from lit_llm.core.number_domain import above, whole
from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.ingest.token_parts import PARTS
from lit_llm.runs.run_folder import expanded

if TYPE_CHECKING:
    from lit_llm.data import TokenDataModule


def main(words: list[str]) -> int:
    """Run the command `prepare` with its arguments `words`; return the exit code.

    `--chat_template VALUE` is short for `--data ChatFiles --data.chat_template VALUE`. Without `--data`, `--data.paths` implies
    `--data TextFiles`.
    """
    flags = OwnFlags("prepare")
    text = "Conversations: short for --data ChatFiles --data.chat_template (docs/chat.md)."
    flags.add_argument("--chat_template", help=text)
    text = "Run of a teacher: write its likeliest next tokens beside the shards, new ones or those of --data TokenShards."
    flags.add_argument("--teacher", metavar="RUN", help=text)
    flags.add_argument("--top_k", range=whole(1, 2**20), default=64, metavar="K", help="Of the teacher: ids for each position.")
    flags.add_argument("--temperature", range=above(0, 100), default=1.0, metavar="T", help="Of the teacher's probabilities.")
    flags.add_argument("--device", default="auto", help="Of the teacher: cpu, cuda, …; auto: a GPU if there is one.")
    own, rest = flags.split(words)
    if own.teacher is not None:
        own.teacher = expanded(own.teacher, key="teacher", flag="--teacher")
    elif (own.top_k, own.temperature, own.device) != (64, 1, "auto"):
        raise UserError("--top_k, --temperature and --device are about a teacher: name its run (--teacher RUN)")
    if own.chat_template is not None:
        packing = [] if own.teacher is None else ["--data.packing=best_fit"]  # the packing of the recipe sft
        rest = ["--data", "ChatFiles", f"--data.chat_template={own.chat_template}", *packing, *rest]
    elif "--data.paths" in (given := {word.partition("=")[0] for word in rest}) and not given & {"--config", "--data", "--run"}:
        rest = ["--data", "TextFiles", *rest]  # else a file may name a class, which a flag would override
    try:
        return launch("prepare", rest, lambda arguments: _run(arguments, own), own=flags)
    except UserError as error:
        flag = re.compile("--(init_from|ckpt_path)")
        raise error if own.teacher is None else UserError(flag.sub("--teacher", str(error))) from None


def _run(arguments: Arguments, own: argparse.Namespace) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.resolve import decide, read_spec
    from lit_llm.core.hardware import chosen_device
    from lit_llm.data import TextDataModule, TokenShards
    from lit_llm.tokenizers import Learned
    from lit_llm.training.teacher import teacher_problems, write_teacher

    built = build(decide(read_spec("prepare", arguments, weights=own.teacher)))
    data, teacher = built.datamodule, built.spec.initial
    how = {"top_k": own.top_k, "temperature": own.temperature, "device": chosen_device(own.device)}
    if teacher is not None and isinstance(data, TokenShards):
        if built.config.out is not None:
            raise UserError("a teacher is written beside the shards: leave out --out")
        print(write_teacher(data, teacher, **how, replace=built.config.replace))
        size = f" --data.vocab_size {data.vocab_size}" if data.tokenizer is None else ""
        print(f"train on it: fit --config RECIPE --objective Distillation{_blocks(data)}{size}, and the same paths")
        return 0
    if built.config.out is None:
        raise UserError("prepare needs an output folder (--out DIR)")
    if not isinstance(data, TextDataModule):
        raise UserError(f"{type(data).__name__} has no text to tokenise: use --data TextFiles, ChatFiles or PythonStdlib")
    out = expanded(built.config.out, key="out", flag="--out")
    if teacher is not None:
        tokenizer = data.source_tokenizer
        ids = None if tokenizer is None or teacher.tokenizer_problem(tokenizer) else tokenizer.vocab_size
        refuse(teacher_problems(teacher, data, tokenizer, ids, own.top_k, how["device"]))
    read, above = data.source_files(), data.source_folders()
    with new_folder(out, replace=built.config.replace, sources=read, above=above, resumable=PARTS) as partial:
        data.raise_problems()
        summary = data.tokenise(
            partial,
            shard_tokens=built.config.shard_tokens,
            workers=built.config.workers,
            progress=ProgressLog(log_beside(out)),
        )
        manifest = summary.manifest
        if teacher is not None and manifest.pairs:
            raise UserError("pairs of answers have no teacher: prepare texts or conversations, or leave out --teacher")
    for name, split in manifest.splits.items():
        learned = "" if split.targets is None else f", of which {split.targets:,} are learned"
        kind = f"{split.documents // 2:,} pairs" if manifest.pairs else f"{split.documents:,} documents"
        print(f"{name}: {kind}, {split.bytes:,} bytes, {split.tokens:,} tokens{learned}")
    if summary.near_duplicates:
        print(f"left out of training: {summary.near_duplicates:,} documents that nearly repeat held-out ones")
    if summary.skipped:
        print(f"skipped: {summary.skipped:,} documents without {'messages' if summary.masked else 'text'}")
    asked = data.source_tokenizer.requested_size if isinstance(data.source_tokenizer, Learned) else 0
    fewer = f" ({asked:,} asked for: the text gives no more)" if manifest.vocab_size < asked else ""
    print(f"vocabulary: {manifest.vocab_size:,} ids{fewer}")
    print(f"documents: {'as the chat template writes them' if summary.masked else _ids(manifest)}")
    chats = f"{'dpo' if manifest.pairs else 'sft'} --init_from RUN"
    if teacher is not None:
        settings = {name: getattr(data, name) for name in ("block_size", "packing", "micro_batch_size")}
        print(write_teacher(TokenShards(path=str(out), **settings), teacher, **how, replace=False))
    recipe = chats if summary.masked else "RECIPE --data TokenShards"
    recipe += "" if teacher is None else f" --objective Distillation{_blocks(data)}"
    print(f"train on it: python -m lit_llm fit --config {recipe} --data.path {out}")
    return 0


def _blocks(data: TokenDataModule) -> str:
    """Return the flags of `fit`, as text, for the block size and the packing of the blocks that the teacher has read."""
    return f" --data.block_size {data.block_size} --data.packing {data.packing}"


def _ids(manifest: Manifest) -> str:
    """Return the end of a sentence about documents: the token ids with which each document begins and ends."""
    begins = "begin with their text" if manifest.bos_id is None else f"begin with id {manifest.bos_id}"
    return f"{begins} and end with id {manifest.eos_id}"
