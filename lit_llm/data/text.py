"""Train on text files. They are tokenised once into a cache of token shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.core.errors import UserError
from lit_llm.core.number_domain import Domain
from lit_llm.data.corpus import Corpus
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.shard_splits import listed_stream, text_sizes
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.chat import ChatTemplate
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.listing import list_sources
from lit_llm.ingest.paths import same_files
from lit_llm.ingest.progress import ProgressLog
from lit_llm.ingest.readers import DocumentReader, ReadSettings
from lit_llm.ingest.selection import Selection
from lit_llm.ingest.shard_manifest import META_FILE, Manifest
from lit_llm.ingest.shard_pipeline import FORMAT, Summary, ingest
from lit_llm.ingest.source import Source
from lit_llm.ingest.split import hold_out
from lit_llm.ingest.token_parts import PARTS
from lit_llm.tokenizers import Bytes, Tokenizer, load_tokenizer

_CACHE_VERSION = 2  # increment when the same text and tokenizer would give different shards
_SHARD_TOKENS = 100_000_000
_MAX_PROBLEMS = 5


class TextDataModule(TokenDataModule):
    """Base of the data modules that tokenise text. A subclass returns the inputs.

    Tokens are cached as shards in ``<cache_dir>/tokens``. The cache key depends on the inputs (paths, sizes, versions, ranges),
    their split, and the tokenizer.

    Args:
        tokenizer: ``Bytes`` (the default), ``Characters``, ``BPE`` or ``TokenizerJSON``.
        cache_dir: folder of the token cache. None: ``$LIT_LLM_CACHE``, else ``~/.cache/lit_llm``.
        kwargs: the arguments of ``TokenDataModule``.
    """

    # For inputs without a split: the share of their documents to hold out, and whether training documents are left out that
    # nearly repeat held-out ones.
    val_fraction = 0.0
    drop_near_duplicates = False
    # Writes documents that are conversations.
    chat_template: ChatTemplate | None = None

    def __init__(self, *, tokenizer: Tokenizer | None = None, cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._source_tokenizer = tokenizer or Bytes()
        self.cache_dir = cache_dir
        self._verified: Path | None = None  # the cache that this process has made or checked

    @abstractmethod
    def inputs(self) -> list[Input]:
        """What to tokenise, in order. Called only if there are no source problems."""

    def source_files(self) -> list[Path]:
        return list(dict.fromkeys(Path(one.source.path) for one in self.inputs() if one.source.is_local))

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The configured tokenizer. After ``setup``, ``tokenizer`` is the one in use, whose vocabulary has been learned."""
        return self._source_tokenizer

    def tokenise(self, out: Path, *, shard_tokens: int, workers: int = 0, progress: ProgressLog | None = None) -> Summary:
        """Write token shards into ``out``, which may hold what an interrupted call has left.

        Args:
            shard_tokens: tokens per shard.
            workers: processes. 0: this process.

        Raises:
            UserError: the text cannot be read, or a split is empty.
            OSError: the disk refused.
        """
        summary = ingest(
            self.inputs(),
            self.source_tokenizer,
            out,
            shard_tokens=shard_tokens,
            val_fraction=self.val_fraction,
            drop_near_duplicates=self.drop_near_duplicates,
            chat_template=self.chat_template,
            workers=workers,
            progress=progress,
        )
        if summary.invalid:
            more = f" and {len(summary.invalid) - 1:,} more files" if len(summary.invalid) > 1 else ""
            rank_zero_warn(
                f"{summary.invalid[0]}{more} are not valid UTF-8: invalid bytes are read as U+FFFD. "
                "Convert the files, or use --data.tokenizer Bytes, which keeps every byte."
            )
        return summary

    def prepare_data(self) -> None:
        """Tokenise into the cache, unless it has the tokens. Several processes may run this at the same time.

        Raises:
            UserError: The cache cannot be written, or the text cannot be read.
        """
        self.raise_problems()
        try:
            folder = self._cache_folder()
            if folder.exists():
                if folder == self._verified or (damage := self._damage(folder)) is None:
                    self._verified = folder
                    return
                rank_zero_warn(f"The token cache {folder} is damaged, so the text is tokenised again: {damage}")
                shutil.rmtree(folder)
            self._fill(folder)
            self._verified = folder
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            raise UserError(
                f"The text cannot be tokenised into the cache {self._cache_root()}: {where}{error.strerror or error} "
                "(--data.cache_dir, or the variable LIT_LLM_CACHE)."
            ) from error

    def _fill(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.parent / f"tmp-{uuid.uuid4().hex}"
        temporary.mkdir()  # not tempfile's: users may share a cache
        try:
            self.tokenise(temporary, shard_tokens=_SHARD_TOKENS)
            shutil.rmtree(temporary / PARTS)
            os.replace(temporary, folder)
        except OSError:
            if not folder.exists():  # otherwise another process has written the same content
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def open_corpus(self) -> Corpus:
        folder = self._cache_folder()
        if not folder.exists():
            self.prepare_data()
        if folder != self._verified and (damage := self._damage(folder)) is not None:
            raise UserError(f"The token cache is damaged: delete the folder {folder}, and it is made again. {damage}")
        manifest = Manifest.read(folder)
        assert manifest is not None, "the cache is not damaged"
        streams = {
            name: listed_stream(folder, manifest, [shard.file for shard in split.shards])
            for name, split in manifest.splits.items()
        }
        return Corpus(
            streams,
            manifest.vocab_size,
            load_tokenizer(folder),
            text_sizes=text_sizes([manifest.splits]),
            eos_id=manifest.eos_id,
            bos_id=manifest.bos_id,
        )

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a folder of the cache. Token ids are checked, as far as `TokenStream.scan` reads them."""
        try:
            manifest = Manifest.read(folder)
            if manifest is None:
                return f"{folder / META_FILE} is missing."
            if manifest.vocab_size != load_tokenizer(folder).vocab_size:
                return f"{folder / META_FILE} and its tokenizer have different vocabularies."
            for name, split in manifest.splits.items():
                if split.tokens:
                    stream = TokenStream([folder / shard.file for shard in split.shards])
                    if len(stream) != split.tokens:
                        return f"the {name} shards have {len(stream)} tokens instead of {split.tokens}."
                    stream.scan(manifest.vocab_size)
        except (UserError, OSError) as error:
            return str(error)
        return None

    def held_out_text(self) -> Iterator[bytes]:
        """The bytes of the validation text in pieces, for comparing its compression with other programs."""
        for one in self.inputs():
            if one.split in (None, "val"):
                for piece in Selection(self.val_fraction).pieces(one):
                    if piece.split == "val":
                        yield piece.text

    def cached_manifest(self) -> Manifest | None:
        """What the cache says about the tokenised text; None without an undamaged cache."""
        folder = self._cache_folder()
        return Manifest.read(folder) if folder.exists() and self._damage(folder) is None else None

    def _cache_folder(self) -> Path:
        content: list[Any] = [_CACHE_VERSION, FORMAT, self.source_tokenizer.identity()]
        content += [self.val_fraction, self.drop_near_duplicates]
        content += [] if self.chat_template is None else [self.chat_template.identity()]
        content += [one.identity() for one in self.inputs()]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        return self._cache_root() / "tokens" / key

    def _cache_root(self) -> Path:
        return Path(self.cache_dir or os.environ.get("LIT_LLM_CACHE") or "~/.cache/lit_llm").expanduser()

    def problems(self, world_size: int = 1) -> list[str]:
        return [*super().problems(world_size), *self._cache_problems()]

    def _cache_problems(self) -> list[str]:
        """Why the cache folder cannot be used, as far as that is known without writing."""
        if self.cache_dir is not None and (not self.cache_dir or "\0" in self.cache_dir):
            return [f"cache_dir is {self.cache_dir!r}, but must be the path of a folder, or null (--data.cache_dir)."]
        mends = "(--data.cache_dir, or the variable LIT_LLM_CACHE)"
        try:
            root = self._cache_root()
            above = next(folder for folder in (root / "tokens", root, *root.absolute().parents) if folder.exists())
        except (OSError, RuntimeError) as error:  # a name that is too long, an unknown home folder
            return [f"The cache folder {self.cache_dir} cannot be used: {getattr(error, 'strerror', None) or error} {mends}."]
        if not above.is_dir():
            return [f"The cache folder {root} cannot be made: {above} is a file {mends}."]
        if above != root / "tokens" and not os.access(above, os.W_OK | os.X_OK):  # an existing cache may be read-only
            return [f"The cache folder {root} cannot be made: {above} is not writable {mends}."]
        return []


def _in_both(ours: list[Source], others: list[Source]) -> list[str]:
    """The files among ``others`` that are among ``ours`` too, perhaps under another name."""
    here, there = ([Path(source.path) for source in each if source.is_local] for each in (ours, others))
    remote = {source.path for source in ours if not source.is_local}
    return [str(path) for _, path in same_files(here, there)] + [source.name for source in others if source.path in remote]


class GivenFiles(TextDataModule):
    """Base of the data modules of files that the user names. A subclass says how they are read.

    Args:
        paths: for training and validation.
        train: for training only.
        val: for validation, used with ``train``. None: ``val_fraction`` of ``train``.
        test: for ``test``.
        val_fraction: fraction to hold out if ``val`` is not given.
        kwargs: the arguments of ``TextDataModule``.
    """

    def __init__(
        self,
        *,
        paths: str | list[str] | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: Annotated[float, Domain(0, 1, above_low=True, below_high=True)] = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.paths, self.train, self.val, self.test = paths, train, val, test
        self.val_fraction = val_fraction
        self._plain: dict[Source, bool] = {}
        self._listed: dict[str, list[Source]] = {}  # flag → its files, listed once

    @property
    @abstractmethod
    def read_settings(self) -> ReadSettings:
        """How the files are read."""

    def source_problems(self) -> list[str]:
        problems = []
        if self.paths is None and self.train is None:
            problems.append("No training text: give --data.paths, or --data.train and --data.val.")
        if self.paths is not None and (self.train is not None or self.val is not None):
            problems.append("--data.paths cannot be combined with --data.train or --data.val: it is split into both.")
        sources, found = self._split_sources()
        problems += found
        for held_out in ("val", "test"):
            flag = "paths" if self.train is None else "train"
            for path in _in_both(sources.get("train", []), sources.get(held_out, []))[:1]:
                problems.append(f"{path} is in both --data.{flag} and --data.{held_out}: remove it from one of them.")
        if not found:
            problems += self._unreadable(sources)
        return problems

    def source_folders(self) -> list[Path]:
        given = [getattr(self, flag) for flag in ("paths", "train", "val", "test")]
        patterns = [pattern for one in given for pattern in ([one] if isinstance(one, str) else one or [])]
        return [folder for pattern in patterns if (folder := Path(pattern).expanduser()).is_dir()]

    def inputs(self) -> list[Input]:
        sources, _ = self._split_sources()
        inputs = {name: [self._input(source, name) for source in each] for name, each in sources.items()}
        if "val" not in inputs:
            plain = [one for one in inputs["train"] if one.settings.format == "text" and one.source.is_local]
            others = [replace(one, split=None) for one in inputs["train"] if one not in plain]
            inputs["train"] = (hold_out(plain, self.val_fraction) if plain else []) + others
        return [one for each in inputs.values() for one in each]

    def _input(self, source: Source, split: str) -> Input:
        settings = self.read_settings
        is_plain = source.is_local and self._is_plain_text(source, settings)
        return Input(source, split, replace(settings, format="text") if is_plain else settings)

    def _is_plain_text(self, source: Source, settings: ReadSettings) -> bool:
        if source not in self._plain:
            with DocumentReader(source, settings) as reader:
                self._plain[source] = reader.is_plain_text
        return self._plain[source]

    def _unreadable(self, sources: dict[str, list[Source]]) -> list[str]:
        """A sentence for each of the first files of this machine that cannot be read as text."""
        problems = []
        for source in (source for each in sources.values() for source in each if source.is_local):
            try:
                self._is_plain_text(source, self.read_settings)
            except UserError as error:
                problems += [] if str(error) in problems else [str(error)]
                if len(problems) == _MAX_PROBLEMS:
                    break
        return problems

    def _split_sources(self) -> tuple[dict[str, list[Source]], list[str]]:
        """The sources of each given split ("train" for ``paths``), and the problems with their paths."""
        sources: dict[str, list[Source]] = {}
        problems: list[str] = []
        for flag in ("paths", "train", "val", "test"):
            if (patterns := getattr(self, flag)) is not None:
                listed, found = (
                    (self._listed[flag], []) if flag in self._listed else list_sources(patterns, flag=f"--data.{flag}")
                )
                if not found:
                    self._listed[flag] = listed
                sources["train" if flag == "paths" else flag] = listed
                problems += found
        return sources, problems


class TextFiles(GivenFiles):
    """Your own text: plain files, JSONL, Parquet, Arrow and tar, compressed or not, on this machine or remote.

    Give either ``paths``, part of which is held out for validation, or ``train`` and ``val``. Each is a file, a folder (every
    file below it that is not hidden), a glob (``**`` descends into folders), a URL, or a list of these. A file's content
    decides its format (``lit_llm.ingest.readers``), not its name.

    What is held out (``lit_llm.ingest.split``): of ten plain text files or more, whole files, about ``val_fraction`` of the
    bytes. Of fewer, the end of each, from a line end on. Of the other formats and of remote files, documents, chosen by a hash
    of their text. A plain text file is one document. An end-of-document token follows each document.

    Args:
        format: auto, text, jsonl, parquet, arrow or tar. text: read anything as plain text.
        text_key: the key or column of the text in JSONL, Parquet and Arrow. Dots descend: ``meta.body``.
        drop_near_duplicates: if ``val`` is not given, leave documents out of training that nearly repeat held-out ones.
        kwargs: the arguments of ``GivenFiles``.
    """

    def __init__(
        self,
        *,
        format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tar"] = "auto",
        text_key: str = "text",
        drop_near_duplicates: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.format, self.text_key = format, text_key
        self.drop_near_duplicates = drop_near_duplicates and self.val is None

    @property
    def read_settings(self) -> ReadSettings:
        return ReadSettings(self.format, self.text_key)

    def source_problems(self) -> list[str]:
        problem = self.source_tokenizer.eos_problem()
        return [*super().source_problems(), *([] if problem is None else [problem])]
