"""The checkpoint format: a folder that is either complete or absent, with checksums of its files.

    step-00000500.ckpt/
        checkpoint.pt    torch.save of Lightning's dict
        shard-….pt       with --sharded_checkpoints: a rank's local parts of DTensors (lit_llm.checkpoint.sharded)
        manifest.json    step, tokens, versions, size and SHA-256 of every file, and a checksum of the manifest itself
        damaged.json     only if ranks that loaded the checkpoint found a changed shard (lit_llm.checkpoint.manifest)

A save writes `.step-00000500.ckpt.partial`, fsyncs every file and renames the folder. A folder of the same name is renamed to
`.step-00000500.ckpt.replaced` first; readers use that folder until the new one has the name. A deletion starts by renaming to
`.step-00000500.ckpt.removed`. So a process can be killed between any two system calls: a visible checkpoint is always complete,
and the next save deletes hidden folders that a killed process left.

Only one run at a time may write to a folder (its rank 0, or all its ranks together): a second run would delete the first run's
partial folder. `lit_llm.runs.lock` ensures that.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint

from lit_llm.checkpoint.crash_safe import HashingFile, fsync_path, make_folder, sha256_of
from lit_llm.checkpoint.manifest import (
    DAMAGED,
    DATA,
    MANIFEST,
    encode,
    intact_manifest,
    make_manifest,
    manifest_in,
    recorded_damage,
)
from lit_llm.checkpoint.schema import content_problem, part_problem
from lit_llm.checkpoint.sharded import join
from lit_llm.core.disk import delete, naming, real_path
from lit_llm.core.errors import UserError, first_line, library_errors, need

T = TypeVar("T")


# -- writing ------------------------------------------------------------------------------------------------------------


def write(checkpoint: dict[str, Any], path: str | Path, *, parts: dict[str, Any] | None = None, group: Any = None) -> None:
    """Write `checkpoint` to the folder `path`; return when it is on the disk (fsync), not only in the page cache.

    Args:
        checkpoint: Lightning's dict. Its entries `global_step` and `tokens` are copied to the manifest.
        parts: This rank's parts of DTensors, for which `checkpoint` has placeholders (`sharded.split`).
        group: The process group of the ranks that write parts. All its ranks call this function; rank 0 of the group writes
            `checkpoint`. On any device, it must be a CPU group (gloo), which no other code uses at the same time.

    Raises:
        OSError: The disk is full, read-only, … for one of the ranks. `path` is unchanged, and the partial folder is deleted.
        UserError: `checkpoint` holds objects that `weights_only` loading refuses. `path` is unchanged.
    """
    path = Path(path)
    partial = _hidden(path, "partial")
    rank = 0 if group is None else dist.get_rank(group)

    def begin() -> None:
        if rank == 0:
            make_folder(path.parent)
            clear_leftovers(path.parent, path.name)
            partial.mkdir()

    def save() -> dict[str, dict[str, Any]]:
        contents = {DATA: checkpoint} if rank == 0 else {}
        if parts is not None:
            ranks = 1 if group is None else dist.get_world_size(group)
            contents[f"shard-{rank:05d}-of-{ranks:05d}.pt"] = parts
        saved = {}
        for name, content in contents.items():
            with HashingFile(partial / name) as file:
                torch.save(content, cast(IO[bytes], file))
            loaded = _load(partial / name, path)  # raises now, not when the run is resumed, if loading refuses the content
            if name == DATA:
                _checked(loaded, path)
            saved[name] = {"bytes": file.size, "sha256": file.sha256.hexdigest()}
        return saved

    def publish(files: dict[str, dict[str, Any]]) -> None:
        if rank == 0:
            with HashingFile(partial / MANIFEST) as file:
                file.write(encode(make_manifest(checkpoint, files, path.parent)))
            fsync_path(partial)
            _publish(partial, path)

    try:
        _together(group, begin)
        files = {name: entry for saved in _together(group, save) for name, entry in saved.items()}
        _together(group, lambda: publish(files))
    except BaseException:
        if rank == 0:
            delete(partial)
        raise


def _together(group: Any, work: Callable[[], T]) -> list[T]:
    """Call `work`, and return the results of all ranks of a group, by rank. All its ranks call this. Group None: one rank.

    Raises:
        OSError: `work` failed on another rank. The rank on which `work` failed raises its original error.
    """
    if group is None:
        return [work()]
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (result, error and f"rank {dist.get_rank(group)}: {error}"), group=group)
    if error is not None:
        raise error
    for _, failed in outcomes:
        if failed:
            raise OSError(failed)
    return [each for each, _ in outcomes]


def remove(path: str | Path) -> None:
    """Delete a checkpoint folder or file. If the process is killed meanwhile, no incomplete checkpoint is left at `path`.

    Raises:
        OSError: The checkpoint cannot be renamed, for example on a read-only disk.
    """
    path = Path(path)
    if not os.path.lexists(path):
        return
    removed = _hidden(path, "removed")
    delete(removed)
    os.rename(path, removed)
    delete(removed)


def _publish(partial: Path, path: Path) -> None:
    if os.path.lexists(path):
        aside = _hidden(path, "replaced")
        os.rename(path, aside)
        try:
            os.rename(partial, path)
        except OSError:
            os.rename(aside, path)
            raise
        fsync_path(path.parent)
        delete(aside)
    else:
        os.rename(partial, path)
        fsync_path(path.parent)


def _hidden(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}")


def _shown(hidden: Path) -> Path:
    return hidden.with_name(hidden.name[1:].rpartition(".")[0])


def clear_leftovers(folder: Path, name: str = "last.ckpt") -> None:
    """Delete the hidden files and folders that a process, killed during a save or a deletion, left in `folder`, for the
    checkpoints `*.ckpt` and `name`. A checkpoint that was to be replaced gets its name back if the new one is missing."""
    roles = ("partial", "removed", "replaced")
    leftovers = {role: {*folder.glob(f".*.ckpt.{role}"), _hidden(folder / name, role)} for role in roles}
    for aside in leftovers["replaced"]:
        if os.path.lexists(aside) and not os.path.lexists(_shown(aside)):
            os.rename(aside, _shown(aside))
    for leftover in set().union(*leftovers.values()):
        delete(leftover)


# -- reading ------------------------------------------------------------------------------------------------------------


def read(path: str | Path, *, verify: bool = True, lazy: bool = False) -> dict[str, Any]:
    """Load the dict of a checkpoint folder, or of a plain Lightning `.ckpt` file, with `weights_only=True`.

    Files are memory-mapped, so that processes on one machine share their pages.

    Args:
        path: The checkpoint, or a link to it.
        verify: Compare all files with their checksums first, which reads each file once (see `damage`).
        lazy: Leave tensors that are in shards on disk, as `sharded.TensorOnDisk`.

    Raises:
        UserError: The checkpoint is missing, in another format, or damaged.
    """
    location = _locate(path)
    if verify and (problem := damage(location)):
        raise UserError(problem)

    def load(name: str) -> dict[str, Any]:
        parts = _load(location / name, location)
        if problem := part_problem(parts):
            raise UserError(f"{location / name} {problem}: restore the checkpoint, or use another one")
        return parts

    shards = shard_names(location)  # a shard that the manifest does not list is not read
    content = _checked(_load(_data(location), location), location)
    return join(content, shards, load, lazy=lazy) if shards else content


def read_values(path: str | Path) -> dict[str, Any]:
    """The dict of a checkpoint, with tensors on the meta device and placeholders for tensors in shards.

    Only the manifest's own checksum is compared. No shard is read, so damage of shards and their number do not matter.
    No file stays open.

    Raises:
        UserError: The checkpoint is missing or in another format, its manifest is damaged, or checkpoint.pt cannot be loaded.
    """
    location = _locate(path)
    shard_names(location)  # refuses a damaged manifest
    return _checked(_load(_data(location), location, map_location="meta"), location, has_data=False)


def _data(location: Path) -> Path:
    return location / DATA if location.is_dir() else location


def _checked(content: dict[str, Any], location: Path, *, has_data: bool = True) -> dict[str, Any]:
    """Return `content`, a checkpoint's dict. Raise a UserError if a value breaks a rule of `lit_llm.checkpoint.schema`."""
    if problem := content_problem(content, has_data=has_data):
        raise UserError(f"checkpoint {location} {problem}: restore it, or use another one")
    return content


