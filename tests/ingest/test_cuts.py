"""Long documents without a line that begins with a word are cut where the usual tokenizers join nothing."""

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lit_llm.ingest.readers.plain_text import cut_pieces
from lit_llm.tokenizers import TokenizerJSON
from lit_llm.tokenizers.encoder import PieceEncoder, choose_encoder


def test_the_pieces_give_the_ids_of_the_whole(tmp_path):
    text = "        an indented line (of 3 words)\n    \n" * 16_000
    backend = Tokenizer(models.BPE())  # like GPT-2's, with tokens for the line ends and indentation of this text
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text[:10_000]], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerJSON(str(tmp_path))
    pieces = list(cut_pieces([text.encode()]))
    assert len(pieces) >= 3 and b"".join(piece.text for piece in pieces) == text.encode()
    encoder = PieceEncoder(tokenizer, choose_encoder(tokenizer, [text[:1000]]))
    ids = [encoder.encode(piece.text, continues=index > 0) for index, piece in enumerate(pieces)]
    np.testing.assert_array_equal(np.concatenate(ids), backend.encode(text).ids)
