"""The methods by which a data module describes its text, and the properties that models, objectives and callbacks read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lit_llm.data.corpus import Corpus, OpenedCorpus, chat_forms
from lit_llm.data.stored_files import Seen
from lit_llm.ingest.chat import ChatForm
from lit_llm.tokenizers import Tokenizer


class HoldsCorpus(ABC):
    """Base class of data modules: a subclass opens a corpus (token streams and their vocabulary), and properties such as
    ``vocab_size`` describe the corpus."""

    _opened: OpenedCorpus | None = None
    # Whether rank 0 opens the data for all ranks. The data must have the same paths on all ranks.
    opens_on_rank_zero = False
    # The end of the line about the validation split that `validate` prints: of which data the split is a part.
    held_out = ""
    source_names: Sequence[str] = ()  # the sources of a mixture, in the order of a batch's ``sources``

    @abstractmethod
    def source_problems(self) -> list[str]:
        """One sentence for each problem of the subclass's arguments. The checks are cheap: no token is read."""

    @abstractmethod
    def open_corpus(self) -> Corpus:
        """Open the token files and return the corpus. Called once on every rank; if ``opens_on_rank_zero``, only on rank 0."""

    def source_files(self) -> list[Path]:
        """The paths of the files with the data, for messages that name changed files; empty if the files are unknown."""
        return []

    def seen_sources(self) -> Seen | None:
        """The text files that were tokenised: path → ["SIZE CTIME INODE", hash]. None: only the token files are known."""
        return None

    def missing_text(self, split: str) -> str:
        """The error message for data that lack the split ``split``."""
        return f"No {split} text: give --data.{split}."

    @property
    def is_open(self) -> bool:
        """Whether the data are open. If not, only `is_open`, `knows_documents`, `held_out` and `source_names` can be read."""
        return self._opened is not None

    @property
    def opened(self) -> OpenedCorpus:
        assert self._opened is not None, "setup() opens the data"
        return self._opened

    @property
    def corpus(self) -> Corpus:
        return self.opened.corpus

    @property
    def train_tokens(self) -> int:
        return self.corpus.tokens_of("train")

    @property
    def val_tokens(self) -> int:
        return self.corpus.tokens_of("val")

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.corpus.tokenizer

    @property
    def token_bytes(self) -> Tensor | None:
        """(vocab_size,) int64: the number of UTF-8 bytes of each id's text; None without a tokenizer."""
        return self.corpus.token_bytes()

    @property
    def eos_id(self) -> int | None:
        """The id that ends every document; None: no id does."""
        return self.corpus.eos_id

    @property
    def bos_id(self) -> int | None:
        """The id that opens every document; None: no id does."""
        return self.corpus.bos_id

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for characters outside the tokenizer's vocabulary; None without a tokenizer or such an id."""
        return None if self.tokenizer is None else self.tokenizer.unknown_id

    @property
    def chat_form(self) -> ChatForm | None:
        """The chat template and end-of-turn id of the training conversations; None if documents are not conversations."""
        training = (self.corpus.streams[name] for name in self.corpus.train_streams)
        return next(iter(chat_forms(training)), None)

    @property
    def pairs(self) -> bool:
        """Whether documents are pairs of a chosen and a rejected answer. If so, batches have "pairs" (``PairBlocks``)."""
        return self.corpus.pairs

    @property
    def knows_documents(self) -> bool:
        """Whether all shards say where documents end. If not, the model searches for BOS or EOS. False before data are open."""
        return self._opened is not None and self._opened.with_documents.issuperset(self.corpus.streams)

    @property
    def ends_open(self) -> bool:
        """Whether the id that ends a training document also opens the next document, as in data with EOS and without BOS."""
        return all(map(self.corpus.ends_open, self.corpus.of_split("train")))