def damage(path: str | Path, *, shards: bool = True) -> str | None:
    """Verify the checkpoint at `path`. Returns a sentence that says why it cannot be used, or None if it is good.

    The files of a folder are compared with the checksums in the folder's manifest. A plain Lightning file has no manifest;
    the checksums inside its zip archive cover its tensors and its structure.

    Args:
        shards: Hash the shards, too, and delete damaged.json if they are good. False: compare only the sizes of shards, and
            read damaged.json, for ranks that hash shards when they load them (`lit_llm.checkpoint.shared_verification`).
    """
    try:
        location = _locate(path)
        return _problem_of_folder(location, shards=shards) if location.is_dir() else _problem_of_file(location)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"checkpoint {path} cannot be read: {error.strerror}."


def damage_before_load(path: str | Path, *, ranks: int) -> str | None:
    """Verify a checkpoint that the user named, which `ranks` ranks will load. Returns the damage as a sentence, or None.

    If `ranks` is above 1, the ranks hash the shards when they load them, not here. But if a damaged.json exists, the shards are
    hashed here, because the checkpoint may have been repaired.
    """
    return damage(path, shards=ranks == 1 or recorded_damage(Path(path)) is not None)


def shard_names(path: str | Path) -> list[str]:
    """Names of a checkpoint's shards, in the order of the ranks that wrote them; empty for a plain Lightning file.

    Raises:
        UserError: The checkpoint is missing, or its manifest is missing, damaged or of another version of the format.
    """
    location = _locate(path)
    files = manifest_in(location)["files"] if location.is_dir() else {}
    return sorted(name for name in files if name != DATA)


