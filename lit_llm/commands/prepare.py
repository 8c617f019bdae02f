"""`python -m lit_llm prepare`: tokenise text into shards."""

from __future__ import annotations

from lit_llm.commands.launch import launch
from lit_llm.commands.new_output import log_beside, new_folder
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.config.arguments import Arguments
from lit_llm.core.errors import UserError
from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.ingest.token_parts import PARTS
from lit_llm.runs.run_folder import expanded


def main(words: list[str]) -> int:
    """Entry point; returns the exit code.

    `--chat_template VALUE` is short for `--data ChatFiles --data.chat_template VALUE`.
    """
    flags = OwnFlags("prepare")
    text = "Conversations: short for --data ChatFiles --data.chat_template (docs/chat.md)."
    flags.add_argument("--chat_template", help=text)
    own, rest = flags.split(words)
    if own.chat_template is not None:
        rest = ["--data", "ChatFiles", f"--data.chat_template={own.chat_template}", *rest]
    return launch("prepare", rest, _run, own=flags)


def _run(arguments: Arguments) -> int:
    from lit_llm.config.build import build
    from lit_llm.config.resolve import read_recipe
    from lit_llm.data import TextDataModule

    built = build(read_recipe("prepare", arguments))
    if built.config.out is None:
        raise UserError("prepare needs an output folder (--out DIR)")
    data = built.datamodule
    if not isinstance(data, TextDataModule):
        raise UserError(f"{type(data).__name__} has no text to tokenise: use --data TextFiles, ChatFiles or PythonStdlib")
    out = expanded(built.config.out, key="out", flag="--out")
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
    for name, split in manifest.splits.items():
        learned = "" if split.targets is None else f", of which {split.targets:,} are learned"
        kind = f"{split.documents // 2:,} pairs" if manifest.pairs else f"{split.documents:,} documents"
        print(f"{name}: {kind}, {split.bytes:,} bytes, {split.tokens:,} tokens{learned}")
    if summary.near_duplicates:
        print(f"left out of training: {summary.near_duplicates:,} documents that nearly repeat held-out ones")
    if summary.skipped:
        print(f"skipped: {summary.skipped:,} documents without {'messages' if summary.masked else 'text'}")
    print(f"documents: {'as the chat template writes them' if summary.masked else _ids(manifest)}")
    chats = f"{'dpo' if manifest.pairs else 'sft'} --init_from RUN"
    recipe = chats if summary.masked else "RECIPE --data TokenShards"
    print(f"train on it: python -m lit_llm fit --config {recipe} --data.path {out}")
    return 0


def _ids(manifest: Manifest) -> str:
    """How documents begin and end."""
    begins = "begin with their text" if manifest.bos_id is None else f"begin with id {manifest.bos_id}"
    return f"{begins} and end with id {manifest.eos_id}"
