"""The files that a user's paths and URLs name, with their sizes and versions. Their content is not read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lit_llm.core.errors import UserError
from lit_llm.ingest.open_source import file_system, version
from lit_llm.ingest.paths import MissingFiles, expand, is_report
from lit_llm.ingest.readers.hub import list_hub
from lit_llm.ingest.remote_errors import one_sentence
from lit_llm.ingest.source import HUB, Source, is_http, is_url, public_name

_MAGIC = re.compile(r"[*?\[]")


def list_sources(patterns: str | list[str], *, flag: str) -> tuple[list[Source], list[str]]:
    """The files that ``patterns`` name, each once: first those of this machine, then remote ones.

    A pattern is a file, a folder or a glob, here (``paths.expand``) or as a URL (s3://, gs://, hf://, https:// or another
    protocol of fsspec), or a dataset of the Hugging Face hub (hub:OWNER/NAME, see ``readers.hub``). The order is that of the
    patterns; the matches of one pattern are sorted. Hidden and empty files of a folder or glob are left out.

    Args:
        flag: the option that holds the patterns; problems name it.

    Returns:
        The files, and one sentence for each pattern that cannot be used: a ``MissingFiles`` if nothing matches it, or if it
        cannot be listed from this machine.
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
                found = list_hub(pattern) if pattern.startswith(HUB) else _list_remote(pattern)
        except UserError as error:
            problems.append(MissingFiles(f"{str(error).removesuffix('.')} ({flag})."))
            continue
        if not found:
            problems.append(MissingFiles(f"No non-empty file matches {public_name(pattern)} ({flag})."))
        sources.update((source.path, source) for source in found)
    return list(sources.values()), problems


def _list_remote(pattern: str) -> list[Source]:
    """The files of one URL, sorted.

    Raises:
        UserError: The protocol cannot be used, or the file is empty.
        Exception: The server refused; see ``remote_errors``.
    """
    fs, path = file_system(pattern)
    http = is_http(pattern)
    magic = _MAGIC.search(path.partition("?")[0] if http else path)
    if magic:
        root = path[: magic.start()].rpartition("/")[0]
        if not root:
            raise UserError(f"{public_name(pattern)} searches the whole server: give a bucket before the first wildcard.")
        found = fs.glob(path, detail=True)
    else:
        info = fs.info(path)
        if not (info["type"] == "directory" or (http and _is_folder(path, info))):
            if info.get("size") == 0:
                raise UserError(f"{public_name(pattern)} is empty: give a file with content.")
            return [_source(fs, path, info)]
        root = path.rstrip("/")
        found = fs.find(f"{root}/" if http else root, detail=True)
    if http and not any(found.values()):  # without a listing, fsspec finds the folder itself and knows nothing of it
        raise UserError(f"{public_name(pattern)}: the server lists no files; give the URL of each file.")
    sources = []
    for name in sorted(found):
        info = found[name]
        hidden = any(part.startswith(".") for part in Path(name.removeprefix(root)).parts)
        if info["type"] == "directory" or hidden or (http and re.search(r"[?#]", name)):
            continue
        if is_report(name, lambda other: other in found or fs.exists(other)):
            continue
        if info.get("size") is None or not version(info):  # a listing over HTTP has names only
            info = fs.info(name)
        source = _source(fs, name, info)
        if info.get("size") != 0:
            sources.append(source)
    return sources


def _source(fs: Any, name: str, info: dict[str, Any]) -> Source:
    return Source(fs.unstrip_protocol(name), info.get("size") or 0, version(info))


def _is_folder(url: str, info: dict[str, Any]) -> bool:
    """Whether a URL over HTTP is a folder: it ends with a slash, or the server redirects to the same URL with a slash."""
    return url.endswith("/") or urlsplit(str(info.get("url", ""))).path.endswith("/")