def shard_problem(path: str | Path, name: str) -> str | None:
    """How the shard `name` differs from its size or SHA-256 in the manifest, as the end of a sentence; None if it is intact."""
    folder = _locate(path)
    try:
        return _file_problem(folder, name, manifest_in(folder)["files"][name])
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, as a dict, checked against the checksum in it. No other file is read.

    Raises:
        UserError: The folder does not exist, or its manifest is missing, damaged or of another version of the format.
    """
    return manifest_in(_locate(path))


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder from newest to oldest, damaged ones included. Of folders, only manifests are read.

    The newest checkpoint is the last one saved: manifests number the saves. Plain Lightning files are sorted by step.
    """
    folder = Path(folder)
    paths = {p for p in folder.glob("*.ckpt") if not p.is_symlink()}
    paths |= {p for p in folder.glob(".*.ckpt.replaced") if not os.path.lexists(_shown(p))}
    last = folder / "last.ckpt"
    if last.exists() and real_path(last) not in {real_path(p) for p in paths}:
        paths.add(real_path(last))  # in another folder
    return sorted(paths, key=_age, reverse=True)


def newest_good(folder: str | Path, *, shards: bool = True) -> tuple[Path | None, list[str]]:
    """(newest undamaged checkpoint in a folder, or None; one sentence for each damaged one that is, or may be, newer than it).

    `shards`: whether shards are hashed, as for `damage`.
    """
    damaged: list[str] = []
    for candidate in checkpoints_in(folder):
        problem = damage(candidate, shards=shards)
        if problem is None:
            return candidate, damaged
        damaged.append(problem)
    return None, damaged


