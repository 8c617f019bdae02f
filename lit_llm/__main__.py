"""`python -m lit_llm COMMAND`: the table of commands, and the only place where a user's mistake becomes exit code 2."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import warnings
from typing import Any, NoReturn

from lit_llm.callbacks.errors import flags
from lit_llm.config.arguments import refuse_other_encodings, underscored
from lit_llm.config.groups import flag_of
from lit_llm.core import errors
from lit_llm.core.disk import is_disk_error
from lit_llm.core.errors import UserError, failed_outside, refuse, report, show_traceback
from lit_llm.core.ranks import wrong_numbers
from lit_llm.training.bounded_exit import run_and_end

# Command → (module with `main(arguments) -> exit code`, or module:function; what it does; an example). A module is imported
# when its command runs, because Lightning takes seconds to import, and listing recipes does not need it.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "recipes": ("recipes", "the collection", "recipes   (also: show NAME, diff A B, copy NAME DIR)"),
    "fit": ("fit", "train", "fit --config quickstart --resume auto"),
    "plan": ("plan", "memory, time, cost", "plan --config gpt2-124m --hardware h100-sxm --devices 8"),
    "check": ("check", "launch checklist", "check --config quickstart"),
    "find-lr": ("find_lr", "a learning rate", "find-lr --config quickstart --out rate.yaml"),
    "find-batch": ("find_batch", "a batch size", "find-batch --config quickstart --out batch.yaml"),
    "validate": ("fit:validate", "loss on held-out text", "validate --run runs/quickstart"),
    "test": ("fit:test", "loss on the test set", "test --run runs/quickstart"),
    "generate": ("generate", "text from a run", 'generate --run runs/quickstart --prompt "def "'),
    "chat": ("chat", "talk to a run", "chat --run runs/sft"),
    "report": ("report", "one page about runs", "report --run runs/quickstart --out report.html"),
    "doctor": ("doctor", "what is wrong with a run", "doctor --run runs/quickstart"),
    "clean": ("clean", "filter, deduplicate text", "clean --data.paths 'raw/*.jsonl' --exact_duplicates true --out cleaned"),
    "prepare": ("prepare", "text to token shards", "prepare --data TextFiles --data.paths 'books/*.txt' --out shards"),
    "import": ("import_hf", "weights from Hugging Face", "import --from llama-folder --out runs/llama"),
    "export": ("export", "weights for other programs", "export --run runs/llama --out llama-hf"),
    "certify": ("certify", "proof on this machine", "certify --devices 2 --budget 10"),
}
TRAINING = ("fit", "validate", "test")


def usage() -> str:
    """Return the help text of lit_llm: one line per command, with its purpose and an example."""
    lines = ["usage: python -m lit_llm COMMAND [options]", ""]
    lines += [f"  {name:14s} {what:26s} {example}" for name, (_, what, example) in COMMANDS.items()]
    more = ["python -m lit_llm COMMAND --help lists a command's options.", "--debug prints the traceback of a mistake, too."]
    return "\n".join([*lines, "", *more])


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the command-line `arguments` name (None: those of this process), and return its exit code.

    0: done. 1: training went wrong, a check failed or no plan meets the limits. 2: a mistake in the input. 75: a signal stopped
    training, and a checkpoint is saved: run again to continue. 130: interrupted without saving (Ctrl-C twice, or early).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    errors.debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(usage())
        return 0
    if command == "--version":
        print(importlib.metadata.version("lit_llm"))
        return 0
    try:
        if not _is_somewhere():
            raise UserError("the working directory has been deleted: change to another")
        refuse_other_encodings(arguments)
        refuse(wrong_numbers())
        if command not in COMMANDS:
            raise UserError(f"unknown command '{command}'; `python -m lit_llm --help` lists them")
        name, _, function = COMMANDS[command][0].partition(":")
        module = importlib.import_module(f"lit_llm.commands.{name}")
        with flags(flag_of):  # messages of callbacks name their settings as flags
            return getattr(module, function or "main")(underscored(rest))
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        show_traceback(error)
        report(str(error))
        return 2
    except BaseException as error:
        if (limit := failed_outside(error)) is not None:
            print(f"error: {limit}", file=sys.stderr, flush=True)  # on every rank
            return 1
        if not isinstance(error, OSError):
            raise
        refused = is_disk_error(error)
        if not refused and (command in TRAINING or error.filename is None):
            raise  # a file lost during training: the traceback says where
        name = "a file" if error.filename is None else os.fsdecode(error.filename)
        said = f"{name} cannot be read or written: {error.strerror}" if refused else f"{name}: {error.strerror}"
        if command in TRAINING:
            print(f"error: {said}", file=sys.stderr, flush=True)  # on every rank: each may have a disk of its own
            return 1
        report(said)
        return 2


def _is_somewhere() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def console_script() -> NoReturn:
    """Entry point of the installed command `lit_llm`: finds classes in the current folder, as `python -m lit_llm` does."""
    sys.path.insert(0, os.getcwd())
    _run()


def _bound_spinning() -> None:
    """Set GOMP_SPINCOUNT, unless the user has, so that an idle OpenMP thread soon sleeps and leaves its CPU core to others.

    GNU's OpenMP reads the variable when torch is imported. Child processes inherit it (docs/evidence/measurements.md).
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"  # iterations; the default is 300,000


def _plain_warnings() -> None:
    """Print warnings from lit_llm's own files as one line each: replaces `warnings.showwarning`, which stays for others."""
    others, ours = warnings.showwarning, os.path.join(os.path.dirname(__file__), "")

    def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if filename.startswith(ours):
            print(f"warning: {message}", file=sys.stderr)
        else:
            others(message, category, filename, *rest)

    warnings.showwarning = show  # type: ignore[assignment]


def _run() -> NoReturn:
    _bound_spinning()
    _plain_warnings()
    run_and_end(main, needs_output=sys.argv[1:2] != ["fit"])


if __name__ == "__main__":
    _run()
