"""Train on existing token shards: published ones, or the output of ``prepare``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_llm.core._lightning import is_rank_zero
from lit_llm.data.corpus import Corpus
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.shard_splits import ShardSplits, in_folder, no_split_text, of_files, text_sizes
from lit_llm.data.shard_vocabulary import ShardVocabulary, TokenId, VocabSize
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.tokenizers import Tokenizer


class TokenShards(TokenDataModule):
    """Token shards: a folder that ``prepare`` wrote, or files in the layout of llm.c or Megatron (``X.bin`` with ``X.idx``).

    A manifest (``meta.json``) that lists the files gives their sizes, the vocabulary, the tokenizer beside it and the ids
    around documents. Then no shard is opened before training. Only rank 0 looks at the files when a run starts.

    Args:
        path: a folder that ``prepare`` wrote, instead of the three below.
        train: files, globs, or a list of these, read in this order; the matches of a glob are sorted.
        val: the same, for validation.
        test: the same, for ``test``.
        vocab_size: number of token ids; every token must be smaller. None: that of the tokenizer or the manifest, or GPT-2's
            50257 without both.
        tokenizer: the tokenizer of the shards. None: the one beside the manifest. Text samples and bits per byte need it,
            training does not.
        bos_id: the id that opens every document, such as 50256 in llm.c's FineWeb. None: the manifest's or the tokenizer's.
        eos_id: the id that ends every document. None: the manifest's or the tokenizer's.
        headerless: the files hold bare uint16 tokens, as nanoGPT writes them.
        kwargs: the arguments of ``TokenDataModule``.
    """

    opens_on_rank_zero = True

    def __init__(
        self,
        *,
        path: str | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        vocab_size: VocabSize = None,
        tokenizer: Tokenizer | None = None,
        bos_id: TokenId = None,
        eos_id: TokenId = None,
        headerless: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path, self.train, self.val, self.test = path, train, val, test
        self._vocabulary = ShardVocabulary(vocab_size, tokenizer, bos_id, eos_id)
        self.headerless = headerless
        self._found: tuple[object, ShardSplits] | None = None  # the settings, and what they led to without a problem

    def source_problems(self) -> list[str]:
        if problems := self._combination_problems():
            return problems
        if not is_rank_zero():  # `setup` gets the shards and their problems from rank 0
            return []
        splits = self._splits()
        manifests, train = _manifests(splits), splits.streams.get("train")
        found = [*splits.problems, *self._vocabulary.problems(manifests)]
        return found + self._vocabulary.tokenizer_problems(manifests, None if train is None else train.folder_of_manifest)

    def _combination_problems(self) -> list[str]:
        if self.path is None:
            return []
        others = [f"--data.{name}" for name in ("train", "val", "test") if getattr(self, name) is not None]
        found = []
        if others:
            found.append(f"--data.path is a folder with all splits: it cannot be combined with {', '.join(others)}.")
        if self.headerless:
            found.append("--data.path is a folder of shards with headers: remove --data.headerless.")
        return found

    def _splits(self) -> ShardSplits:
        """The opened splits. What has been found without a problem is not looked up again."""
        settings = (self.path, self.train, self.val, self.test, self.headerless)
        if self._found is not None and self._found[0] == settings:
            return self._found[1]
        if self.path is not None:
            splits = in_folder(self.path)
        else:
            splits = of_files({"train": self.train, "val": self.val, "test": self.test}, headerless=self.headerless)
        if not splits.problems:
            self._found = settings, splits
        return splits

    @property
    def known_vocab_size(self) -> int | None:
        """The size of the vocabulary as far as it is known before ``setup``; None on ranks that do not read the manifest."""
        if self._vocabulary.needs_manifest and not is_rank_zero():
            return None
        splits = self._splits()
        return None if self.path is not None and splits.problems else self._vocabulary.size(_manifests(splits))

    def open_split(self, name: str) -> TokenStream:
        """The shards of "train", "val" or "test". Reads their headers only, or the manifest."""
        return self._splits().streams[name]

    def open_corpus(self) -> Corpus:
        splits = self._splits()
        manifests = _manifests(splits)
        corpus = Corpus(splits.streams, self._vocabulary.size(manifests), None)
        tokenizer = self.load_tokenizer(corpus)
        sizes = text_sizes([splits.whole_splits()])
        bos_id, eos_id = (self._vocabulary.document_id(name, manifests, tokenizer) for name in ("bos_id", "eos_id"))
        return replace(corpus, tokenizer=tokenizer, text_sizes=sizes, bos_id=bos_id, eos_id=eos_id)

    def load_tokenizer(self, corpus: Corpus) -> Tokenizer | None:
        return self._vocabulary.load_tokenizer(corpus.streams["train"].folder_of_manifest)

    def missing_text(self, split: str) -> str:
        return no_split_text(split) if self.path is not None else super().missing_text(split)

    def source_files(self) -> list[Path]:
        return [path for stream in self._splits().streams.values() for path in stream.paths]


def _manifests(splits: ShardSplits) -> list[Manifest]:
    """That of the training shards. The other splits have the same tokenizer, or no manifest."""
    return [splits.manifests["train"][1]] if "train" in splits.manifests else []