def _age(path: Path) -> tuple[float, int]:
    """(number of the save, step) of a checkpoint: the sort key from oldest to newest. The number is 0 for a Lightning file, and
    infinite for a folder without an intact manifest."""
    in_name = re.search(r"step[-=](\d+)", path.name)
    step = int(in_name[1]) if in_name else -1
    if path.is_dir():
        manifest = intact_manifest(path)
        if manifest is None:
            return math.inf, step  # it may be the newest, so it has to be reported
        return manifest["serial"], step if manifest["step"] is None else manifest["step"]
    with contextlib.suppress(ValueError):
        step = _load(path, path).get("global_step", step)
    return 0, step


def _load(file: Path, name: Path, *, map_location: str = "cpu") -> dict[str, Any]:
    """The dict in `file`, loaded with `weights_only=True` and memory-mapped. `name`: the checkpoint, for messages.

    If the file has quantized optimizer states of torchao, an optional package, torchao is imported, which registers its
    classes as safe to load.
    """
    load = partial(torch.load, file, weights_only=True, map_location=map_location, mmap=True)
    with naming(file), library_errors(f"{name} cannot be loaded"):
        try:
            content = load()
        except pickle.UnpicklingError as error:
            unsafe = get_unsafe_globals_in_checkpoint(file)
            if not unsafe or not all(each.startswith("torchao.optim.") for each in unsafe):
                unsafe_global = unsafe[0] if unsafe else "something"
                raise UserError(
                    f"{name} cannot be loaded without running code from it: it holds {unsafe_global} where only tensors "
                    "and plain values (numbers, strings, lists, dicts) are allowed."
                ) from error
            need("torchao.optim", what=f"the optimizer state in {name}")
            content = load()
    if not isinstance(content, dict):
        raise UserError(f"{name} is not a checkpoint of lit_llm or of Lightning: it holds no dict.")
    return content


def _locate(path: str | Path) -> Path:
    path = Path(path)
    if path.exists():
        return path
    if path.name.startswith(".") and path.name.endswith(".replaced") and _shown(path).exists():
        return _shown(path)  # the folder got its name back after it was chosen
    aside = _hidden(real_path(path), "replaced")  # the process was killed while replacing it
    if aside.exists():
        return aside
    raise UserError(f"there is no checkpoint {path}.")


def _problem_of_folder(folder: Path, *, shards: bool) -> str | None:
    manifest = manifest_in(folder)
    if not shards and (problem := recorded_damage(folder)):
        return problem
    for name, expected in manifest["files"].items():
        if problem := _file_problem(folder, name, expected, hashed=shards or name == DATA):
            return f"checkpoint {folder} is damaged: {problem}."
    if shards:
        with contextlib.suppress(OSError):
            (folder / DAMAGED).unlink()
    return None


def _file_problem(folder: Path, name: str, expected: dict[str, Any], *, hashed: bool = True) -> str | None:
    if not (folder / name).is_file():
        return f"{name} is missing"
    if (size := (folder / name).stat().st_size) != expected["bytes"]:
        return f"{name} has {size} bytes, it was written with {expected['bytes']}"
    is_same = not hashed or sha256_of(folder / name) == expected["sha256"]
    return None if is_same else f"the contents of {name} have changed since it was written"


def _problem_of_file(file: Path) -> str | None:
    if not zipfile.is_zipfile(file):
        return f"{file} is not a checkpoint, or it is damaged: torch.save writes zip files and this is not one."
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:  # a header that makes no sense
        return f"checkpoint {file} is damaged: {first_line(error)}."
    if bad is not None:
        return f"checkpoint {file} is damaged: the contents of {bad} have changed since it was written."
    if "state_dict" not in _load(file, file):
        return f"{file} is not a checkpoint of lit_llm or of Lightning: it has no 'state_dict'."
    return None
