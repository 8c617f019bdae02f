"""Data modules that train on existing token shards: published shards, or the output of ``prepare``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError, noting
from lit_llm.core.ranks import is_rank_zero
from lit_llm.data.corpus import Corpus, OpenedCorpus, split_of
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.shard_splits import ShardSource, ShardSplits, no_split_text, path_problems, splits_of, text_sizes
from lit_llm.data.shard_vocabulary import ShardVocabulary, TokenId, VocabSize
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.tokenizers import Tokenizer


class ShardDataModule(TokenDataModule):
    """Base class of the data modules of token shards. A subclass says where the shards are. Only rank 0 opens the shards.

    Args:
        vocab_size: number of token ids; every id must be smaller. None: the number of the tokenizer or of a manifest; if
            there is neither, GPT-2's 50257.
        tokenizer: the tokenizer of all shards. None: the tokenizer beside a manifest, if any. Text samples and bits per byte
            need a tokenizer, training does not.
        bos_id: the id that opens every document, such as 50256 in llm.c's FineWeb. None: the id of a manifest or the tokenizer.
        eos_id: the id that ends every document. None: the id of a manifest or the tokenizer.
        kwargs: the arguments of ``TokenDataModule``.
    """

    opens_on_rank_zero = True
    # The splits whose manifests give the vocabulary, the tokenizer, and the BOS and EOS ids.
    described_by: tuple[str, ...] = ("train", "val", "test")

    def __init__(
        self,
        *,
        vocab_size: VocabSize = None,
        tokenizer: Tokenizer | None = None,
        bos_id: TokenId = None,
        eos_id: TokenId = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._vocabulary = ShardVocabulary(vocab_size, tokenizer, bos_id, eos_id)
        self._checked_splits: dict[str, ShardSplits] | None = None  # set if there was no problem
        self._received = False  # whether rank 0 has sent the opened corpus to all ranks

    def source_problems(self) -> list[str]:
        return self.shard_problems(self._splits()) if is_rank_zero() else []  # `setup` gets the shards from rank 0

    def shard_problems(self, splits: Mapping[str, ShardSplits]) -> list[str]:
        """One sentence for each problem of the sources and their shards. ``splits``: source → its opened splits."""
        return [problem for each in splits.values() for problem in each.problems] + self._vocabulary_problems(splits)

    @abstractmethod
    def _find_splits(self) -> dict[str, ShardSplits]:
        """Open the shards: source → its splits. Without a mixture, there is one source, with the name ""."""

    def _splits(self) -> dict[str, ShardSplits]:
        """The result of `_find_splits`, which is called again only if its last result had problems."""
        if self._checked_splits is not None:
            return self._checked_splits
        splits = self._find_splits()
        if not any(each.problems for each in splits.values()):
            self._checked_splits = splits
        return splits

    def _manifests(self, splits: Mapping[str, ShardSplits]) -> list[Manifest]:
        entries = (each.manifests.items() for each in splits.values())
        return [manifest for manifests in entries for split, (_, manifest) in manifests if split in self.described_by]

    def _manifest_folder(self, streams: Mapping[str, TokenStream]) -> Path | None:
        """The folder of the manifest of the first stream that has one, of the splits ``described_by``; None if none has."""
        folders = (stream.folder_of_manifest for name, stream in streams.items() if split_of(name) in self.described_by)
        return next((folder for folder in folders if folder is not None), None)

    def _vocabulary_problems(self, splits: Mapping[str, ShardSplits]) -> list[str]:
        manifests = self._manifests(splits)
        problems = self._vocabulary.problems(manifests)
        return problems + self._vocabulary.tokenizer_problems(manifests, self._manifest_folder(streams_by_name(splits)))

    @property
    def known_vocab_size(self) -> int | None:
        """The number of token ids. None before ``setup`` if only a manifest can tell the number, and no manifest was found or
        this rank is not rank 0.
        """
        if self._vocabulary.needs_manifest and not is_rank_zero():
            return None
        splits = self._splits()
        manifests = self._manifests(splits)
        if self._vocabulary.needs_manifest and not manifests and self.needs_manifest(splits):
            return None
        return self._vocabulary.size(manifests)

    def needs_manifest(self, splits: Mapping[str, ShardSplits]) -> bool:
        """Whether the vocabulary size stays unknown if neither settings nor manifests give it: True if a source of shards has
        problems, such as missing files. If False, GPT-2's size is used."""
        return any(each.problems for each in splits.values())

    def open_split(self, name: str) -> list[TokenStream]:
        """The token stream of split ``name`` of each source that has this split. Only headers or manifests are read."""
        return [each.streams[name] for each in self._splits().values() if name in each.streams]

    def open_corpus(self) -> Corpus:
        splits = self._splits()
        manifests = self._manifests(splits)
        corpus = Corpus(streams_by_name(splits), self._vocabulary.size(manifests), None)
        tokenizer = self.load_tokenizer(corpus)
        sizes = text_sizes(each.whole_splits() for each in splits.values())
        bos_id, eos_id = (self._vocabulary.document_id(name, manifests, tokenizer) for name in ("bos_id", "eos_id"))
        return replace(corpus, tokenizer=tokenizer, text_sizes=sizes, bos_id=bos_id, eos_id=eos_id)

    def read_corpus(self) -> OpenedCorpus:
        """Open the corpus on rank 0 and send it to every rank: a collective. Every rank raises the problems of rank 0."""
        if self._received or self.trainer is None or self.trainer.world_size == 1:
            return super().read_corpus()
        opened, problems, strategy = None, list[str](), self.trainer.strategy
        if strategy.is_global_zero:
            with noting(problems):
                opened = super().read_corpus()
        own = opened
        sent = None if opened is None else replace(opened, corpus=replace(opened.corpus, tokenizer=None), plans={}, teachers={})
        opened, problems = strategy.broadcast((sent, problems))
        if opened is None:
            raise UserError("\n".join(problems))
        self._received = True
        return own or replace(opened, corpus=replace(opened.corpus, tokenizer=self.load_tokenizer(opened.corpus)))

    def load_tokenizer(self, corpus: Corpus) -> Tokenizer | None:
        """Load the tokenizer of a corpus; None if there is none. Every rank loads its own: rank 0 does not send a tokenizer."""
        return self._vocabulary.load_tokenizer(self._manifest_folder(corpus.streams))

    def source_files(self) -> list[Path]:
        return [path for stream in streams_by_name(self._splits()).values() for path in stream.paths]


