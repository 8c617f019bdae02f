"""Find the files that a user's paths and URLs name, with their sizes and versions. The content of the files is not read."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lit_llm.core.disk import read_json, read_object
from lit_llm.core.errors import UserError, with_flag
from lit_llm.ingest.open_source import file_system, version
from lit_llm.ingest.readers.hub import list_hub
from lit_llm.ingest.remote_errors import one_sentence
from lit_llm.ingest.source import HUB, Source, is_http, is_url, public_name

_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
_AGAIN = ": copy or save the dataset again."

CLEAN_REPORTS = REPORT, REMOVED = "report.json", "removed.jsonl"
"""The files that `clean` writes beside the documents."""

_FINEWEB = "get them by `hf download kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir data/fineweb10B`"
_MAGIC = re.compile(r"[*?\[]")


def dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files, in order, of a folder that `Dataset.save_to_disk` wrote; None for any other folder.

    Raises:
        UserError: The folder has several splits, lacks files, or has an indices mapping, which reorders its rows.
    """
    if (folder / _SPLITS_FILE).is_file():
        raise _several_splits(folder)
    if not (folder / _STATE_FILE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        state = read_json(folder / _STATE_FILE)
    except ValueError as error:
        raise UserError(f"{folder / _STATE_FILE} is damaged, {error}{_AGAIN}") from None
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        return None  # another program's state.json
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} is a dataset with an indices mapping: call flatten_indices() before save_to_disk().")
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, but {folder / _STATE_FILE} lists it: copy or save the dataset again.")
    return files


def _several_splits(folder: Path) -> UserError:
    named = read_object(folder / _SPLITS_FILE, mend=_AGAIN).get("splits")
    splits = [split for split in named if isinstance(split, str)] if isinstance(named, list) else []
    held_out = next((split for split in ("validation", "valid", "val", "dev", "test") if split in splits), None)
    train = "train" if "train" in splits else next((split for split in splits if split != held_out), "SPLIT")
    use = f"--data.train {folder / train}" + (f" --data.val {folder / held_out}" if held_out else "")
    return UserError(f"{folder} is a dataset with the splits {', '.join(splits)}: name them with {use}.")


def is_report(path: str, exists: Callable[[str], bool]) -> bool:
    """Whether ``path`` is a report that `clean` wrote beside its documents. ``exists``: returns whether a path exists."""
    folder, slash, name = path.rpartition("/")
    return name in CLEAN_REPORTS and all(exists(folder + slash + each) for each in (*CLEAN_REPORTS, "part-00000.jsonl"))


class MissingFiles(str):
    """A sentence for the user: a path or URL matches no file, or this machine cannot list its files.

    By its class, callers tell this problem from others: `fit` refuses all, but `plan` goes on without the size of missing data.
    """


def expand(patterns: str | list[str], *, flag: str, folders: bool) -> tuple[list[Path], list[str]]:
    """List the local files that ``patterns`` name, each once, in the order of the patterns; a pattern's matches are sorted.

    A pattern is a file, a glob (``**`` descends into folders), or, with ``folders``, a folder. A folder stands for every
    file below it that is not hidden and not inside a hidden folder. A dataset that `Dataset.save_to_disk` wrote stands for its
    Arrow files. The reports of `clean`, and empty files matched by a glob or a folder, are left out.

    Args:
        flag: the command-line option with the patterns, for the sentences about problems.
        folders: whether a folder is allowed.

    Returns:
        The files, and one sentence for each pattern that cannot be used: a ``MissingFiles`` if no file matches the pattern. A
        file that is given twice, also through a link, is a problem too.
    """
    files: dict[Path, os.stat_result] = {}  # the status of a file is read once: there may be many thousands of files
    problems: list[str] = []
    given = [patterns] if isinstance(patterns, str) else patterns
    if not given:
        problems.append(f"The list of files is empty: give a file{', a folder' if folders else ''} or a glob ({flag}).")
    if "" in given:
        problems.append(f"A path is '': give a file{', a folder' if folders else ''} or a glob; . is this folder ({flag}).")
    for pattern in given:
        if not pattern:
            continue
        try:
            matches, problem = _matches(pattern, flag=flag, folders=folders)
        except UserError as error:  # a saved dataset
            matches, problem = {}, with_flag(str(error), flag)
        except (OSError, RuntimeError, ValueError) as error:  # no permission, too long, an unknown home folder, a NUL byte
            matches, problem = {}, f"{pattern[:80]!r} cannot be read: {getattr(error, 'strerror', None) or error} ({flag})."
        if problem is not None:
            problems.append(problem)
        files.update(matches)
    return list(files), [*problems, *_given_twice(files, given, flag)]


