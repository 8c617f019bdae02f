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

from lit_llm.data.build import META_FILE, build
from lit_llm.data.datamodule import Corpus, TokenDataModule
from lit_llm.data.documents import Document, hold_out
from lit_llm.data.paths import expand
from lit_llm.data.shards import TokenStream
from lit_llm.data.tokenizer import Bytes, Tokenizer, load_tokenizer
from lit_llm.errors import UserError

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

    @abstractmethod
    def documents(self) -> dict[str, list[Document]]:
        """The documents of "train", "val" and optionally "test". Called only if there are no source problems."""

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The configured tokenizer. After ``setup``, ``tokenizer`` is the one in use, whose vocabulary has been learned."""
        return self._source_tokenizer

    def prepare_data(self) -> None:
        """Tokenise into the cache, unless it has the tokens. Several processes may run this at the same time."""
        self.raise_problems()
        folder = self._cache_folder()
        if folder.exists():
            return
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
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        streams = {}
        for name, split in meta["splits"].items():
            if split["tokens"] < 2:
                raise UserError(
                    f"The {name} text has only {split['bytes']} bytes = {split['tokens']} tokens: give more text "
                    "(--data.paths, or --data.train and --data.val)."
                )
            streams[name] = TokenStream(sorted(folder.glob(f"{name}_*.bin")))
        return Corpus(streams, meta["vocab_size"], load_tokenizer(folder))

    def held_out_text(self) -> Iterator[bytes]:
        """The bytes of the validation text in pieces, for comparing its compression with other programs."""
        for document in self.documents()["val"]:
            yield from document.pieces()

    def cached_meta(self) -> dict[str, Any] | None:
        """What the cache says about the tokenised text, as `build` wrote it; None if it has not been tokenised."""
        file = self._cache_folder() / META_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def _cache_folder(self) -> Path:
        content: list[Any] = [_CACHE_VERSION, self.source_tokenizer.identity()]
        for name, documents in self.documents().items():
            content.append(name)
            for d in documents:
                status = d.path.stat()
                content.append([str(d.path.absolute()), d.start, d.stop, status.st_size, status.st_mtime_ns])
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        root = self.cache_dir or os.environ.get("LIT_LLM_CACHE") or "~/.cache/lit_llm"
        return Path(root).expanduser() / "tokens" / key


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
        files, path_problems = self._files()
        problems += path_problems
        for held_out in ("val", "test"):
            both = sorted(set(files.get("train", [])) & set(files.get(held_out, [])))
            if both:
                problems.append(f"{both[0]} is in both --data.train and --data.{held_out}: remove it from one of them.")
        return problems

    def documents(self) -> dict[str, list[Document]]:
        files, _ = self._files()
        found: dict[str, list[Document]] = {}
        if "val" in files:
            found |= {name: [Document.whole(path) for path in files[name]] for name in ("train", "val")}
        else:
            found["train"], found["val"] = hold_out(files["train"], self.val_fraction)
        if "test" in files:
            found["test"] = [Document.whole(path) for path in files["test"]]
        return found

    def _files(self) -> tuple[dict[str, list[Path]], list[str]]:
        """The files of each given split ("train" for ``paths``), and the problems with their paths."""
        files, problems = {}, []
        for flag, name in (("paths", "train"), ("train", "train"), ("val", "val"), ("test", "test")):
            patterns = getattr(self, flag)
            if patterns is not None:
                files[name], found = expand(patterns, flag=f"--data.{flag}", folders=True)
                problems += found
        return files, problems
