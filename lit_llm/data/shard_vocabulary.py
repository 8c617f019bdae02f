"""Find the vocabulary, the tokenizer and the BOS and EOS ids around documents of token shards, in settings and manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lit_llm.core.errors import UserError, noting
from lit_llm.core.number_domain import range_problems, whole
from lit_llm.ingest.shard_manifest import Manifest
from lit_llm.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer

_GPT2_VOCAB_SIZE = 50257


VocabSize = Annotated[int | None, whole(1, 100_000_000)]
TokenId = Annotated[int | None, whole(0, 100_000_000)]


@dataclass(frozen=True)
class ShardVocabulary:
    """The settings of the vocabulary of token shards. A setting is None if the user left it out.

    Methods take ``manifests``: the manifests of the splits that decide the vocabulary (``ShardDataModule.described_by``).
    """

    vocab_size: VocabSize
    tokenizer: Tokenizer | None
    bos_id: int | None
    eos_id: int | None

    @property
    def needs_manifest(self) -> bool:
        """Whether the settings do not give the number of token ids, so that only a manifest can."""
        return self.vocab_size is None and self.tokenizer is None

    def size(self, manifests: Sequence[Manifest]) -> int:
        """The number of token ids: the setting's, else the tokenizer's, else the first manifest's, else GPT-2's."""
        if self.vocab_size is not None:
            return self.vocab_size
        if self.tokenizer is not None:
            return self.tokenizer.vocab_size
        return manifests[0].vocab_size if manifests else _GPT2_VOCAB_SIZE

    def problems(self, manifests: Sequence[Manifest]) -> list[str]:
        """A sentence for each setting that is out of range; or, if none is, for each that contradicts another or a manifest."""
        size = self.size(manifests)
        if problems := range_problems(ShardVocabulary, "data", vars(self)):
            return problems
        if self.tokenizer is not None and self.tokenizer.vocab_size > size:
            problems.append(
                f"vocab_size {size} is smaller than the tokenizer's {self.tokenizer.vocab_size}: remove --data.vocab_size."
            )
        for name in ("bos_id", "eos_id"):
            given = getattr(self, name)
            if given is not None:
                problems += self._id_problems(name, given, size, manifests)
        return problems

    def _id_problems(self, name: str, given: int, size: int, manifests: Sequence[Manifest]) -> list[str]:
        """A list with a sentence if the value ``given`` of the setting ``name`` ("bos_id" or "eos_id") is no id of a vocabulary
        of ``size`` ids, or differs from the id of a manifest or of the tokenizer; else empty."""
        if not 0 <= given < size:
            return [f"{name} is {given}, but the vocabulary has {size} ids (--data.{name})."]
        for manifest in manifests:
            if getattr(manifest, name) != given:
                return [f"{name} is {given}, but meta.json of the shards says {getattr(manifest, name)}: remove --data.{name}."]
        if self.tokenizer is not None and getattr(self.tokenizer, name) != given:
            token = self.tokenizer.decode([given])
            return [
                f"{name} is {given}, but that of the tokenizer is {getattr(self.tokenizer, name)}: remove --data.{name}, or "
                f"set --data.tokenizer.{name.replace('_id', '_token')} {token!r}."
            ]
        return []

    def tokenizer_problems(self, manifests: Sequence[Manifest], folder: Path | None) -> list[str]:
        """A list with a sentence if the settings' tokenizer is not that in ``folder``, the folder of a manifest; else empty."""
        if self.tokenizer is None or any(each.tokenizer == self.tokenizer.identity() for each in manifests):
            return []
        problems: list[str] = []
        with noting(problems):
            self.load_tokenizer(folder)
        return problems

    def document_id(self, name: str, manifests: Sequence[Manifest], tokenizer: Tokenizer | None) -> int | None:
        """The id that opens ("bos_id") or ends ("eos_id") documents: the setting, else a manifest's, else the tokenizer's."""
        known = (getattr(self, name), *(getattr(each, name) for each in manifests), getattr(tokenizer, name, None))
        return next((token_id for token_id in known if token_id is not None), None)

    def load_tokenizer(self, folder: Path | None) -> Tokenizer | None:
        """Load the tokenizer in ``folder``, a manifest's folder. If it has none, return the settings' tokenizer, or None.

        Raises:
            UserError: both tokenizers exist, and their vocabularies or the BOS or EOS ids that the settings name differ.
        """
        if folder is None or not (folder / TOKENIZER_FILE).exists():
            return self.tokenizer
        own = load_tokenizer(folder)
        if self.tokenizer is None:
            return own
        if not self.tokenizer.same_vocabulary(own):
            raise UserError(
                f"{folder} was prepared with another tokenizer than that of the settings or of --init_from: prepare the text "
                "again with that one (prepare --data.tokenizer), or remove --data.tokenizer."
            )
        for name in getattr(self.tokenizer, "named", []):
            if (given := getattr(self.tokenizer, name)) != getattr(own, name):
                raise UserError(
                    f"{folder} was prepared with {name} {getattr(own, name)}, not {given}: prepare the text again with "
                    f"--data.tokenizer.{name.replace('_id', '_token')} {own.decode([given])!r}, or remove the flag."
                )
        return own
