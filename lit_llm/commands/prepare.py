"""`python -m lit_llm prepare`: tokenise text into shards."""

from __future__ import annotations

import contextlib
import sys

from lit_llm.cli.arguments import Arguments
from lit_llm.cli.launch import launch
from lit_llm.cli.new_output import new_folder
from lit_llm.errors import UserError
from lit_llm.ingest.manifest import Manifest
from lit_llm.ingest.parts import PARTS
from lit_llm.runs.run_folder import expanded


def main(words: list[str]) -> int:
    """Entry point; returns the exit code."""
    return launch("prepare", words, _run)


def _run(arguments: Arguments) -> int:
    from lit_llm.cli.build import build
    from lit_llm.cli.parse import parse
    from lit_llm.data.prepare import prepare

    built = build(parse("prepare", arguments))
    if built.config.out is None:
        raise UserError("prepare needs an output folder (--out DIR)")
    out = expanded(built.config.out, key="out", flag="--out")
    read = built.datamodule.source_files()
    for folder in built.datamodule.source_folders():
        if out.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{out} lies in {folder}, which is read: give a folder outside of it (--out)")
    log = out.absolute().with_name(f"{out.absolute().name}.log")
    with new_folder(out, replace=built.config.replace, sources=read, resumable=PARTS) as partial:
        try:
            summary = prepare(
                built.datamodule,
                partial,
                shard_tokens=built.config.shard_tokens,
                workers=built.config.workers,
                log=log,
                keep_parts=True,  # until the folder has its name
            )
        except BaseException:
            with contextlib.suppress(OSError):
                (partial / PARTS).rmdir()  # if no part is finished
            if any(partial.iterdir()):
                print(f"What is finished is kept in {partial}. Repeat the command to continue.", file=sys.stderr)
            raise
    manifest = summary.manifest
    for name, split in manifest.splits.items():
        print(f"{name}: {split.documents:,} documents, {split.bytes:,} bytes, {split.tokens:,} tokens")
    if summary.near_duplicates:
        print(f"left out of training: {summary.near_duplicates:,} documents that nearly repeat held-out ones")
    if summary.skipped:
        print(f"skipped: {summary.skipped:,} documents without text")
    print(f"documents: {_ids(manifest)}")
    print(f"train on it: python -m lit_llm fit --config RECIPE --data TokenShards --data.path {out}")
    return 0


def _ids(manifest: Manifest) -> str:
    """How documents begin and end."""
    begins = "begin with their text" if manifest.bos_id is None else f"begin with id {manifest.bos_id}"
    return f"{begins} and end with id {manifest.eos_id}"
