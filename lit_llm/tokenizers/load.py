"""Load a saved tokenizer as the class that wrote it."""

from __future__ import annotations

import os

from lit_llm.tokenizers.base import Tokenizer
from lit_llm.tokenizers.bytes import Bytes
from lit_llm.tokenizers.characters import Characters
from lit_llm.tokenizers.hugging_face import TokenizerJSON, tokenizer_file


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
