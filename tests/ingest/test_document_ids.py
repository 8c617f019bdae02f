"""Which tokens start and end a document: named, found or asked for; and kept when a tokenizer is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from lit_llm.core.errors import UserError
from lit_llm.tokenizers import Bytes, Tokenizer, TokenizerJSON, load_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|doc|>")  # ids 2, 3 and 4


def write(folder: Path, special: tuple[str, ...] = SPECIAL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend = LibraryTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def ids(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    return tokenizer.bos_id, tokenizer.eos_id


def test_an_unknown_end_of_document_is_asked_for(tmp_path: Path) -> None:
    tokenizer = TokenizerJSON(str(write(tmp_path)))
    assert ids(tokenizer) == (None, None)
    problem = tokenizer.eos_problem()
    assert problem is not None
    assert "<|im_start|>, <|im_end|>, <|doc|> (--data.tokenizer.init_args.eos_token)" in problem
    assert str(tmp_path / "tokenizer.json") in problem


@pytest.mark.parametrize("argument", ["eos_token", "bos_token"])
def test_a_token_that_the_vocabulary_lacks(tmp_path: Path, argument: str) -> None:
    write(tmp_path)
    with pytest.raises(
        UserError, match=rf"{argument} is '<eos>'.*<\|im_start\|>, <\|im_end\|>, <\|doc\|>.*init_args.{argument}"
    ):
        TokenizerJSON(str(tmp_path), **{argument: "<eos>"})


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_the_end_that_a_file_beside_it_names(tmp_path: Path, file: str, value: object) -> None:
    write(tmp_path)
    (tmp_path / file).write_text(json.dumps({"eos_token": value, "bos_token": "<|im_start|>"}))
    assert ids(TokenizerJSON(str(tmp_path))) == (None, 3)  # a BOS token is never assumed


def test_a_separator_of_documents_comes_before_the_end_of_a_turn(tmp_path: Path) -> None:
    write(tmp_path, ("<|im_end|>", "<|endoftext|>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert ids(TokenizerJSON(str(tmp_path))) == (None, 3)
    assert ids(TokenizerJSON(str(tmp_path), eos_token="<|im_end|>")) == (None, 2)


@pytest.mark.parametrize("names", [{"eos_token": "<|doc|>"}, {"bos_token": "<|im_start|>"}, {}])
def test_the_choice_is_saved_and_loaded(tmp_path: Path, names: dict[str, str]) -> None:
    write(tmp_path / "given")
    (tmp_path / "given/tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = TokenizerJSON(str(tmp_path / "given"), **names)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/document_ids.json").read_text())
    assert saved == {"bos_id": 2 if "bos_token" in names else None, "eos_id": 4 if "eos_token" in names else 3}
    loaded = load_tokenizer(tmp_path / "saved")
    assert ids(loaded) == ids(TokenizerJSON(str(tmp_path / "saved/tokenizer.json"))) == ids(tokenizer)
    assert loaded.identity() == tokenizer.identity()
    assert TokenizerJSON(str(tmp_path / "saved"), eos_token="<|im_start|>").eos_id == 2  # a name wins over what was saved


@pytest.mark.parametrize(
    "content", ["", "3", "{}", '{"bos_id": 0, "eos_id": 99}', '{"bos_id": "a", "eos_id": 0}', "[" * 100_000]
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    write(tmp_path)
    (tmp_path / "document_ids.json").write_text(content)
    with pytest.raises(UserError, match=r"document_ids\.json .*damaged"):
        load_tokenizer(tmp_path)


class Shifted(Bytes):
    """A tokenizer of the user: bytes, with another end of document and a BOS id."""

    bos_id = 1
    eos_id = 0  # type: ignore[assignment]


class Endless(Bytes):
    eos_id = None  # type: ignore[assignment]


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    Shifted().save(tmp_path)
    assert ids(load_tokenizer(tmp_path)) == (1, 0)
    problem = Endless().eos_problem()
    assert problem is not None
    assert "Endless" in problem
    assert "eos_id" in problem
