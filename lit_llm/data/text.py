"""The base class of data modules that train on text. Texts are tokenised once into a cache of token shards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sysconfig
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.core.disk import read_json, write_text
from lit_llm.core.errors import UserError, refuse
from lit_llm.data.corpus import Corpus
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.shard_splits import text_sizes
from lit_llm.data.stored_files import Seen, StoredFile, StoredFiles, state_of
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.chat import ChatTemplate
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.selection import path_hash
from lit_llm.ingest.shard_manifest import META_FILE, Manifest, Unexpected, from_json
from lit_llm.ingest.shard_pipeline import FORMAT, Summary, ingest
from lit_llm.ingest.token_parts import PARTS
from lit_llm.tokenizers import Bytes, Tokenizer, load_tokenizer

_SHARD_TOKENS = 100_000_000
_RECORD = "files.json"
"""The name of the file in a cache folder that lists the states and hashes of the folder's files and of the tokenised texts."""

# Third-party code, and the test suites, which some distributions omit: without them the text differs less between machines.
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_VAL, _TEST = 0.04, 0.02  # fractions of the files


class TextDataModule(TokenDataModule):
    """Base class of the data modules that tokenise text. A subclass returns the texts from its method ``inputs``.

    Tokens are cached as shards in ``<cache_dir>/tokens``. The cache key depends on the inputs (paths, sizes, versions, ranges),
    their split, and the tokenizer.

    Args:
        tokenizer: ``Bytes`` (the default), ``Characters``, ``BPE`` or ``TokenizerJSON``.
        cache_dir: folder of the token cache. None: ``$LIT_LLM_CACHE``, else ``~/.cache/lit_llm``.
        kwargs: the arguments of ``TokenDataModule``.
    """

    # For inputs without a split: the share of documents to hold out, and whether training documents that nearly repeat a
    # held-out document are left out.
    val_fraction = 0.0
    drop_near_duplicates = False
    # The template that renders conversations as text. None: documents are text, not conversations.
    chat_template: ChatTemplate | None = None

    def __init__(self, *, tokenizer: Tokenizer | None = None, cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.source_tokenizer = tokenizer or Bytes()
        """The configured tokenizer, perhaps untrained. After ``setup``, ``tokenizer`` is the tokenizer with its vocabulary."""
        self.cache_dir = cache_dir
        self._verified: Path | None = None  # the cache folder that this process has made or checked
        self._seen_sources: Seen = {}  # the texts from which the cache folder was made

    @abstractmethod
    def inputs(self) -> list[Input]:
        """The texts to tokenise, in order. Called only if ``source_problems`` returns no problems."""

    def source_folders(self) -> list[Path]:
        """The folders among the paths in the user's settings. All files below such a folder are read as text."""
        return []

    def source_files(self) -> list[Path]:
        return list(dict.fromkeys(Path(one.source.path) for one in self.inputs() if one.source.is_local))

    def tokenise(self, out: Path, *, shard_tokens: int, **options: Any) -> Summary:
        """Tokenise the texts, write the tokens as shards into the folder ``out``, and return a summary.

        ``shard_tokens``: the most tokens in a shard. ``options``: further arguments of `ingest`."""
        summary = ingest(
            self.inputs(),
            self.source_tokenizer,
            out,
            shard_tokens=shard_tokens,
            val_fraction=self.val_fraction,
            drop_near_duplicates=self.drop_near_duplicates,
            chat_template=self.chat_template,
            **options,
        )
        if summary.invalid:
            more = f" and {len(summary.invalid) - 1:,} more files" if len(summary.invalid) > 1 else ""
            rank_zero_warn(
                f"{summary.invalid[0]}{more} are not valid UTF-8: invalid bytes are read as U+FFFD. "
                "Convert the files, or use --data.tokenizer Bytes, which keeps every byte."
            )
        return summary

    def prepare_data(self) -> None:
        """Tokenise the texts into the cache, unless the cache has the tokens. Several processes may call this at the same time.

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
                why = f"is damaged, or its text has changed, so the text is tokenised again: {damage}"
                rank_zero_warn(f"The token cache {folder} {why}")
                shutil.rmtree(folder)
            self._fill(folder)
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
            sources = StoredFiles(StoredFile(os.path.abspath(path)) for path in self.source_files())
            refuse(sources.problems())
            manifest = self.tokenise(temporary, shard_tokens=_SHARD_TOKENS).manifest
            shutil.rmtree(temporary / PARTS)
            files = {file for stream in _streams(temporary, manifest).values() for file in stream.files()}
            tokens = {str(folder / Path(file.path).name): [state_of(file.path), file.blake2b] for file in files}
            write_text(temporary / _RECORD, json.dumps(sources.seen | tokens))
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
        mend = f"delete the folder {folder}, and it is made again"
        if folder != self._verified and (damage := self._damage(folder)) is not None:
            raise UserError(f"The token cache is damaged: {mend}. {damage}")
        manifest = Manifest.read(folder)
        assert manifest is not None, "the cache is not damaged"
        streams = _streams(folder, manifest)
        for stream in streams.values():
            stream.mend = mend
        return Corpus(
            streams,
            manifest.vocab_size,
            load_tokenizer(folder),
            text_sizes=text_sizes([manifest.splits]),
            eos_id=manifest.eos_id,
            bos_id=manifest.bos_id,
        )

    def _damage(self, folder: Path) -> str | None:
        """Why a token cache's folder cannot be used: its files, or the texts it was made from, have changed. None: it can.

        A file whose state differs from its record in ``files.json`` is hashed. If the hash is right, the new state is recorded.
        """
        try:
            manifest = Manifest.read(folder)
            if manifest is None:
                return f"{folder / META_FILE} is missing."
            if manifest.vocab_size != load_tokenizer(folder).vocab_size:
                return f"{folder / META_FILE} and its tokenizer have different vocabularies."
            record: Seen = from_json(Seen, read_json(folder / _RECORD))
            # Checkpoints list texts as the recipe writes them: a project may move with its texts.
            written = {str(path): os.path.abspath(path) for path in self.source_files()}
            files = StoredFiles(file for stream in _streams(folder, manifest).values() for file in stream.files())
            files.add(StoredFile(path, record[path][1], mend="the cache has its former text") for path in written.values())
            changed = files.recall(record)
            refuse(files.problems(changed))
            if changed:
                with contextlib.suppress(OSError):  # a cache that cannot be written is hashed at every start
                    write_text(folder / _RECORD, json.dumps(files.seen))
            self._seen_sources = {name: files.seen[path] for name, path in written.items()}
        except (UserError, OSError, ValueError, KeyError, Unexpected) as error:
            return str(error)
        return None

    def seen_sources(self) -> Seen:
        return self._seen_sources

    def cached_manifest(self) -> Manifest | None:
        """The manifest of the tokenised text in the cache; None if the text is not in the cache, or its folder is damaged."""
        folder = self._cache_folder()
        return Manifest.read(folder) if folder.exists() and self._damage(folder) is None else None

    def _cache_folder(self) -> Path:
        content: list[Any] = [FORMAT, self.source_tokenizer.identity()]
        content += [self.val_fraction, self.drop_near_duplicates]
        content += [] if self.chat_template is None else [self.chat_template.identity()]
        content += [one.identity() for one in self.inputs()]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        return self._cache_root() / "tokens" / key

    def _cache_root(self) -> Path:
        return Path(self.cache_dir or os.environ.get("LIT_LLM_CACHE") or "~/.cache/lit_llm").expanduser().absolute()


def _streams(folder: Path, manifest: Manifest) -> dict[str, TokenStream]:
    files = {name: [shard.file for shard in split.shards] for name, split in manifest.splits.items()}
    return {name: TokenStream.listed(folder, manifest, of_split) for name, of_split in files.items()}


class PythonStdlib(TextDataModule):
    """The ``.py`` files of the standard library: about 13 MB of real text, no download.

    A hash of each file's path within the library assigns about 4 % of the files to validation, 2 % to test, and the rest to
    training. The split is the same on every machine. Each file is one document, followed by an end-of-text token.

    Args:
        kwargs: the arguments of ``TextDataModule``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = Path(sysconfig.get_paths()["stdlib"])

    def source_problems(self) -> list[str]:
        if next(self._sources(), None) is None:
            return [f"{self.root} has no Python sources: train on your own text (--data TextFiles --data.paths my.txt)."]
        return []

    def inputs(self) -> list[Input]:
        splits: dict[str, list[Input]] = {"train": [], "val": [], "test": []}
        for path in sorted(self._sources()):
            position = path_hash(path.relative_to(self.root).as_posix())
            name = "val" if position < _VAL else "test" if position < _VAL + _TEST else "train"
            splits[name].append(Input.of_file(path, name))
        return [one for split in splits.values() for one in split]

    def _sources(self) -> Iterator[Path]:
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _EXCLUDED]
            paths = (Path(folder, name) for name in names if name.endswith(".py"))
            yield from (path for path in paths if path.is_file() and path.stat().st_size > 0)
