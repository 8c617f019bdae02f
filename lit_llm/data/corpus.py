"""The data of a run: token streams with their vocabulary, hashes that identify the tokens, and the blocks that batches read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from lit_llm.data.document_ends import Documents, missing_documents
from lit_llm.data.pack_plan import PackPlan, open_plan
from lit_llm.data.stored_files import Seen, StoredFiles
from lit_llm.data.teacher import Teacher
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.chat import ChatForm
from lit_llm.ingest.token_parts import PartCounts
from lit_llm.tokenizers import Tokenizer

MAX_FILES = 10_000  # the most files that a checkpoint lists
_OF_SOURCE = "fingerprint of "


@dataclass(frozen=True)
class Corpus:
    """Record of opened token streams, by the names "train", "val" and optionally "test", and the vocabulary of their tokens.

    In a mixture, the name of a stream begins with the name of its source: "web/train".
    """

    streams: dict[str, TokenStream]
    vocab_size: int
    tokenizer: Tokenizer | None
    text_sizes: Mapping[str, PartCounts] = field(default_factory=dict)
    """Split → counts of its documents, bytes and tokens from tokenisation. Only for splits with all shards in the corpus."""
    eos_id: int | None = None
    """The id that ends every document; None: no id does."""
    bos_id: int | None = None
    """The id that opens every document; None: no id does."""
    train_streams: tuple[str, ...] = ("train",)
    """The names of the streams that training reads."""
    sources: tuple[str, ...] = ()
    """The names of a mixture's sources, in the order of their numbers in a batch's "sources". Empty without a mixture."""

    def refuse_training(self, block_size: int, packing: str) -> None:
        """Check that training can read blocks of ``block_size`` tokens with ``packing`` "concatenate" or "best_fit".

        Raises:
            UserError: there are too few tokens for a block; or there are preference pairs in a mixture, or without "best_fit".
        """
        tokens = self.tokens_of("train")
        if tokens < block_size + 1:
            raise UserError(
                f"The training text has {tokens} tokens, but a block needs {block_size + 1} ({block_size} and the next one): "
                "give more text, or lower --model.block_size."
            )
        if self.pairs and self.sources:
            raise UserError(
                "A mixture has no pairs of answers: train on one folder with them (--data TokenShards --data.path DIR)."
            )
        if self.pairs and packing != "best_fit":
            raise UserError("Both answers of a pair must be in one block (--data.packing best_fit).")

    def of_split(self, split: str) -> dict[str, TokenStream]:
        """Name → stream, for the streams of a split: one stream or, in a mixture, one for each source that has the split."""
        return {name: stream for name, stream in self.streams.items() if split_of(name) == split}

    def tokens_of(self, split: str) -> int:
        """Number of tokens of a split, over all sources."""
        return sum(map(len, self.of_split(split).values()))

    @property
    def pairs(self) -> bool:
        """Whether documents are pairs of a chosen and a rejected answer."""
        return any(stream.pairs for stream in self.streams.values())

    def pair_positions(self) -> np.ndarray:
        """The position of each preference pair's first input, counted in tokens over all streams in order: (n,) int64."""
        starts = (pool + self.tokens_before(name) for name in self.streams for pool, _ in self.documents(name).pools(2**18))
        return np.concatenate([*starts, np.empty(0, dtype=np.int64)])

    def tokens_before(self, name: str) -> int:
        """The number of tokens in the streams that come before the stream ``name`` in `streams`."""
        return sum(len(stream) for other, stream in islice(self.streams.items(), list(self.streams).index(name)))

    def documents(self, name: str) -> Documents:
        """The positions and lengths of the documents of the stream ``name``, read from the document ends of its shards."""
        return Documents(self.streams[name], ends_open=self.ends_open(name))

    def ends_open(self, name: str) -> bool:
        """Whether the id that ends a document of the stream ``name`` also opens the next document (see ``Documents``).

        The stream's manifest decides. Without a manifest: True if documents end with an id (EOS) and begin with none (no BOS).
        """
        said = self.streams[name].ends_open
        return (self.eos_id is not None and self.bos_id is None) if said is None else said

    def token_bytes(self) -> Tensor | None:
        """The number of UTF-8 bytes of each id's text, (V,) int64; 0 if the tokenizer lacks the id. None: no tokenizer."""
        if self.tokenizer is None:
            return None
        sizes = torch.zeros(self.vocab_size, dtype=torch.int64)
        known = torch.from_numpy(self.tokenizer.token_bytes())
        sizes[: len(known)] = known
        return sizes

    def token_bytes_of(self, split: str) -> Tensor | None:
        """The number of bytes of each token id, (V,), corrected for the text of a split; None without a tokenizer.

        If the numbers of `token_bytes` add up to the text's bytes over the tokens of the split, they are returned as they are.
        If not, the result is float64: if the text has characters that the tokenizer does not know, the unknown id gets the mean
        number of their bytes; otherwise, as with a tokenizer that puts a space before each text, one factor scales all numbers.
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
    """Record of a corpus, the hashes and files found when it was opened, and the packing plans and teachers opened later."""

    corpus: Corpus
    hashes: dict[str, str]  # name of a stream → hash of its tokens
    files: StoredFiles  # the files of the tokens, masks and document ends
    sources: Seen  # the files that checkpoints list: the texts, or the files of the tokens; empty if there are too many
    with_documents: frozenset[str]  # the names of the streams whose shards all say where documents end
    plans: dict[str, PackPlan] = field(default_factory=dict)  # name of a stream → plan of its packed blocks (`with_plans`)
    teachers: dict[str, Teacher] = field(default_factory=dict)  # name of a training stream → its teacher (`with_teachers`)

    @classmethod
    def of(cls, corpus: Corpus, sources: Seen | None) -> OpenedCorpus:
        """Check and hash the tokens of a corpus with `TokenStream.scan`, and return the opened corpus.

        Args:
            sources: the texts that the corpus was made from, for checkpoints to list. None: checkpoints list the token files.

        Raises:
            UserError: a token is outside the vocabulary.
        """
        hashes = {name: stream.scan(corpus.vocab_size) for name, stream in corpus.streams.items()}
        known = frozenset(name for name, stream in corpus.streams.items() if missing_documents(stream) is None)
        files = StoredFiles(file for stream in corpus.streams.values() for file in stream.files())
        listed = files.seen if sources is None else sources
        kept = listed if len(listed) <= MAX_FILES else {}
        return cls(corpus, hashes, files, kept, known)

    def fingerprint(self, source: str = "") -> str:
        """A hash of the token counts and tokens of all streams or, in a mixture, of the streams of the source ``source``."""
        streams = {name: stream for name, stream in self.corpus.streams.items() if name.startswith(f"{source}/".lstrip("/"))}
        content = " ".join(f"{name}={len(stream)}:{self.hashes[name]}" for name, stream in streams.items())
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints (hashes of tokens) that a checkpoint stores, by key: one of all data; in a mixture, one a source."""
        of_sources = {f"{_OF_SOURCE}{source}": self.fingerprint(source) for source in self.corpus.sources}
        return of_sources or {"fingerprint": self.fingerprint()}

    def change_since(self, name: str, files: Mapping[str, list[str]], sources: Callable[[], Iterable[Path]]) -> str:
        """One phrase on why a fingerprint is not the checkpoint's: a source or files have changed, or the tokenizer or split.

        Args:
            name: the fingerprint's key in `fingerprints`.
            files: path → [state, hash] of the files that the checkpoint lists; empty if it lists none.
            sources: returns the paths of the files that the data are now read from.
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
        """A copy of this object with `plans`, the packing plan of each training stream (with preference pairs, of each stream).

        Raises:
            UserError: `open_plan`, which opens a plan or makes it, raises an error.
        """
        if self.plans:
            return self
        names = self.corpus.streams if self.corpus.pairs else self.corpus.train_streams
        documents, hashes = self.corpus.documents, self.hashes
        return replace(self, plans={n: open_plan(documents(n), size=block_size, tokens_hash=hashes[n]) for n in names})

    def with_teachers(self, block_size: int, packing: str) -> OpenedCorpus:
        """A copy of this object with `teachers`, the teacher of each training stream. Adds the teachers' files to `files`.

        Raises:
            UserError: `Teacher` raises an error, or the sources of a mixture have different teachers.
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
        """The dataset of a split's blocks, in the order of the text. In a mixture, addresses in training are (source, block).

        Args:
            packed: whether training reads the packed blocks of `plans`; False: training reads consecutive tokens.
            documents: whether batches have "documents"; with preference pairs they always have. No batch has "documents" if a
                shard of the split does not say where documents end.
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
        else:
            blocks = PackedBlocks(stream, self.plans[name], **settings) if packed else TrainBlocks(stream, **settings)
        blocks.teacher = self.teachers.get(name)
        return blocks

    def cut_conversations(self) -> str:
        """A sentence with the number of training conversations that are longer than a block and so are cut; "" if none is."""
        plans = [plan for name, plan in self.plans.items() if self.corpus.streams[name].masked]
        cut, documents = sum(plan.counts.cut for plan in plans), sum(plan.counts.documents for plan in plans)
        if not cut:
            return ""
        return (
            f"{cut:,} of {documents:,} training conversations are longer than data.block_size {plans[0].size} and are cut, so "
            "that answers may lose their question (--data.block_size)"
        )


def file_changes(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> list[str]:
    """One phrase per changed file: "a.txt has changed", "b.txt is gone", "c.txt is new". A file that only moved is unchanged.

    Args:
        before: the files before, as path → [state, hash] (`Seen`).
        now: the files now, in the same form.
    """
    same = ({blake2b for _, blake2b in before.values()} & {blake2b for _, blake2b in now.values()}) - {""}
    both = [path for path in before if path in now and before[path][0] != now[path][0]]
    changed = [f"{path} has changed" for path in both if before[path][1] != now[path][1] or not now[path][1]]
    gone = [f"{path} is gone" for path, (_, blake2b) in before.items() if path not in now and blake2b not in same]
    new = [f"{path} is new" for path, (_, blake2b) in now.items() if path not in before and blake2b not in same]
    return changed + gone + new


def chat_forms(streams: Iterable[TokenStream]) -> dict[ChatForm, Path]:
    """The forms (chat template and end-of-turn id) of the streams' conversations: form → the first folder that has it.

    Raises:
        UserError: A file of a form is missing or damaged.
    """
    forms: dict[ChatForm, Path] = {}
    for stream in streams:
        if (folder := stream.folder_of_manifest) is not None and (form := ChatForm.read(folder)) is not None:
            forms.setdefault(form, folder)
    return forms


def split_of(name: str) -> str:
    """The split of a stream: "train" of "train", and of "web/train" in a mixture."""
    return name.rpartition("/")[2]
