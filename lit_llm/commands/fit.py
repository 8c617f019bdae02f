"""`python -m lit_llm fit`: train; `validate` and `test`: the loss of a checkpoint on held-out text, or on the test set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from lit_llm.commands.launch import launch
from lit_llm.config.arguments import Arguments, Flag
from lit_llm.tokenizers import TOKENIZER_FILE


def main(words: list[str]) -> int:
    """Run the command `fit` with its arguments `words`; return the exit code."""
    return launch("fit", words, _run)


def _run(arguments: Arguments) -> int:
    from lit_llm.api import fit
    from lit_llm.config.build import build
    from lit_llm.config.resolve import decide, read_spec
    from lit_llm.plan.host_memory import memory_problem

    return fit(build(decide(read_spec("fit", arguments)), memory=memory_problem))


def validate(words: list[str]) -> int:
    """Run the command `validate` with its arguments `words`; return the exit code."""
    return launch("validate", words, lambda arguments: _evaluate("validate", arguments))


def test(words: list[str]) -> int:
    """Run the command `test` with its arguments `words`; return the exit code."""
    return launch("test", words, lambda arguments: _evaluate("test", arguments))


def _with_own_tokenizer(arguments: Arguments) -> Arguments:
    """Return `arguments`, with flags for the run's own tokenizer if there are flags `--data…`, but none for a tokenizer."""
    keys = [item.key for item in arguments.items if isinstance(item, Flag)]
    run, other_text = arguments.value_of("run_dir"), any(key.partition(".")[0] == "data" for key in keys)
    if not run or not other_text or any(key.startswith("data.tokenizer") for key in keys):
        return arguments
    if not (file := Path(run) / TOKENIZER_FILE).is_file():
        return arguments
    flags = Flag("data.tokenizer", "TokenizerJSON"), Flag("data.tokenizer.path", str(file))
    return replace(arguments, items=[*arguments.items, *flags])


def _evaluate(command: Literal["validate", "test"], arguments: Arguments) -> int:
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lit_llm.config.build import build
    from lit_llm.config.resolve import decide, read_spec
    from lit_llm.core.errors import UserError
    from lit_llm.data.datamodule import TokenDataModule
    from lit_llm.training.fit import print_metrics, restore_problem

    built = build(decide(read_spec(command, _with_own_tokenizer(arguments))))
    saved = built.spec.start.saved
    assert saved is not None
    if not is_overridden(f"{'val' if command == 'validate' else 'test'}_dataloader", built.datamodule):
        raise UserError(f"{type(built.datamodule).__name__} has no data to {command} on: name other data (--data)")
    run = built.trainer.validate if command == "validate" else built.trainer.test
    try:
        run(built.model, datamodule=built.datamodule, ckpt_path=saved.path, verbose=False, weights_only=True)
    except Exception as error:
        if problem := restore_problem(saved.path, error):
            raise UserError(f"{problem} (--ckpt_path)") from error
        raise
    if command == "validate" and isinstance(data := built.datamodule, TokenDataModule):
        print(f"validation split: {data.val_tokens:,} tokens of {type(data).__name__}{data.held_out}")
    print_metrics(built.trainer, "val" if command == "validate" else "test", built.spec.run_dir, saved.step)
    return 0
