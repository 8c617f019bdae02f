"""Data: token shards on disk, the order of samples, and the data modules built on them."""

from lit_llm.data.corpus import Corpus
from lit_llm.data.datamodule import TokenDataModule
from lit_llm.data.mixture import Mixture
from lit_llm.data.mixture_settings import MixturePhase, MixtureSource
from lit_llm.data.text import PythonStdlib, TextDataModule
from lit_llm.data.text_files import ChatFiles, TextFiles
from lit_llm.data.token_shards import TokenShards
from lit_llm.data.token_stream import TokenStream
from lit_llm.ingest.shards import ShardWriter
from lit_llm.tokenizers import BPE, Bytes, Characters, Tokenizer, TokenizerJSON, load_tokenizer

__all__ = [
    "BPE",
    "Bytes",
    "Characters",
    "ChatFiles",
    "Corpus",
    "Mixture",
    "MixturePhase",
    "MixtureSource",
    "PythonStdlib",
    "ShardWriter",
    "TextDataModule",
    "TextFiles",
    "TokenDataModule",
    "TokenShards",
    "TokenStream",
    "Tokenizer",
    "TokenizerJSON",
    "load_tokenizer",
]
