"""`python -m lit_llm prepare`: tokenize text into shards."""

from __future__ import annotations

from lit_llm.cli.arguments import Arguments
from lit_llm.cli.launch import launch
from lit_llm.cli.new_output import new_folder
from lit_llm.errors import UserError
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
    with new_folder(out, replace=built.config.replace, sources=read) as partial:
        summary = prepare(built.datamodule, partial, shard_tokens=built.config.shard_tokens)
    for name, split in summary["splits"].items():
        print(f"{name}: {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens")
    print(
        f"train on it: python -m lit_llm fit --config RECIPE --data TokenShards --data.vocab_size {summary['vocab_size']} "
        f"--data.train '{out}/train_*.bin' --data.val '{out}/val_*.bin' "
        f"--data.tokenizer TokenizerJSON --data.tokenizer.path {out}/tokenizer.json"
    )
    return 0
