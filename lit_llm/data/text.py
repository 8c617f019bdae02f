"""Train on text files. They are tokenised once into a cache of token shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_llm.data.build import build
from lit_llm.data.datamodule import Corpus, TokenDataModule
from lit_llm.data.token_stream import TokenStream
from lit_llm.errors import UserError
from lit_llm.ingest.documents import Document, hold_out
from lit_llm.ingest.manifest import META_FILE
from lit_llm.ingest.paths import expand, same_files
from lit_llm.tokenizers import Bytes, Tokenizer, load_tokenizer

_CACHE_VERSION = 1  # increment when the same text and tokenizer would give different shards
_SHARD_TOKENS = 100_000_000


class TextDataModule(TokenDataModule):
    """Base of the data modules that tokenise text. A subclass returns the documents.

    Tokens are cached as shards in ``<cache_dir>/tokens``. The cache key depends on the documents (paths, sizes, modification
    times), their split, and the tokenizer.

    Args:
        tokenizer: ``Bytes`` (the default), ``Characters``, ``BPE`` or ``TokenizerJSON``.
        cache_dir: folder of the token cache. None: ``$LIT_LLM_CACHE``, else ``~/.cache/lit_llm``.
        kwargs: the arguments of ``TokenDataModule``.
    """

    def __init__(self, *, tokenizer: Tokenizer | None = None, cache_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._source_tokenizer = tokenizer or Bytes()
        self.cache_dir = cache_dir
        self._verified: Path | None = None  # the cache that this process has made or checked

    @abstractmethod
    def documents(self) -> dict[str, list[Document]]:
        """The documents of "train", "val" and optionally "test". Called only if there are no source problems."""

    def source_files(self) -> list[Path]:
        return [document.path for split in self.documents().values() for document in split]

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The configured tokenizer. After ``setup``, ``tokenizer`` is the one in use, whose vocabulary has been learned."""
        return self._source_tokenizer

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
            build(self.documents(), self.source_tokenizer, temporary, shard_tokens=_SHARD_TOKENS)
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
        meta = _read_meta(folder)
        streams = {}
        for name, split in meta["splits"].items():
            if split["tokens"] < 2:
                raise UserError(
                    f"The {name} text has only {split['bytes']} bytes = {split['tokens']} tokens: give more text "
                    "(--data.paths, or --data.train and --data.val)."
                )
            streams[name] = _stream(folder, name)
        return Corpus(streams, meta["vocab_size"], load_tokenizer(folder))

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a folder of the cache. Token ids are checked, as far as `TokenStream.scan` reads them."""
        try:
            meta = _read_meta(folder)
            if meta["vocab_size"] != load_tokenizer(folder).vocab_size:
                return f"{folder / META_FILE} and its tokenizer have different vocabularies."
            for name, split in meta["splits"].items():
                if split["tokens"] and len(stream := _stream(folder, name)) != split["tokens"]:
                    return f"the {name} shards have {len(stream)} tokens instead of {split['tokens']}."
                if split["tokens"]:
                    stream.scan(meta["vocab_size"])
        except (UserError, OSError) as error:
            return str(error)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{folder / META_FILE} cannot be read ({type(error).__name__})."
        return None

    def held_out_text(self) -> Iterator[bytes]:
        """The bytes of the validation text in pieces, for comparing its compression with other programs."""
        for document in self.documents()["val"]:
            yield from document.pieces()

    def cached_meta(self) -> dict[str, Any] | None:
        """What the cache says about the tokenised text, as `build` wrote it; None without an undamaged cache."""
        folder = self._cache_folder()
        return _read_meta(folder) if folder.exists() and self._damage(folder) is None else None

    def _cache_folder(self) -> Path:
        content: list[Any] = [_CACHE_VERSION, self.source_tokenizer.identity()]
        for name, documents in self.documents().items():
            content.append(name)
            for d in documents:
                status = d.path.stat()
                content.append([str(d.path.absolute()), d.start, d.stop, status.st_size, status.st_mtime_ns])
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


def _read_meta(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    return content


def _stream(folder: Path, name: str) -> TokenStream:
    shards = sorted(folder.glob(f"{name}_*.bin"))
    if not shards:
        raise UserError(f"{folder} has no shards of {name}.")
    return TokenStream(shards)


class TextFiles(TextDataModule):
    """Your own text files.

    Give either ``paths``, part of which is held out for validation, or ``train`` and ``val``. Each is a file, a folder (every
    file below it that is not hidden), a glob (``**`` descends into folders), or a list of these.

    With ten files or more, whole files are held out, about ``val_fraction`` of the bytes. With fewer, the end of each file is
    held out, from a line end on. A file is one document, followed by an end-of-text token.

    Args:
        paths: text for training and validation.
        train: text for training only.
        val: text for validation, used with ``train``. None: ``val_fraction`` of ``train``.
        test: text for ``test``.
        val_fraction: fraction of the bytes to hold out if ``val`` is not given.
        kwargs: the arguments of ``TextDataModule``.
    """

    def __init__(
        self,
        *,
        paths: str | list[str] | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.paths, self.train, self.val, self.test = paths, train, val, test
        self.val_fraction = val_fraction

    def source_problems(self) -> list[str]:
        problems = []
        if not 0 < self.val_fraction < 1:
            problems.append(f"val_fraction must lie between 0 and 1, not {self.val_fraction} (--data.val_fraction).")
        if self.paths is None and self.train is None:
            problems.append("No training text: give --data.paths, or --data.train and --data.val.")
        if self.paths is not None and (self.train is not None or self.val is not None):
            problems.append("--data.paths cannot be combined with --data.train or --data.val: it is split into both.")
        files, path_problems = self._split_files()
        problems += path_problems
        for held_out in ("val", "test"):
            flag = "paths" if self.train is None else "train"
            for _, path in same_files(files.get("train", []), files.get(held_out, []))[:1]:
                problems.append(f"{path} is in both --data.{flag} and --data.{held_out}: remove it from one of them.")
        return problems

    def documents(self) -> dict[str, list[Document]]:
        files, _ = self._split_files()
        found: dict[str, list[Document]] = {}
        if "val" in files:
            found |= {name: [Document.whole(path) for path in files[name]] for name in ("train", "val")}
        else:
            found["train"], found["val"] = hold_out(files["train"], self.val_fraction)
        if "test" in files:
            found["test"] = [Document.whole(path) for path in files["test"]]
        return found

    def _split_files(self) -> tuple[dict[str, list[Path]], list[str]]:
        """The files of each given split ("train" for ``paths``), and the problems with their paths."""
        files, problems = {}, []
        for flag, name in (("paths", "train"), ("train", "train"), ("val", "val"), ("test", "test")):
            patterns = getattr(self, flag)
            if patterns is not None:
                files[name], found = expand(patterns, flag=f"--data.{flag}", folders=True)
                problems += found
        return files, problems
