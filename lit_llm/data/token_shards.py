"""Train on token shards that exist already: published ones, or those that ``prepare`` wrote."""

from __future__ import annotations

from pathlib import Path

from lit_llm.data.datamodule import Corpus, TokenDataModule
from lit_llm.data.paths import expand
from lit_llm.data.shards import TokenStream
from lit_llm.data.tokenizer import Tokenizer
from lit_llm.errors import UserError

_GPT2_VOCAB_SIZE = 50257


class TokenShards(TokenDataModule):
    """Shards in the layout of llm.c (see ``lit_llm.data.shards``).

    Args:
        train: files, globs, or a list of these; read in the order given, a glob's matches sorted.
        val: the same, to validate with.
        test: the same, for ``test``.
        vocab_size: ids in the vocabulary; every token must be below. None: the tokenizer's, or GPT-2's 50257 without
            one.
        tokenizer: what the shards were made with. Needed for text samples and bits per byte, not for training.
        headerless: the files hold bare uint16 tokens, as nanoGPT writes them.
        micro_batch_size: sequences in one forward pass of one rank. None: the rank's whole share of the global batch.
        global_batch_size: sequences per optimizer step over all ranks.
        block_size: tokens predicted per sequence. None: the model's.
        seed: names the order of the training samples.
        num_workers: processes that read ahead.
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
        micro_batch_size: int | None = None,
        global_batch_size: int = 32,
        block_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            block_size=block_size,
            seed=seed,
            num_workers=num_workers,
        )
        self.train, self.val, self.test = train, val, test
        if vocab_size is None:
            vocab_size = _GPT2_VOCAB_SIZE if tokenizer is None else tokenizer.vocab_size
        self._vocab_size = vocab_size
        self._shard_tokenizer, self.headerless = tokenizer, headerless

    def source_problems(self) -> list[str]:
        problems = [f"There are no {n} shards: give --data.{n}." for n in ("train", "val") if getattr(self, n) is None]
        for name in ("train", "val", "test"):
            files, found = self._files(name)
            problems += found
            if files and not found:
                try:
                    if len(TokenStream(files, headerless=self.headerless)) < 2:
                        problems.append(f"The {name} shards hold one token: nothing can be predicted (--data.{name}).")
                except UserError as error:
                    problems += str(error).split("\n")
        if self._vocab_size < 1:
            problems.append(f"vocab_size must be at least 1, not {self._vocab_size} (--data.vocab_size).")
        elif self._shard_tokenizer is not None and self._shard_tokenizer.vocab_size > self._vocab_size:
            problems.append(
                f"vocab_size {self._vocab_size} is smaller than the tokenizer's {self._shard_tokenizer.vocab_size}: "
                "leave --data.vocab_size out."
            )
        return problems

    def open_corpus(self) -> Corpus:
        streams = {}
        for name in ("train", "val", "test"):
            if files := self._files(name)[0]:
                streams[name] = TokenStream(files, headerless=self.headerless)
        return Corpus(streams, self._vocab_size, self._shard_tokenizer)

    def _files(self, name: str) -> tuple[list[Path], list[str]]:
        patterns = getattr(self, name)
        return ([], []) if patterns is None else expand(patterns, flag=f"--data.{name}", folders=False)
