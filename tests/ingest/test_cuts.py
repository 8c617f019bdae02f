"""Long documents without a line that begins with a word are cut where the usual tokenizers join nothing."""

import numpy as np
import pytest
from ingest.tokenizer_kinds import write

from lit_llm.ingest.readers.text import cut_pieces
from lit_llm.tokenizers.encoder import PieceEncoder, choose_encoder

INDENTED = "        an indented line (of 3 words)\n    \n" * 16_000
WINDOWS = "a line of words\r\n\r\nand 2 more\r\n" * 20_000


@pytest.mark.parametrize(("kind", "text"), [("gpt2", INDENTED), ("llama3", WINDOWS)], ids=["indented", "windows"])
def test_the_pieces_give_the_ids_of_the_whole(tmp_path, kind, text):
    tokenizer = write(kind, tmp_path)
    pieces = list(cut_pieces([text.encode()]))
    assert len(pieces) >= 3 and b"".join(piece.text for piece in pieces) == text.encode()
    encoder = PieceEncoder(tokenizer, choose_encoder(tokenizer, [text[:1000]]))
    ids = encoder.encode([piece.text for piece in pieces], [index > 0 for index in range(len(pieces))])
    np.testing.assert_array_equal(np.concatenate(ids), tokenizer.backend.encode(text, add_special_tokens=False).ids)
