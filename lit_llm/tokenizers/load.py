"""Load a saved tokenizer as the class that wrote it."""

from __future__ import annotations

import json
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
    file = tokenizer_file(path)
    tokenizer = TokenizerJSON(str(file))
    if not tokenizer.document_ids_follow_from_json:  # the other classes cannot have ids of their own
        return tokenizer
    content = json.loads(tokenizer.to_json())
    if Bytes.matches(content):
        return Bytes()
    return Characters.of(tokenizer.backend) if Characters.matches(content) else tokenizer
