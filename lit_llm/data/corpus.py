"""The opened data of a run: its token streams, what identifies their content, and which source files have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lit_llm.data.document_ends import missing_documents
from lit_llm.data.stored_files import Seen, StoredFiles
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.token_parts import PartCounts
from lit_llm.tokenizers import Tokenizer

# Before the fingerprint of data of which every token was hashed. Others are of samples: long data without a manifest.
_ALL_TOKENS = "tokens-"

MAX_FILES = 10_000
"""A checkpoint lists no more files than this. If there are more, every launch hashes all of them in the background."""


@dataclass(frozen=True)
class Corpus:
    """Opened token streams with the keys "train", "val" and optionally "test", and their vocabulary."""

    streams: dict[str, TokenStream]
    vocab_size: int
    tokenizer: Tokenizer | None
    text_sizes: Mapping[str, PartCounts] = field(default_factory=dict)
    """Split → what was counted when it was tokenised, where it is complete."""
    eos_id: int | None = None
    """Ends every document; None: the tokenizer's."""
    bos_id: int | None = None
    """Opens every document; None: nothing does."""


@dataclass(frozen=True)
class OpenedCorpus:
    """A corpus, and what was found out when it was opened."""

    corpus: Corpus
    hashes: dict[str, str]
    """Of the tokens of each stream."""
    files: StoredFiles
    """The files that hold the tokens."""
    sources: Seen
    """The files that checkpoints list: the texts, or the files of the tokens. Empty if there are too many."""
    fingerprint: str
    """Of the counts and tokens of all streams; it starts with "tokens-" if every token was hashed."""
    with_documents: frozenset[str]
    """The streams whose shards all know where documents end."""

    @classmethod
    def of(cls, corpus: Corpus, sources: Seen | None) -> OpenedCorpus:
        """Check the token ids of a corpus, as far as `TokenStream.scan` reads them.

        Args:
            sources: the texts that it was made from; None: the files of the tokens are the data.

        Raises:
            UserError: a token is outside the vocabulary.
        """
        hashes = {name: stream.scan(corpus.vocab_size) for name, stream in corpus.streams.items()}
        form = _ALL_TOKENS if all(stream.hash_covers_all for stream in corpus.streams.values()) else ""
        known = frozenset(name for name, stream in corpus.streams.items() if missing_documents(stream) is None)
        files = StoredFiles(file for stream in corpus.streams.values() for file in stream.files())
        listed = files.seen if sources is None else sources
        kept = listed if len(listed) <= MAX_FILES else {}
        return cls(corpus, hashes, files, kept, form + combined_hash(corpus.streams, hashes), known)

    def is_of_samples(self, fingerprint: str) -> bool:
        """Whether a saved fingerprint is of samples of these data: then they had no manifest yet."""
        streams, vocab_size = self.corpus.streams, self.corpus.vocab_size
        sampled = {name: stream.scan_tokens(vocab_size) for name, stream in streams.items()}
        return not fingerprint.startswith(_ALL_TOKENS) and fingerprint == combined_hash(streams, sampled)

    def change_since(self, fingerprint: str, files: Mapping[str, list[str]], sources: Iterable[Path]) -> str:
        """One phrase about a saved fingerprint that differs: which files have changed, as far as they were saved.

        Args:
            files: those that were saved with it.
            sources: the files that hold the data now.
        """
        if fingerprint.startswith(_ALL_TOKENS) and not self.fingerprint.startswith(_ALL_TOKENS):
            return (
                "the checkpoint has a hash of every token, and the shards have none any more: restore the meta.json that "
                "prepare wrote beside them"
            )
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
    """What happened to each file: "a.txt has changed", "b.txt is gone", "c.txt is new". A file that only moved is unchanged."""
    same = ({blake2b for _, blake2b in before.values()} & {blake2b for _, blake2b in now.values()}) - {""}
    both = [path for path in before if path in now and before[path][0] != now[path][0]]
    changed = [f"{path} has changed" for path in both if before[path][1] != now[path][1] or not now[path][1]]
    gone = [f"{path} is gone" for path, (_, blake2b) in before.items() if path not in now and blake2b not in same]
    new = [f"{path} is new" for path, (_, blake2b) in now.items() if path not in before and blake2b not in same]
    return changed + gone + new
