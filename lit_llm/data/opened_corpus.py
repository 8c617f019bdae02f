"""The corpus once it is open: hashes that identify it, its files, and the blocks that batches read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_llm.core.errors import UserError
from lit_llm.data.blocks import (
    Blocks,
    HeldOutBlocks,
    HeldOutMixtureBlocks,
    MixtureBlocks,
    PackedBlocks,
    PairBlocks,
    StreamBlocks,
    TrainBlocks,
)
from lit_llm.data.corpus import Corpus
from lit_llm.data.document_ends import missing_documents
from lit_llm.data.pack_plan import PackPlan, open_plan
from lit_llm.data.stored_files import Seen, StoredFiles
from lit_llm.data.teacher import Teacher
from lit_llm.data.token_stream import TokenStream

MAX_FILES = 10_000
"""A checkpoint lists no more files than this."""
_OF_SOURCE = "fingerprint of "


@dataclass(frozen=True)
class OpenedCorpus:
    """A corpus, the hashes and files that were found when it was opened, and what was then read beside its shards."""

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
    plans: dict[str, PackPlan] = field(default_factory=dict)
    """Stream → the plan of its packed blocks, after `with_plans`."""
    teachers: dict[str, Teacher] = field(default_factory=dict)
    """Training stream → the predictions of its teacher, after `with_teachers`."""

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

    @property
    def fingerprints(self) -> dict[str, str]:
        """Key in a saved state → a hash of counts and tokens: of all streams, or of each source's streams in a mixture."""
        if not self.corpus.sources:
            return {"fingerprint": self.fingerprint}
        streams = self.corpus.streams
        of_source = {
            source: {name: stream for name, stream in streams.items() if name.startswith(f"{source}/")}
            for source in self.corpus.sources
        }
        return {f"{_OF_SOURCE}{source}": combined_hash(each, self.hashes) for source, each in of_source.items()}

    def change_since(self, name: str, files: Mapping[str, list[str]], sources: Callable[[], Iterable[Path]]) -> str:
        """One phrase that says which source or files have changed since a state with another fingerprint was saved.

        Args:
            name: the fingerprint's key in `fingerprints`.
            files: the files that were saved with that state; empty if it lists none.
            sources: returns the files that hold the data now.
        """
        if self.corpus.sources:
            return f"the text of {name.removeprefix(_OF_SOURCE)} is not the checkpoint's"
        if files and self.sources:
            changes = file_changes(files, self.sources)
            more = f", and {len(changes) - 5} more" if len(changes) > 5 else ""
            if changes:
                return f"the text is not the checkpoint's: {', '.join(changes[:5])}{more}"
            return "the files are the checkpoint's, but their tokens differ: the tokenizer or the split has changed"
        folders = list(dict.fromkeys(str(path.parent) for path in sources()))
        where = f" in {', '.join(folders[:5])}" if folders else ""
        return f"the text{where} is not the checkpoint's, which does not list its files"

    def with_plans(self, block_size: int) -> OpenedCorpus:
        """This corpus with the plans of its packed blocks, of all streams if documents are pairs, otherwise of the training.

        Raises:
            UserError: as `open_plan`, which makes a missing plan.
        """
        if self.plans:
            return self
        names = self.corpus.streams if self.corpus.pairs else self.corpus.train_streams
        documents = {name: self.corpus.documents(name) for name in names}
        plans = {name: open_plan(documents[name], size=block_size, tokens_hash=self.hashes[name]) for name in names}
        return replace(self, plans=plans)

    def with_teachers(self, block_size: int, packing: str) -> OpenedCorpus:
        """This corpus with a teacher's ids and log-probabilities for its training streams. `files` gets the teacher's files.

        Raises:
            UserError: as `Teacher`; or the sources of a mixture have different teachers.
        """
        expected = {"vocab_size": self.corpus.vocab_size, "block_size": block_size, "packing": packing}
        teachers = {}
        for name in self.corpus.train_streams:
            teachers[name] = Teacher(self.corpus.streams[name], expected | {"tokens": self.hashes[name]})
            self.files.add(teachers[name].files())
        if len({teacher.info.name for teacher in teachers.values()}) > 1:
            raise UserError("The sources have different teachers: prepare all with one, and equal --top_k and --temperature.")
        return replace(self, teachers=teachers)

    def blocks(self, split: str, *, block_size: int, packed: bool, documents: bool) -> Blocks:
        """The blocks of a split, in the order of the text. In a mixture, their addresses are (source, block).

        Args:
            packed: whether training reads the blocks of the plans.
            documents: whether batches have the numbers of documents, if all shards of the split know where documents end.
        """
        corpus = self.corpus
        known = (documents or corpus.pairs) and self.with_documents.issuperset(corpus.of_split(split))
        names = corpus.train_streams if split == "train" else tuple(corpus.of_split(split))
        of_streams = {name: self._of_stream(name, block_size, packed=packed, documents=known) for name in names}
        if not corpus.sources:
            return of_streams[split]
        numbered = {corpus.sources.index(name.rpartition("/")[0]): blocks for name, blocks in of_streams.items()}
        return MixtureBlocks(numbered) if split == "train" else HeldOutMixtureBlocks(numbered)

    def _of_stream(self, name: str, block_size: int, *, packed: bool, documents: bool) -> StreamBlocks:
        corpus, stream = self.corpus, self.corpus.streams[name]
        settings: dict[str, Any] = {"block_size": block_size, "vocab_size": corpus.vocab_size}
        settings["documents"] = corpus.documents(name) if documents else None
        blocks: StreamBlocks
        if corpus.pairs:
            blocks = PairBlocks(stream, self.plans[name], first=corpus.tokens_before(name), **settings)
        elif name not in corpus.train_streams:
            blocks = HeldOutBlocks(stream, **settings)
        elif packed:
            blocks = PackedBlocks(stream, self.plans[name], **settings)
        else:
            blocks = TrainBlocks(stream, **settings)
        blocks.teacher = self.teachers.get(name)
        return blocks

    def cut_conversations(self) -> str:
        """A sentence, if the plans of training documents with masks have documents that are longer than a block; else ""."""
        plans = [plan for name, plan in self.plans.items() if self.corpus.streams[name].masked]
        cut, documents = sum(plan.counts.cut for plan in plans), sum(plan.counts.documents for plan in plans)
        if not cut:
            return ""
        return (
            f"{cut:,} of {documents:,} training conversations are longer than data.block_size {plans[0].size} and are cut, so "
            "that answers may lose their question (--data.block_size)"
        )


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
