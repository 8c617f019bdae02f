"""Tokenizers: bytes, characters, a byte-level BPE learned from the data, or any Hugging Face ``tokenizer.json``. No torch.

Every tokenizer is saved as a ``tokenizer.json`` with which the ``tokenizers`` library gives the same ids, and, where needed,
``document_ids.json`` with the ids around a document. The characters of a special token (``<|endoftext|>``) in a text are
encoded as ordinary text, never as that token.
"""

from __future__ import annotations

import os

from lit_llm.tokenizers.base import DOCUMENT_IDS_FILE, END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from lit_llm.tokenizers.bpe import BPE
from lit_llm.tokenizers.bytes import Bytes
from lit_llm.tokenizers.encoder import EncoderChoice, PieceEncoder, choose_encoder
from lit_llm.tokenizers.hugging_face import TokenizerJSON, tokenizer_file
from lit_llm.tokenizers.learned import Characters, Learned

__all__ = [
    "BPE",
    "DOCUMENT_IDS_FILE",
    "END_OF_TEXT",
    "TOKENIZER_FILE",
    "Bytes",
    "Characters",
    "EncoderChoice",
    "Learned",
    "PieceEncoder",
    "Tokenizer",
    "TokenizerJSON",
    "choose_encoder",
    "load_tokenizer",
    "recognised",
]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer saved at ``path`` (a ``tokenizer.json``, or the folder that contains it).

    Raises:
        UserError: if the file is missing or is not a tokenizer.
    """
    return recognised(TokenizerJSON(str(tokenizer_file(path))))


def recognised(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer as the class that wrote its file: ``TokenizerJSON`` reads the files of all, with another identity."""
    # The other classes cannot have document ids of their own.
    if type(tokenizer) is not TokenizerJSON or not tokenizer.document_ids_follow_from_json:
        return tokenizer
    return Bytes() if tokenizer.to_json() == Bytes().to_json() else Characters.of(tokenizer.backend) or tokenizer
