"""Train on existing token shards: published ones, or the output of ``prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_llm.data.datamodule import Corpus, TokenDataModule
from lit_llm.data.token_stream import TokenStream
from lit_llm.errors import UserError
from lit_llm.ingest.paths import expand, same_files
from lit_llm.tokenizers import Tokenizer

_GPT2_VOCAB_SIZE = 50257


class TokenShards(TokenDataModule):
    """Token shards in the layout of llm.c (see ``lit_llm.ingest.shards``).

    Args:
        train: files, globs, or a list of these, read in this order; the matches of a glob are sorted.
        val: the same, for validation.
        test: the same, for ``test``.
        vocab_size: number of token ids; every token must be smaller. None: that of the tokenizer, or GPT-2's 50257 without a
            tokenizer.
        tokenizer: the tokenizer of the shards. Text samples and bits per byte need it, training does not.
        headerless: the files hold bare uint16 tokens, as nanoGPT writes them.
        kwargs: the arguments of ``TokenDataModule``.
    """

    def __init__(
        self,
        *,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        headerless: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.train, self.val, self.test = train, val, test
        if vocab_size is None:
            vocab_size = _GPT2_VOCAB_SIZE if tokenizer is None else tokenizer.vocab_size
        self._vocab_size = vocab_size
        self._shard_tokenizer, self.headerless = tokenizer, headerless

    def source_problems(self) -> list[str]:
        problems = [f"No {n} shards: give --data.{n}." for n in ("train", "val") if getattr(self, n) is None]
        for name in ("train", "val", "test"):
            files, found = self._split_files(name)
            problems += found
            if files and not found:
                try:
                    if len(TokenStream(files, headerless=self.headerless)) < 2:
                        problems.append(f"The {name} shards hold a single token, but at least two are needed (--data.{name}).")
                except UserError as error:
                    problems += [f"{line.rstrip('.')} (--data.{name})." for line in str(error).splitlines()]
        for held_out in () if problems else ("val", "test"):
            for _, path in same_files(self._split_files("train")[0], self._split_files(held_out)[0])[:1]:
                problems.append(f"{path} is in both --data.train and --data.{held_out}: remove it from one of them.")
        if self._vocab_size < 1:
            problems.append(f"vocab_size must be at least 1, not {self._vocab_size} (--data.vocab_size).")
        elif self._shard_tokenizer is not None and self._shard_tokenizer.vocab_size > self._vocab_size:
            problems.append(
                f"vocab_size {self._vocab_size} is smaller than the tokenizer's {self._shard_tokenizer.vocab_size}: "
                "remove --data.vocab_size."
            )
        return problems

    @property
    def known_vocab_size(self) -> int:
        """The size of the vocabulary, which is known before the shards are opened."""
        return self._vocab_size

    def open_split(self, name: str) -> TokenStream:
        """The shards of "train", "val" or "test". Reads their headers only."""
        return TokenStream(self._split_files(name)[0], headerless=self.headerless)

    def open_corpus(self) -> Corpus:
        streams = {name: self.open_split(name) for name in ("train", "val", "test") if self._split_files(name)[0]}
        return Corpus(streams, self._vocab_size, self._shard_tokenizer)

    def source_files(self) -> list[Path]:
        return [path for name in ("train", "val", "test") for path in self._split_files(name)[0]]

    def _split_files(self, name: str) -> tuple[list[Path], list[str]]:
        patterns = getattr(self, name)
        return ([], []) if patterns is None else expand(patterns, flag=f"--data.{name}", folders=False)
