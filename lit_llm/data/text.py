"""Train on text files: tokenised once, kept as shards in a cache, read like any other shards."""

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

_CACHE_VERSION = 1  # raise when the same text and tokenizer would give other shards
_SHARD_TOKENS = 100_000_000


class TextDataModule(TokenDataModule):
    """Base of the data modules that begin with text. Subclasses say which documents there are.

    Shards are cached in ``cache_dir``, else ``$LIT_LLM_CACHE``, else ``~/.cache/lit_llm``, under a key made of the
    documents' paths, sizes and modification times, their split, and the tokenizer.

    Args:
        tokenizer: None for ``Bytes``.
        cache_dir: where the shards are kept.
        base: the arguments of ``TokenDataModule``.
    """

    def __init__(self, *, tokenizer: Tokenizer | None = None, cache_dir: str | None = None, **base: Any) -> None:
        super().__init__(**base)
        self._source_tokenizer = tokenizer or Bytes()
        self.cache_dir = cache_dir

    @abstractmethod
    def documents(self) -> dict[str, list[Document]]:
        """Documents of "train", "val" and perhaps "test". Called only when there are no source problems."""

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The tokenizer asked for. After set-up, ``tokenizer`` is the one in use (a vocabulary is learned in between)."""
        return self._source_tokenizer

    def prepare_data(self) -> None:
        """Tokenise, unless the cache has it. Safe to run in several processes at once."""
        self.raise_problems()
        folder = self._cache_folder()
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.parent / f"tmp-{uuid.uuid4().hex}"
        temporary.mkdir()  # not tempfile's: several users may share a cache
        try:
            build(self.documents(), self.source_tokenizer, temporary, shard_tokens=_SHARD_TOKENS)
            os.replace(temporary, folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
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
                    f"The {name} text has {split['bytes']} bytes, {split['tokens']} tokens: too short to predict anything; "
                    "give more text (--data.paths, or --data.train and --data.val)."
                )
            streams[name] = TokenStream(sorted(folder.glob(f"{name}_*.bin")))
        return Corpus(streams, meta["vocab_size"], load_tokenizer(folder))

    def held_out_text(self) -> Iterator[bytes]:
        """The validation text as it is on disk, piece by piece, to compare its compression by other means."""
        for document in self.documents()["val"]:
            yield from document.pieces()

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
    """Text files of your own.

    Give either ``paths``, of which a part is held out for validation, or ``train`` and ``val``. Each is a file, a
    folder (every file below it that is not hidden), a glob (``**`` goes through folders), or a list of these.

    With ten files or more, whole files are held out, about ``val_fraction`` of the bytes; with fewer, the end of each,
    from a line end on. A file is a document: an end-of-text token follows it.

    Args:
        paths: text to train on and validate with.
        train: text to train on alone.
        val: text to validate with, beside ``train``. None: ``val_fraction`` of ``train``.
        test: text for ``test``.
        val_fraction: share of the bytes held out when ``val`` is not given.
        tokenizer: ``Bytes`` (the default), ``Characters``, ``BPE`` or ``TokenizerJSON``.
        cache_dir: where tokenised text is kept. None: ``$LIT_LLM_CACHE``, else ``~/.cache/lit_llm``.
        micro_batch_size: sequences in one forward pass of one rank. None: the rank's whole share of the global batch.
        global_batch_size: sequences per optimizer step over all ranks.
        block_size: tokens predicted per sequence. None: the model's.
        seed: names the order of the training samples.
        num_workers: processes that read ahead.
    """

    def __init__(
        self,
        *,
        paths: str | list[str] | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        val_fraction: float = 0.1,
        tokenizer: Tokenizer | None = None,
        cache_dir: str | None = None,
        micro_batch_size: int | None = None,
        global_batch_size: int = 32,
        block_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            cache_dir=cache_dir,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            block_size=block_size,
            seed=seed,
            num_workers=num_workers,
        )
        self.paths, self.train, self.val, self.test = paths, train, val, test
        self.val_fraction = val_fraction

    def source_problems(self) -> list[str]:
        problems = []
        if not 0 < self.val_fraction < 1:
            problems.append(f"val_fraction must lie between 0 and 1, not {self.val_fraction} (--data.val_fraction).")
        if self.paths is None and self.train is None:
            problems.append("There is no text to train on: give --data.paths, or --data.train and --data.val.")
        if self.paths is not None and (self.train is not None or self.val is not None):
            problems.append("--data.paths is split into train and val: give it, or --data.train and --data.val, not both.")
        files, path_problems = self._files()
        problems += path_problems
        for held_out in ("val", "test"):
            both = sorted(set(files.get("train", [])) & set(files.get(held_out, [])))
            if both:
                problems.append(f"{both[0]} is in both --data.train and --data.{held_out}: held-out text must be unseen.")
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
        """Files of each split that was named ("train" for ``paths``), and what is wrong with the names."""
        files, problems = {}, []
        for flag, name in (("paths", "train"), ("train", "train"), ("val", "val"), ("test", "test")):
            patterns = getattr(self, flag)
            if patterns is not None:
                files[name], found = expand(patterns, flag=f"--data.{flag}", folders=True)
                problems += found
        return files, problems
