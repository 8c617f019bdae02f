"""Read documents from WebDataset tars. The files of a sample follow each other and have the same name up to the first dot."""

from __future__ import annotations

import codecs
import itertools
import tarfile
from collections.abc import Generator, Iterator
from typing import IO, BinaryIO, cast

from lit_llm.core.errors import UserError
from lit_llm.ingest.readers.detect import text_pieces
from lit_llm.ingest.readers.interface import Piece, SourceFile
from lit_llm.ingest.readers.jsonl import document_of, parse_object
from lit_llm.ingest.readers.plain_text import cut_pieces, read_chunks, without_mark

_MOST_EXTENSIONS = 10  # the most file extensions that a message names


def read_tar(stream: BinaryIO, of: SourceFile) -> Iterator[Piece]:
    """Yield the documents of a tar, in pieces, in the order of its files.

    Each .txt file is a document. A sample (the files whose names are equal up to the first dot) without .txt files has its text
    in its .json files, under the key. Other files, and hidden files, are ignored. A link to a .txt or .json file is refused,
    because a stream cannot go back to the linked file.

    Raises:
        UserError: The tar is damaged, a sample has no text, or its JSON has no string under the key.
    """
    samples = 0
    try:
        for _, members in itertools.groupby(_members(stream, of.name), key=lambda member: member[0]):
            yield from _sample(members, of)
            samples += 1
    except UserError:
        raise
    except (tarfile.TarError, ValueError, OverflowError) as error:  # tarfile reads numbers of a sparse header without a check
        raise UserError(f"{of.name} is truncated or damaged: copy or download it again.") from error
    if not samples:
        raise UserError(f"{of.name} is a tar without files of text: leave it out.")


def _sample(members: Iterator[tuple[str, str, IO[bytes]]], of: SourceFile) -> Iterator[Piece]:
    """Yield the documents of one sample: its .txt files, else its .json files. ``members``: its files, as from `_members`."""
    has_text = False
    objects: list[tuple[str, bytes]] = []
    extensions: dict[str, None] = {}  # an ordered set
    stem = ""
    for stem, extension, content in members:
        kind = extension.lower().rpartition(".")[2]
        where = f"{of.name}: {stem}.{extension}"
        extensions[extension] = None
        if kind == "txt":
            has_text = True
            of.skipped += not (yield from _text(cast(BinaryIO, content), where))
        elif kind == "json" and not has_text:  # a .txt file may follow
            objects.append((where, content.read().removeprefix(codecs.BOM_UTF8)))
    if has_text:
        return
    if not objects:
        names = ["." + extension if extension else "no extension" for extension in extensions]
        seen = ", ".join(names[:_MOST_EXTENSIONS])
        raise UserError(
            f"{of.name} holds no .txt and no .json for {stem!r}, only {seen}: "
            "give a WebDataset of text, or unpack the tar and give the files of text."
        )
    for where, whole in objects:
        yield from document_of(parse_object(whole, of, where), of, where=where)


def _text(content: BinaryIO, where: str) -> Generator[Piece, None, bool]:
    """Yield the pieces of a text file. Return whether the file has any piece."""
    found = False
    for piece in text_pieces(cut_pieces(without_mark(read_chunks(content))), name=where):
        found = True
        yield piece
    return found


def _members(stream: BinaryIO, name: str) -> Iterator[tuple[str, str, IO[bytes]]]:
    """Yield the files of a tar that are not hidden as (path up to the first dot of the file's name, rest of the name, content).
    Raises a UserError for a link to a .txt or .json file, and for a tar that is damaged or followed by other data."""
    blocks = _Blocks(stream)
    # tarfile reads one block at a time, so that the last block read is the block that ended the archive.
    tar = tarfile.open(fileobj=cast(BinaryIO, blocks), mode="r|", bufsize=tarfile.BLOCKSIZE)  # noqa: SIM115 - no file
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep them all
        folder, slash, basename = member.name.rpartition("/")
        stem, _, extension = basename.partition(".")
        if (member.islnk() or member.issym()) and stem and extension.lower().rpartition(".")[2] in ("txt", "json"):
            raise UserError(
                f"{name}: {member.name} is a link to {member.linkname}, and links are not read: make the tar again with "
                "tar --dereference --hard-dereference, or leave it out with tar --exclude."
            )
        content = tar.extractfile(member) if member.isreg() and stem else None
        if content is not None:
            yield folder + slash + stem, extension, content
    if blocks.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a damaged header for the end
        raise UserError(f"{name} is truncated or damaged: its end mark is missing. Copy or download it again.")
    while rest := stream.read(tarfile.RECORDSIZE):
        if rest.strip(b"\0"):
            raise UserError(f"{name} holds data after the end of its tar: give each tar as a file of its own.")


class _Blocks:
    """A wrapper of a binary stream. Its attribute ``last`` has the bytes of the latest call of ``read``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.last = stream, b""

    def read(self, size: int) -> bytes:
        self.last = self._stream.read(size)
        return self.last
