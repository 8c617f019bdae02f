"""Command-line arguments before they are parsed: the shorthand `--run`, and which config files are named."""

from __future__ import annotations

from pathlib import Path

from lit_llm.run_folder import CONFIG


def expand_run(arguments: list[str]) -> list[str]:
    """`--run DIR` stands for the configuration of that run folder, wherever it has been moved to."""
    expanded: list[str] = []
    position = 0
    while position < len(arguments):
        key, equals, value = arguments[position].partition("=")
        if key != "--run":
            expanded.append(arguments[position])
            position += 1
            continue
        if not equals:
            if position + 1 == len(arguments):
                raise ValueError("--run needs a run folder, like --run runs/quickstart")
            value = arguments[position + 1]
        position += 1 if equals else 2
        if not (Path(value) / CONFIG).is_file():
            raise ValueError(f"{value} is no run folder: it has no {CONFIG} (--run)")
        expanded += ["--config", str(Path(value) / CONFIG), "--run_dir", value]
    return expanded


def config_files_in(arguments: list[str]) -> list[str]:
    """The values of --config, in order."""
    files = []
    for i, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key in ("--config", "-c") and (equals or i + 1 < len(arguments)):
            files.append(value if equals else arguments[i + 1])
    return files
