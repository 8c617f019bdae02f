"""Tokenizers: bytes, characters, a byte-level BPE learned from the data, or any Hugging Face ``tokenizer.json``. No torch.

Every tokenizer is saved as a ``tokenizer.json`` with which the ``tokenizers`` library gives the same ids, and, where needed,
``document_ids.json`` with the ids around a document. The characters of a special token (``<|endoftext|>``) in a text are
encoded as ordinary text, never as that token.
"""

from lit_llm.tokenizers.base import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from lit_llm.tokenizers.bpe import BPE
from lit_llm.tokenizers.bytes import Bytes
from lit_llm.tokenizers.characters import Characters
from lit_llm.tokenizers.document_ids import DOCUMENT_IDS_FILE
from lit_llm.tokenizers.encoder import EncoderChoice, PieceEncoder, choose_encoder
from lit_llm.tokenizers.hugging_face import TokenizerJSON
from lit_llm.tokenizers.learned import Learned
from lit_llm.tokenizers.load import load_tokenizer, recognised

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
