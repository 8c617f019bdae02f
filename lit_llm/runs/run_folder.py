"""A run folder, `runs/<name>/`: config.yaml, tokenizer.json, TensorBoard events, and checkpoints/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import yaml

from lit_llm.checkpoint.format import newest_good, read, verify
from lit_llm.errors import UserError

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"


def default_run_dir(config_files: list[str]) -> Path:
    """`runs/` and the name of the first recipe: overlays do not rename a run."""
    if not config_files:
        return Path("runs") / "default"
    recipe = Path(config_files[0])
    # A recipe may go by its name alone, and `gpt2-1.5b` has no suffix.
    return Path("runs") / (recipe.stem if recipe.suffix in (".yaml", ".yml", ".json") else recipe.name)


def holds_run(run_dir: Path) -> bool:
    """Whether a run has written there."""
    return (run_dir / CONFIG).exists() or (run_dir / CHECKPOINTS).exists()


def config_of(run: Path) -> Path:
    """The configuration of the run folder that `--run` names.

    Raises:
        UserError: it is none.
    """
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is no run folder: it has no {CONFIG} (--run)")
    return run / CONFIG


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """The checkpoint called `which` in a run folder.

    Raises:
        UserError: there is none; says what is there.
    """
    path = run_dir / CHECKPOINTS / f"{which}.ckpt"
    if path.exists():
        return path
    if not run_dir.is_dir():
        raise UserError(f"there is no run folder {run_dir} (--run_dir or --run)")
    names = sorted(p.name for p in (run_dir / CHECKPOINTS).glob("*.ckpt"))
    there = f"there are {', '.join(names)}" if names else "there is no checkpoint yet; train first with `fit`"
    raise UserError(f"run folder {run_dir} has no checkpoint '{which}': {there} (--ckpt_path)")


def is_path(resume: str) -> bool:
    """Whether `--resume` names a checkpoint."""
    return resume not in ("auto", "never")


def branch_run_dir(config_files: list[str], checkpoint: Path) -> Path:
    """Where a run that starts from a checkpoint goes when `--run_dir` does not say.

    With overlays into a folder beside the run that the checkpoint is from, `<that run>-<overlay>-…`; with a recipe alone into
    the recipe's folder, which may be the one that the checkpoint is from: then that run goes on.
    """
    plain = default_run_dir(config_files)
    if len(config_files) < 2:
        return plain
    beside = checkpoint.absolute().parent
    name = beside.parent.name if beside.name == CHECKPOINTS else plain.name
    return plain.with_name("-".join([name, *(Path(file).stem for file in config_files[1:])]))


class Start(NamedTuple):
    """Where a launch begins."""

    checkpoint: Path | None = None
    """None: at step 0."""
    origin: Path | None = None
    """The checkpoint of another run that this one branches off from; None when it began at step 0."""


def origin_of(run_dir: Path) -> Path | None:
    """The checkpoint of another run that the run in this folder branched off from, as its config.yaml says."""
    if not (run_dir / CONFIG).is_file():
        return None
    config = yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8"))
    named = config.get("resume") if isinstance(config, dict) else None
    return None if named is None else Path(named)


def find_start(run_dir: Path, resume: str, *, replace: bool) -> Start:
    """Where a launch with `--resume never|auto|PATH` begins.

    A PATH within the run folder continues it from there. One from another run begins a branch, or continues it if the folder
    already holds that branch. With auto, damaged checkpoints are named on stderr and passed over.

    Raises:
        UserError: PATH is missing, damaged or not a checkpoint; a run would be overwritten; every checkpoint is damaged.
    """
    if resume == "never":
        if holds_run(run_dir) and not replace:
            raise UserError(
                f"run folder {run_dir} already holds a run; continue it with --resume auto, "
                "set it aside with --replace true, or write elsewhere with --run_dir DIR"
            )
        return Start()
    if resume == "auto":
        if replace:
            raise UserError("--resume auto continues the run folder and --replace true sets it aside: give one of them")
        origin = origin_of(run_dir)
    else:
        path = Path(resume)
        if path.absolute().is_relative_to(run_dir.absolute()):
            if replace:
                raise UserError(f"{path} is in the run folder that --replace true would set aside (--run_dir DIR)")
            return Start(_verified(path), origin_of(run_dir))
        origin = path.resolve()  # a link such as stable.ckpt may point elsewhere tomorrow
        if replace or origin_of(run_dir) != origin:
            start = Start(_verified(path), origin)
            if holds_run(run_dir) and not replace:
                raise UserError(
                    f"run folder {run_dir} already holds another run than a branch of {path}; continue that with --run "
                    f"{run_dir} --resume auto, set it aside with --replace true, or write elsewhere with --run_dir DIR"
                )
            return start
    checkpoint = _newest(run_dir)
    if checkpoint is None and origin is not None:
        checkpoint = _verified(origin)
    return Start(checkpoint, origin)


def _newest(run_dir: Path) -> Path | None:
    good, damaged = newest_good(run_dir / CHECKPOINTS) if (run_dir / CHECKPOINTS).is_dir() else (None, [])
    if good is None and damaged:
        raise UserError("\n".join([*damaged, f"no checkpoint of {run_dir} can be read; start anew with --replace true"]))
    for problem in damaged:
        print(f"warning: {problem} Passed over.", file=sys.stderr)
    return good


def _verified(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"there is no checkpoint {path} to resume from (--resume PATH, or --resume auto)")
    if path.is_dir() and holds_run(path):
        raise UserError(
            f"{path} is a run folder: continue that run with --run {path} --resume auto, or begin another one from one of its "
            f"checkpoints with --resume {path / CHECKPOINTS / 'last.ckpt'}"
        )
    if path.name == CHECKPOINTS and path.is_dir():
        raise UserError(f"{path} holds the checkpoints of a run: name one of them (--resume {path / 'last.ckpt'})")
    if damage := verify(path):
        raise UserError(f"{damage} (--resume auto takes the newest good one)")
    return path


def steps_made(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint that was verified."""
    return int(read(checkpoint, verify=False, lazy=True)["global_step"])


def existing_checkpoint(path: str) -> Path:
    """A checkpoint file given by its path.

    Raises:
        UserError: it does not exist.
    """
    if not Path(path).exists():
        raise UserError(f"there is no checkpoint {path}; give last, best, or a file (--ckpt_path)")
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
