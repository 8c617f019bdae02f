"""Tokenizers: bytes, characters, a byte-level BPE learned from the data, or any Hugging Face ``tokenizer.json``. No torch.

Every tokenizer is saved as a ``tokenizer.json``, with which the ``tokenizers`` library gives the same ids, and a
``document_ids.json`` with the BOS and EOS ids around a document. If a text has the name of a special token, such as
``<|endoftext|>``, the name is encoded as ordinary text, never as the special token.
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
]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer at ``path`` (a ``tokenizer.json``, or its folder) as `Bytes`, `Characters` or else `TokenizerJSON`.

    Raises:
        UserError: if the file is missing or is not a tokenizer.
    """
    tokenizer = TokenizerJSON(str(tokenizer_file(path)))
    known = Bytes() if tokenizer.to_json() == Bytes().to_json() else Characters.of(tokenizer.backend)
    if known is None or (tokenizer.bos_id, tokenizer.eos_id) != (None, known.eos_id):  # `known` cannot have other ids
        return tokenizer
    return known