def streams_by_name(splits: Mapping[str, ShardSplits]) -> dict[str, TokenStream]:
    """Name → stream, for all splits of all sources. The name is that of the split ("train") or, in a mixture, "web/train"."""
    return {f"{name}/{split}".lstrip("/"): stream for name, each in splits.items() for split, stream in each.streams.items()}


class TokenShards(ShardDataModule):
    """The data module for token shards: a folder of ``prepare``, or files in the layout of llm.c or Megatron.

    A manifest (``meta.json``) that lists the files gives their sizes, the vocabulary, the tokenizer beside the manifest, and
    the BOS and EOS ids. With such a manifest, no shard is opened before training.

    Args:
        path: a folder that ``prepare`` wrote, instead of ``train``, ``val`` and ``test``.
        train: files, globs, or a list of these, read in this order; the matches of a glob are sorted.
        val: the same, for validation.
        test: the same, for ``test``.
        headerless: the files hold bare uint16 tokens, as nanoGPT writes them.
        kwargs: the arguments of ``ShardDataModule``.
    """

    described_by = ("train",)

    def __init__(
        self,
        *,
        path: str | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        headerless: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source = ShardSource(path, train, val, test, headerless)

    def source_problems(self) -> list[str]:
        return path_problems(self.source, "--data") or super().source_problems()

    def _find_splits(self) -> dict[str, ShardSplits]:
        return {"": splits_of(self.source)}

    def needs_manifest(self, splits: Mapping[str, ShardSplits]) -> bool:
        return self.source.path is not None and super().needs_manifest(splits)

    def missing_text(self, split: str) -> str:
        return no_split_text(split) if self.source.path is not None else super().missing_text(split)