def same_files(ours: Iterable[Path], others: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Pairs of a path in ``ours`` and a path in ``others`` that lead to the same file, also by symbolic or hard links."""
    known = {_identity(os.stat(path)): path for path in ours}
    return [(known[identity], path) for path in others if (identity := _identity(os.stat(path))) in known]


def _given_twice(files: Mapping[Path, os.stat_result], given: list[str], flag: str) -> list[str]:
    """A list with a sentence about the first file that is named twice, by one path or by two paths or links; else empty."""
    for name, count in Counter(str(Path(pattern)) for pattern in given if pattern).items():
        if count > 1:
            return [f"{name} is given twice: remove it once ({flag})."]
    first: dict[tuple[int, int], Path] = {}
    for path, status in files.items():
        before = first.setdefault(_identity(status), path)
        if before is not path:
            return [f"{before} and {path} are the same file: give it once ({flag})."]
    return []


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _file_status(path: Path) -> os.stat_result | None:
    """The ``os.stat`` result of a file; None if the path is a folder or a device, or does not exist."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return status if stat.S_ISREG(status.st_mode) else None


def _matches(pattern: str, *, flag: str, folders: bool) -> tuple[dict[Path, os.stat_result], str | None]:
    """(file → its ``os.stat`` result, for the files that match a pattern; a sentence if the pattern is unusable, else None)."""
    path = Path(pattern).expanduser()
    if (status := _file_status(path)) is not None:
        return {path: status}, None if status.st_size else f"{pattern} is empty: give a file with content ({flag})."
    if path.is_dir() and not folders:
        return {}, f"{pattern} is a folder: give a pattern such as {os.path.join(pattern, '*.bin')} ({flag})."
    matches = _below(path) if path.is_dir() else _glob(path)
    files = [file for file in matches if not is_report(str(file), os.path.isfile)]
    statuses = {file: _file_status(file) for file in files}
    if strange := next((file for file, status in statuses.items() if status is None and not file.is_dir()), None):
        return {}, f"{strange} is a pipe, a device, or a link to nothing: remove it, or name the files ({flag})."
    usable = {file: status for file, status in statuses.items() if status is not None and status.st_size > 0}
    mend = "" if folders else f": {_FINEWEB}" if "fineweb10B" in pattern else ": write shards with prepare"
    return usable, None if usable else MissingFiles(f"No non-empty file matches {pattern}{mend} ({flag}).")


def _glob(pattern: Path) -> list[Path]:
    matches = glob.glob(str(pattern), recursive=True)
    return [Path(match) for match in sorted(matches, key=lambda match: match.split(os.sep))]  # as paths sort, and faster


def _below(folder: Path) -> list[Path]:
    """The files below a folder that are not hidden, sorted. Of a dataset of `save_to_disk`, only the Arrow files are listed."""
    files = sorted(file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
    for place in [file.parent for file in files if file.name in (_SPLITS_FILE, _STATE_FILE)]:
        with_rows = dataset_files(place)
        if with_rows is not None:
            files = [file for file in files if file.parent != place or file in with_rows]
    return files


def list_sources(patterns: str | list[str], *, flag: str) -> tuple[list[Source], list[str]]:
    """List the files that ``patterns`` name, each once: first the files on this machine, then remote files.

    A pattern is a file, a folder or a glob, on this machine (``expand``) or as a URL (s3://, gs://, hf://, https:// or another
    protocol of fsspec), or a dataset of the Hugging Face hub (hub:OWNER/NAME, see ``readers.hub``). Local files,
    and likewise remote files, are in the order of the patterns; the matches of one pattern are sorted. Hidden and empty files
    of a folder or glob are left out.

    Args:
        flag: the command-line option with the patterns, for the sentences about problems.

    Returns:
        The files, and one sentence for each pattern that cannot be used: a ``MissingFiles`` if no file matches the
        pattern, or if this machine cannot list the pattern's files.
    """
    given = [patterns] if isinstance(patterns, str) else patterns
    remote = [pattern for pattern in given if is_url(pattern) or pattern.startswith(HUB)]
    local = [pattern for pattern in given if pattern not in remote]
    sources: dict[str, Source] = {}
    problems: list[str] = []
    if local or not remote:
        files, problems = expand(local, flag=flag, folders=True)
        sources = {str(file): Source.local(file) for file in files}
    for pattern in dict.fromkeys(remote):
        if remote.count(pattern) > 1:
            problems.append(f"{public_name(pattern)} is given twice: remove it once ({flag}).")
        try:
            with one_sentence(pattern):
                matches = list_hub(pattern) if pattern.startswith(HUB) else _list_remote(pattern)
        except UserError as error:
            problems.append(MissingFiles(with_flag(str(error), flag)))
            continue
        if not matches:
            problems.append(MissingFiles(f"No non-empty file matches {public_name(pattern)} ({flag})."))
        sources.update((source.path, source) for source in matches)
    return list(sources.values()), problems


def _list_remote(pattern: str) -> list[Source]:
    """The files that one URL names (a file, a folder or a glob), sorted.

    Raises:
        UserError: The protocol cannot be used, or the file is empty.
        Exception: Another error of fsspec, such as a refusal by the server, which ``remote_errors`` turns into a sentence.
    """
    fs, path = file_system(pattern)
    http = is_http(pattern)
    magic = _MAGIC.search(path.partition("?")[0] if http else path)
    if magic:
        root = path[: magic.start()].rpartition("/")[0]
        if not root:
            raise UserError(f"{public_name(pattern)} searches the whole server: give a bucket before the first wildcard.")
        listing = fs.glob(path, detail=True)
    else:
        info = fs.info(path)
        # A URL over HTTP is a folder if it ends with a slash, or the server redirects to the same URL with a slash.
        slash = http and (path.endswith("/") or urlsplit(str(info.get("url", ""))).path.endswith("/"))
        if info["type"] != "directory" and not slash:
            if info.get("size") == 0:
                raise UserError(f"{public_name(pattern)} is empty: give a file with content.")
            return [_source(fs, path, info)]
        root = path.rstrip("/")
        listing = fs.find(f"{root}/" if http else root, detail=True)
    if http and not any(listing.values()):  # without a listing, fsspec finds only the folder itself
        raise UserError(f"{public_name(pattern)}: the server lists no files; give the URL of each file.")
    sources = []
    for name in sorted(listing):
        info = listing[name]
        hidden = any(part.startswith(".") for part in Path(name.removeprefix(root)).parts)
        if info["type"] == "directory" or hidden or (http and re.search(r"[?#]", name)):
            continue
        if is_report(name, lambda other: other in listing or fs.exists(other)):
            continue
        if info.get("size") is None or not version(info):  # a listing over HTTP has names only
            info = fs.info(name)
        source = _source(fs, name, info)
        if info.get("size") != 0:
            sources.append(source)
    return sources


def _source(fs: Any, name: str, info: dict[str, Any]) -> Source:
    return Source(fs.unstrip_protocol(name), info.get("size") or 0, version(info))
