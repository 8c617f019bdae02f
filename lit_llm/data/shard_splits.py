"""Open the splits train, val and test of token shards: a folder that ``prepare`` wrote, or the files that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lit_llm.core.errors import UserError, noting, with_flag
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.paths import MissingFiles, expand, same_files
from lit_llm.ingest.shard_manifest import META_FILE, Manifest, SplitInfo
from lit_llm.ingest.token_parts import PartCounts

SPLITS = ("train", "val", "test")


@dataclass
class ShardSource:
    """The settings that say where token shards are.

    Args:
        path: a folder that ``prepare`` wrote, instead of ``train``, ``val`` and ``test``.
        train: files, globs, or a list of these, in the layout of llm.c or Megatron.
        val: the same, for validation.
        test: the same, for ``test``.
        headerless: the files hold bare uint16 tokens, as nanoGPT writes them.
    """

    path: str | None = None
    train: str | list[str] | None = None
    val: str | list[str] | None = None
    test: str | list[str] | None = None
    headerless: bool = False


@dataclass
class ShardSplits:
    """Record of the opened splits of a source of shards, and one sentence for each problem of the source."""

    streams: dict[str, TokenStream] = field(default_factory=dict)
    """Split → the stream of its tokens, for the splits that could be opened."""
    problems: list[str] = field(default_factory=list)
    manifests: dict[str, tuple[Path, Manifest]] = field(default_factory=dict)
    """Split → folder and manifest, for the splits whose files are all listed in one manifest."""

    def whole_splits(self) -> dict[str, SplitInfo]:
        """Split → its record in the manifest (documents, bytes, tokens), for splits opened with all shards of that record."""
        files = {name: [path.name for path in self.streams[name].paths] for name in self.manifests}
        splits = {name: manifest.split_with(files[name]) for name, (_, manifest) in self.manifests.items()}
        return {name: split for name, split in splits.items() if split is not None}


def text_sizes(splits: Iterable[Mapping[str, SplitInfo]]) -> dict[str, PartCounts]:
    """Split → counts of documents, bytes and tokens, summed over sources. ``splits``: per source, split → manifest record."""
    sizes: dict[str, PartCounts] = {}
    for each in splits:
        for name, split in each.items():
            sizes.setdefault(name, PartCounts()).add(split)
    return sizes


def _in_folder(path: str, settings: str, required: Collection[str]) -> ShardSplits:
    """Find the splits in the folder ``path``, which ``prepare`` wrote, from its manifest. No shard is opened.

    ``settings`` and ``required`` are as in `splits_of`."""
    splits, flag = ShardSplits(), f"{settings}.path"
    manifest = problem = None
    try:
        folder = Path(path).expanduser()
        if not path:
            problem = f"path is empty, but must be a folder that prepare wrote ({flag})."
        elif not folder.exists():
            problem = MissingFiles(f"{path} is not found: give a folder that prepare wrote ({flag}).")
        elif not folder.is_dir():
            problem = f"{path} is not a folder: give a folder that prepare wrote ({flag})."
        elif (manifest := Manifest.read(folder)) is None:
            problem = (
                f"{folder} has no {META_FILE} that lists its shards: prepare the data again, or give the files, such as "
                f"{settings}.train '{folder}/train_*.bin' {settings}.val '{folder}/val_*.bin'."
            )
    except UserError as error:
        problem = with_flag(str(error), flag)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror} ({flag})."
    if problem is not None:
        return ShardSplits(problems=[problem])
    assert manifest is not None
    for name in SPLITS:
        split = manifest.splits.get(name)
        if split is not None and split.shards:
            splits.manifests[name] = folder, manifest
            _add(splits, name, flag, partial(TokenStream.listed, folder, manifest, [shard.file for shard in split.shards]))
        elif name in required:
            splits.problems.append(f"{folder} has no {name} shards: prepare the data again with {name} text ({flag}).")
    return splits


def path_problems(source: ShardSource, flag: str) -> list[str]:
    """A sentence for each setting that cannot be combined with ``source.path``, a folder that ``prepare`` wrote.

    Args:
        flag: the prefix of the settings' flags in the sentences, such as "--data".
    """
    problems = []
    others = [f"{flag}.{name}" for name in SPLITS if getattr(source, name) is not None]
    if source.path is not None and others:
        problems.append(f"{flag}.path is a folder with all splits: it cannot be combined with {', '.join(others)}.")
    if source.path is not None and source.headerless:
        problems.append(f"{flag}.path is a folder of shards with headers: remove {flag}.headerless.")
    return problems


def splits_of(source: ShardSource, *, settings: str = "--data", required: Collection[str] = ("train", "val")) -> ShardSplits:
    """Open the splits of a source of token shards. The result has problems as sentences; none is raised.

    Args:
        settings: the prefix of the flags that problems name, such as "--data.sources.web".
        required: the splits whose absence is a problem.
    """
    if source.path is not None:
        return _in_folder(source.path, settings, required)
    return _of_files({name: getattr(source, name) for name in SPLITS}, source.headerless, settings, required)


def no_split_text(split: str, of: str = "") -> str:
    """The error message for a folder of ``prepare`` that lacks ``split``. ``of``: words after "No … text": " in any source"."""
    return f"No {split} text{of}: prepare the data again with it (prepare … --data.{split} FILE)."


def _of_files(
    patterns: Mapping[str, str | list[str] | None], headerless: bool, settings: str, required: Collection[str]
) -> ShardSplits:
    """Open the splits that files and globs name. A file that a manifest lists is not opened. ``patterns``: split → files."""
    splits = ShardSplits()
    files: dict[str, list[Path]] = {}
    manifests: dict[Path, Manifest | None] = {}  # folder → its manifest, which is read once
    for name in SPLITS:
        setting = patterns[name]
        if setting is None:
            if name in required:
                splits.problems.append(
                    f"No {name} shards: give {settings}.{name}, or a folder that prepare wrote ({settings}.path)."
                )
            continue
        files[name], problems = expand(setting, flag=f"{settings}.{name}", folders=False)
        splits.problems += problems
        if problems:
            continue
        folders = {path.parent for path in files[name]}
        folder = folders.pop() if len(folders) == 1 and not headerless else None
        if folder is not None and folder not in manifests:
            manifests[folder] = None
            with noting(splits.problems, f"{settings}.{name}"):
                manifests[folder] = Manifest.read(folder)
        manifest = None if folder is None else manifests[folder]
        names = [path.name for path in files[name]]
        if folder is not None and manifest is not None and manifest.shards.keys() >= set(names):
            splits.manifests[name] = folder, manifest
            _add(splits, name, f"{settings}.{name}", partial(TokenStream.listed, folder, manifest, names))
        else:
            _add(splits, name, f"{settings}.{name}", partial(TokenStream, files[name], headerless=headerless))
    if not splits.problems:
        held_out = {path: name for name in ("test", "val") for path in files.get(name, [])}
        for name, path in {held_out[path]: path for _, path in reversed(same_files(files.get("train", []), held_out))}.items():
            splits.problems.append(f"{path} is in both {settings}.train and {settings}.{name}: remove it from one of them.")
    tokenizers = {manifest.tokenizer for _, manifest in splits.manifests.values()}
    if len(tokenizers) > 1:
        named = " and ".join(dict.fromkeys(str(folder) for folder, _ in splits.manifests.values()))
        splits.problems.append(
            f"The shards in {named} were made with different tokenizers: prepare them with one ({settings}.train, "
            f"{settings}.val)."
        )
    return splits


def _add(splits: ShardSplits, name: str, flag: str, open_stream: Callable[[], TokenStream]) -> None:
    with noting(splits.problems, flag):
        splits.streams[name] = stream = open_stream()
        if len(stream) < 2:
            splits.problems.append(f"The {name} shards hold a single token, but at least two are needed ({flag}).")
