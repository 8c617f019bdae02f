"""The ids of `PieceEncoder` are those of the `tokenizers` library for whole documents."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from ingest.tokenizer_kinds import KINDS, pages, write
from tokenizers import Tokenizer as LibraryTokenizer

from lit_llm.tokenizers import Characters, EncoderChoice, PieceEncoder, Tokenizer, TokenizerJSON, choose_encoder

DOCUMENT = ("  \n# Données\n\nA naïve café’s “menu”\tcosts 1234 €\n" + "def f(x):\n    return x  # it's\n" * 20) * 3


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerJSON]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: write(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def choice_for_gpt2(kinds: dict[str, TokenizerJSON]) -> EncoderChoice:
    return choose_encoder(kinds["gpt2"], [])


def library_ids(folder: Path, text: str) -> list[int]:
    """The ids of a whole text by the library, which reads the file itself."""
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


def cut(text: str) -> list[str]:
    """Pieces that end at a line end between two characters that are no spaces."""
    pieces = [""]
    for line, following in zip(lines := text.splitlines(keepends=True), [*lines[1:], " "], strict=True):
        pieces[-1] += line
        if len(line) > 1 and not line[-2].isspace() and not following[0].isspace():
            pieces.append("")
    return pieces if pieces[-1] else pieces[:-1]


@pytest.mark.parametrize(
    ("kind", "library", "join"),
    [
        ("gpt2", "tiktoken", "plain"),
        ("llama3", "tiktoken", "plain"),
        ("qwen", "tiktoken", "plain"),
        ("llama2", "tokenizers", "newline"),
        ("gemma", "tokenizers", "plain"),
        ("metaspace", "tokenizers", "newline"),
        ("collapsing", "tokenizers", "document"),
        ("bert", "tokenizers", "plain"),
    ],
)
def test_pieces_give_the_ids_of_the_whole_document(
    kinds: dict[str, TokenizerJSON], tmp_path: Path, kind: str, library: str, join: str
) -> None:
    tokenizer = kinds[kind]
    choice = choose_encoder(tokenizer, [pages()[:20_000]])
    assert (choice.kind, choice.join) == (library, join)
    pieces = cut(DOCUMENT) if join != "document" else [DOCUMENT]
    assert len(pieces) > 20 or join == "document"
    encoder = PieceEncoder(tokenizer, pickle.loads(pickle.dumps(choice)))
    encoder.encode(b"x")
    encoded = [encoder.encode(piece.encode(), continues=number > 0) for number, piece in enumerate(pieces)]
    tokenizer.save(tmp_path)
    assert np.concatenate(encoded).tolist() == library_ids(tmp_path, DOCUMENT)


def changed(tokenizer: TokenizerJSON, folder: Path, change: str) -> TokenizerJSON:
    content = json.loads(tokenizer.to_json())
    vocab = content["model"]["vocab"]
    if change == "added":
        content["added_tokens"].append(content["added_tokens"][0] | {"id": len(vocab), "content": "lit", "special": False})
    elif change == "gaps":
        content["model"]["vocab"] = {token: 3 * (len(vocab) - i) for token, i in vocab.items() if i}
        content["added_tokens"][0]["id"] = 0
    elif change == "unmade":
        vocab["unmade"] = len(vocab)  # a token that no merge makes, so a text never has it
    elif change == "digits":
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return TokenizerJSON(str(folder))


@pytest.mark.parametrize(
    ("change", "library"),
    [("added", "tokenizers"), ("gaps", "tiktoken"), ("unmade", "tiktoken"), ("digits", "tokenizers")],
)
def test_a_tokenizer_that_differs_from_gpt2s(
    kinds: dict[str, TokenizerJSON], tmp_path: Path, change: str, library: str
) -> None:
    tokenizer = changed(kinds["gpt2"], tmp_path / change, change)
    choice = choose_encoder(tokenizer, [DOCUMENT])
    assert choice.kind == library, choice.reason
    encoded = PieceEncoder(tokenizer, choice).encode(b"lit the unmade 1999\n")
    assert encoded.tolist() == library_ids(tmp_path / change, "lit the unmade 1999\n")


def test_one_other_id_is_enough_for_the_library(kinds: dict[str, TokenizerJSON], monkeypatch: pytest.MonkeyPatch) -> None:
    # A difference that only one token of the vocabulary shows: no text that is compared has the word.
    import lit_llm.tokenizers.encoder as encoder

    class Wrong(encoder.TiktokenEncoding):
        def encode(self, text: str) -> np.ndarray:
            ids = super().encode(text)
            return ids + 1 if text == " statement" else ids

    monkeypatch.setattr(encoder, "TiktokenEncoding", Wrong)
    choice = choose_encoder(kinds["gpt2"], ["no such word"])
    assert choice.kind == "tokenizers"
    assert "statement" in choice.reason


def test_a_run_of_spaces_longer_than_any_piece(kinds: dict[str, TokenizerJSON], choice_for_gpt2: EncoderChoice) -> None:
    # tiktoken's regular expression overflows on it.
    text = " " * 600_000 + "x"
    ids = PieceEncoder(kinds["gpt2"], choice_for_gpt2).encode(text.encode())
    assert choice_for_gpt2.kind == "tiktoken"
    assert kinds["gpt2"].decode(ids) == text


class Words(Tokenizer):
    """A user's tokenizer, which knows nothing of other libraries: the length of each line."""

    vocab_size = 1000
    eos_id = 0

    def encode(self, text: str) -> np.ndarray:
        return np.array([len(line) for line in text.splitlines()], dtype=np.int64)

    decode = token_bytes = to_json = None  # type: ignore[assignment]


def test_a_tokenizer_of_ones_own_encodes_by_itself() -> None:
    choice = choose_encoder(Words(), [DOCUMENT])
    assert (choice.kind, choice.join) == ("own", "plain")
    encoder = PieceEncoder(Words(), choice)
    assert encoder.encode(b"ab\nc\n").tolist() == [2, 1] and encoder.encode(b"def", continues=True).tolist() == [3]


def test_unknown_characters_are_counted_with_their_own_bytes() -> None:
    tokenizer = Characters(10)
    tokenizer.train(["abc"])
    encoder = PieceEncoder(tokenizer, choose_encoder(tokenizer, []))
    encoder.encode("axé".encode())
    encoder.encode("€b".encode(), continues=True)  # x, é and € are unknown: 1 + 2 + 3 bytes
    assert (encoder.unknown_tokens, encoder.token_bytes) == (3, 2)  # a, b
    encoder.encode("😀\N{REPLACEMENT CHARACTER}".encode() + b"\xff")  # 4 + 3 bytes, and an invalid one
    assert (encoder.unknown_tokens, encoder.token_bytes) == (6, 2)
