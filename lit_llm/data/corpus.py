"""The opened data of a run: its token streams, what identifies their content, and which source files have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_llm.data.document_ends import Documents, missing_documents
from lit_llm.data.stored_files import Seen, StoredFiles
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.token_parts import PartCounts
from lit_llm.tokenizers import Tokenizer

MAX_FILES = 10_000
"""A checkpoint lists no more files than this."""


@dataclass(frozen=True)
class Corpus:
    """Opened token streams with the keys "train", "val" and optionally "test", and their vocabulary."""

    streams: dict[str, TokenStream]
    vocab_size: int
    tokenizer: Tokenizer | None
    text_sizes: Mapping[str, PartCounts] = field(default_factory=dict)
    """Split → its counts from tokenisation, for splits with all their shards."""
    eos_id: int | None = None
    """The id that ends every document; None: no id does."""
    bos_id: int | None = None
    """The id that opens every document; None: no id does."""

    @property
    def pairs(self) -> bool:
        """Whether documents are pairs of a chosen and a rejected answer."""
        return any(stream.pairs for stream in self.streams.values())

    def pair_positions(self) -> np.ndarray:
        """(n,) int64, ascending: the positions of all pairs of all splits, as in "pairs" of a batch."""
        starts = (pool + self.tokens_before(name) for name in self.streams for pool, _ in self.documents(name).pools(2**18))
        return np.concatenate([*starts, np.empty(0, dtype=np.int64)])

    def tokens_before(self, name: str) -> int:
        """The number of tokens in the streams before the stream ``name``."""
        return sum(len(stream) for other, stream in islice(self.streams.items(), list(self.streams).index(name)))

    def documents(self, name: str) -> Documents:
        """The documents of a stream."""
        return Documents(self.streams[name], ends_open=self.ends_open(name))

    def ends_open(self, name: str) -> bool:
        """Whether the id that ends a document of a stream opens the next: all documents end with an id, and begin with none."""
        said = self.streams[name].ends_open
        return (self.eos_id is not None and self.bos_id is None) if said is None else said

    def token_bytes(self) -> Tensor | None:
        """(V,) int64: the UTF-8 bytes of each id; None without a tokenizer. Ids that the tokenizer lacks have 0 bytes."""
        if self.tokenizer is None:
            return None
        sizes = torch.zeros(self.vocab_size, dtype=torch.int64)
        known = torch.from_numpy(self.tokenizer.token_bytes())
        sizes[: len(known)] = known
        return sizes

    def token_bytes_of(self, split: str) -> Tensor | None:
        """`token_bytes`; in float64 and corrected, if their sum over the split is not the number of bytes of the text.

        If the text has unknown characters, the unknown id gets the mean of their bytes. In other cases, such as a space that a
        tokenizer puts before each text, the bytes of all ids are scaled by one factor.
        """
        sizes, text = self.token_bytes(), self.text_sizes.get(split)
        if sizes is None or text is None or text.bytes == text.token_bytes:
            return sizes
        sizes, unknown = sizes.double(), None if self.tokenizer is None else self.tokenizer.unknown_id
        if unknown is None or not text.unknown_tokens:
            return sizes * (text.bytes / max(text.token_bytes, 1))
        sizes[unknown] = (text.bytes - text.token_bytes) / text.unknown_tokens
        return sizes


@dataclass(frozen=True)
class OpenedCorpus:
    """A corpus, and the hashes and files that were found when it was opened."""

    corpus: Corpus
    hashes: dict[str, str]
    """Stream → the hash of its tokens."""
    files: StoredFiles
    """The files that hold the tokens."""
    sources: Seen
    """The files that checkpoints list: the texts, or the files of the tokens. Empty if there are too many."""
    fingerprint: str
    """A hash of the counts and tokens of all streams."""
    with_documents: frozenset[str]
    """The streams whose shards all know where documents end."""

    @classmethod
    def of(cls, corpus: Corpus, sources: Seen | None) -> OpenedCorpus:
        """Check and hash the tokens of a corpus, as far as `TokenStream.scan` reads them.

        Args:
            sources: the texts that the corpus was made from; None: the files of the tokens are the data.

        Raises:
            UserError: a token is outside the vocabulary.
        """
        hashes = {name: stream.scan(corpus.vocab_size) for name, stream in corpus.streams.items()}
        known = frozenset(name for name, stream in corpus.streams.items() if missing_documents(stream) is None)
        files = StoredFiles(file for stream in corpus.streams.values() for file in stream.files())
        listed = files.seen if sources is None else sources
        kept = listed if len(listed) <= MAX_FILES else {}
        return cls(corpus, hashes, files, kept, combined_hash(corpus.streams, hashes), known)

    def change_since(self, files: Mapping[str, list[str]], sources: Iterable[Path]) -> str:
        """One phrase that says which files have changed since a state with another fingerprint was saved.

        Args:
            files: the files that were saved with that state; empty if it lists none.
            sources: the files that hold the data now.
        """
        if files and self.sources:
            changes = file_changes(files, self.sources)
            more = f", and {len(changes) - 5} more" if len(changes) > 5 else ""
            if changes:
                return f"the text is not the checkpoint's: {', '.join(changes[:5])}{more}"
            return "the files are the checkpoint's, but their tokens differ: the tokenizer or the split has changed"
        folders = list(dict.fromkeys(str(path.parent) for path in sources))
        where = f" in {', '.join(folders[:5])}" if folders else ""
        return f"the text{where} is not the checkpoint's, which does not list its files"


def combined_hash(streams: Mapping[str, TokenStream], hashes: Mapping[str, str]) -> str:
    """One hash of the counts and hashes of streams."""
    content = " ".join(f"{name}={len(stream)}:{hashes[name]}" for name, stream in streams.items())
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def file_changes(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """The changes of files: "a.txt has changed", "b.txt is gone", "c.txt is new". A file that only moved is unchanged."""
    same = ({blake2b for _, blake2b in before.values()} & {blake2b for _, blake2b in now.values()}) - {""}
    both = [path for path in before if path in now and before[path][0] != now[path][0]]
    changed = [f"{path} has changed" for path in both if before[path][1] != now[path][1] or not now[path][1]]
    gone = [f"{path} is gone" for path, (_, blake2b) in before.items() if path not in now and blake2b not in same]
    new = [f"{path} is new" for path, (_, blake2b) in now.items() if path not in before and blake2b not in same]
    return changed + gone + new
