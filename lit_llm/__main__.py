"""`python -m lit_llm COMMAND`: dispatch, and the one place where a user's mistake becomes one line and exit code 2."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import traceback
from pathlib import Path
from typing import cast

USAGE = """usage: python -m lit_llm COMMAND [options]

  recipes    the collection:         python -m lit_llm recipes            (show NAME, diff A B, copy NAME DIR)
  fit        train:                  python -m lit_llm fit --config recipes/quickstart.yaml --resume auto
  plan       memory, time, cost:     python -m lit_llm plan --config recipes/gpt2-124m.yaml --hardware h100-sxm --devices 8
  check      launch checklist:       python -m lit_llm check --config recipes/quickstart.yaml
  validate   loss on held-out text:  python -m lit_llm validate --run runs/quickstart
  test       loss on the test set:   python -m lit_llm test --run runs/quickstart
  generate   text from a run:        python -m lit_llm generate --run runs/quickstart --prompt "def "
  curve      a run's curve as CSV:   python -m lit_llm curve --run runs/quickstart --out quickstart.csv
  prepare    text to token shards:   python -m lit_llm prepare --data TextFiles --data.paths 'books/*.txt' --out shards
  consolidate  a checkpoint as one file:
                                     python -m lit_llm consolidate --run runs/quickstart --out model.ckpt
  import     weights from others:    python -m lit_llm import --from llama-folder --out runs/llama
  export     weights for others:     python -m lit_llm export --run runs/quickstart --out quickstart-hf
  verify-resume                      is an interrupted run the same run?
                                     python -m lit_llm verify-resume --config recipes/quickstart.yaml --steps 20 --kill

python -m lit_llm COMMAND --help lists a command's options."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 done, 1 training went wrong, a check failed or no plan meets the limits, 2 a mistake in the input, 75 stopped by a signal
    with everything saved: run again to continue, 130 interrupted at once (Ctrl-C twice, or before training began).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("--help", "-h", "help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(importlib.metadata.version("lit_llm"))
        return 0
    try:
        # Imports are here because they cost: Lightning and its command line take seconds.
        if command == "recipes":
            from lit_llm.commands import recipes as recipes_command

            return recipes_command.main(rest)
        elif command == "generate":
            from lit_llm.commands import generate

            generate.main(rest)
        elif command == "curve":
            from lit_llm.commands import curve as curve_command

            curve_command.main(rest)
        elif command == "consolidate":
            from lit_llm.commands import consolidate

            consolidate.main(rest)
        elif command == "import":
            from lit_llm.commands import import_hf as import_folder

            import_folder.main(rest)
        elif command == "export":
            from lit_llm.commands import export as export_folder

            export_folder.main(rest)
        elif command == "verify-resume":
            from lit_llm.commands import verify_resume

            return verify_resume.main(rest)
        elif command == "plan":
            from lit_llm.commands import plan as plan_command

            return plan_command.main(rest)
        elif command == "check":
            from lit_llm.commands import check

            return check.main(rest)
        elif command in ("fit", "validate", "test", "prepare"):
            from lit_llm.cli import recipe_cli as cli

            return cli.main(cast(cli.Command, command), rest)
        else:
            raise ValueError(f"unknown command '{command}'; `python -m lit_llm --help` lists them")
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if command in ("fit", "validate", "test") or error.filename is None:
            raise  # a file that is lost while training is worth its traceback
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        if not is_users_mistake(error):
            raise
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":  # once a machine, not once a process
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


def is_users_mistake(error: BaseException) -> bool:
    """Our own code raises ValueError for input that cannot work; a ValueError from anywhere else is a bug to be seen."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
