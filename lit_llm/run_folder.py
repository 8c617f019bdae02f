"""A run folder, `runs/<name>/`: config.yaml, tokenizer.json, TensorBoard events, and checkpoints/."""

from __future__ import annotations

import sys
from pathlib import Path

from lit_llm.checkpoint.format import newest_good, verify

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"


def default_run_dir(config_files: list[str]) -> Path:
    """`runs/` and the name of the first recipe: overlays do not rename a run."""
    return Path("runs") / (Path(config_files[0]).stem if config_files else "default")


def holds_run(run_dir: Path) -> bool:
    """Whether a run has written there."""
    return (run_dir / CONFIG).exists() or (run_dir / CHECKPOINTS).exists()


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """The checkpoint called `which` in a run folder.

    Raises:
        ValueError: there is none; says what is there.
    """
    path = run_dir / CHECKPOINTS / f"{which}.ckpt"
    if path.exists():
        return path
    if not run_dir.is_dir():
        raise ValueError(f"there is no run folder {run_dir} (--run_dir or --run)")
    names = sorted(p.name for p in (run_dir / CHECKPOINTS).glob("*.ckpt"))
    there = f"there are {', '.join(names)}" if names else "there is no checkpoint yet; train first with `fit`"
    raise ValueError(f"run folder {run_dir} has no checkpoint '{which}': {there} (--ckpt_path)")


def is_path(resume: str) -> bool:
    """Whether `--resume` names a checkpoint."""
    return resume not in ("auto", "never")


def branch_run_dir(config_files: list[str], checkpoint: Path) -> Path:
    """Where a run that starts from a checkpoint goes when `--run_dir` does not say: never into another run's folder.

    `runs/<recipe>`, or with overlays `runs/<recipe>-<overlay>-…` if the former is where the checkpoint is from.
    """
    plain = default_run_dir(config_files)
    if len(config_files) < 2 or not checkpoint.absolute().is_relative_to(plain.absolute()):
        return plain
    return plain.with_name("-".join(Path(file).stem for file in config_files))


def resume_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """What `--resume never|auto|PATH` continues from; None starts anew.

    With auto, damaged checkpoints are named on stderr and passed over.

    Raises:
        ValueError: PATH is missing, damaged or not a checkpoint; a run would be overwritten; every checkpoint is damaged.
    """
    if resume == "auto":
        good, damaged = newest_good(run_dir / CHECKPOINTS) if (run_dir / CHECKPOINTS).is_dir() else (None, [])
        if good is None and damaged:
            raise ValueError("\n".join([*damaged, f"no checkpoint of {run_dir} can be read; start anew with --replace true"]))
        for problem in damaged:
            print(f"warning: {problem} Passed over.", file=sys.stderr)
        return good
    if resume == "never":
        if holds_run(run_dir):
            raise ValueError(
                f"run folder {run_dir} already holds a run; continue it with --resume auto, "
                "set it aside with --replace true, or write elsewhere with --run_dir DIR"
            )
        return None
    path = Path(resume)
    if not path.exists():
        raise ValueError(f"there is no checkpoint {path} to resume from (--resume PATH, or --resume auto)")
    if holds_run(run_dir) and not path.absolute().is_relative_to(run_dir.absolute()):
        raise ValueError(f"run folder {run_dir} already holds another run than {path}; write elsewhere with --run_dir DIR")
    if damage := verify(path):
        raise ValueError(f"{damage} (--resume auto takes the newest good one)")
    return path


def existing_checkpoint(path: str) -> Path:
    """A checkpoint file given by its path.

    Raises:
        ValueError: it does not exist.
    """
    if not Path(path).exists():
        raise ValueError(f"there is no checkpoint {path}; give last, best, or a file (--ckpt_path)")
    return Path(path)


def set_aside(run_dir: Path) -> Path | None:
    """Rename an existing run folder to `<name>.1`, `.2`, …; nothing is deleted. Returns where it went."""
    if not run_dir.exists():
        return None
    number = 1
    while (target := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(target)
    return target
