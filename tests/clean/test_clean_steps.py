"""The steps together: their order, what they read, and what is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lit_llm.__main__ import main
from lit_llm.clean.clean_pipeline import clean
from lit_llm.clean.clean_settings import CleanSettings
from lit_llm.clean.contamination import References
from lit_llm.clean.steps import step_problems
from lit_llm.core.errors import UserError
from lit_llm.ingest.inputs import Input
from lit_llm.ingest.shard_manifest import Manifest, SplitInfo
from lit_llm.ingest.shards import ShardWriter
from lit_llm.ingest.source import Source
from lit_llm.tokenizers import Bytes

TEXT = "The three of them walked along the river to the mill and waited for the rain to stop"


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def outcome(out: Path) -> tuple[list[str], dict[str, int]]:
    """The texts that are kept, and how many documents each rule removed."""
    kept = [json.loads(line)["text"] for part in sorted(out.glob("part-*")) for line in part.read_bytes().splitlines()]
    steps = json.loads((out / "report.json").read_text())["steps"]
    return kept, {rule: count["documents"] for one in steps.values() for rule, count in one["removed"].items()}


def run(read: Path, out: Path, **settings) -> tuple[list[str], dict[str, int]]:
    given = CleanSettings((str(read),), **settings)
    assert given.problems() + step_problems(given) == []
    out.mkdir(exist_ok=True)
    clean([Input(Source.local(read), "train", given.read_settings())], given, out)
    return outcome(out)


def test_steps_run_in_order_and_are_reported(tmp_path, capsys):
    german = "Der Ausschuss trifft sich nächste Woche wieder, um die übrigen Fragen zu besprechen."
    texts = [f"{TEXT}. Ask me@x.org.", german, TEXT.replace(" ", ", "), f"Mail to me@x.org: {TEXT[:40]}"]
    read = write(tmp_path / "a.jsonl", texts)
    against = write(tmp_path / "test.jsonl", [f"{TEXT} and then", "too short"], key="question")
    steps = {"emails": "redact", "languages": ("en",), "against": (str(against),), "against_text_key": "question"}
    kept, removed = run(read, tmp_path / "out", **steps, against_share=0.5)
    assert kept == [f"Mail to <EMAIL>: {TEXT[:40]}"]
    assert removed == {"against/ngrams": 2, "languages/de": 1}
    assert "1 of 2 documents of --against have fewer than 8 words" in capsys.readouterr().err
    sample = (tmp_path / "out/removed.jsonl").read_text()
    assert "me@x.org" not in sample and f"% of the n-grams of {against}:1" in sample
    assert run(read, tmp_path / "out", **steps, against_share=1.0)[1] == {"languages/de": 1}


@pytest.mark.parametrize(
    ("step", "text"),
    [("secrets", "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx"), ("emails", "me@x.org")],
)
def test_the_output_holds_nothing_of_a_document_that_is_removed_as_secret(tmp_path, step, text):
    read = write(tmp_path / "a.jsonl", [f"It is {text}.", TEXT])
    assert run(read, tmp_path / "out", **{step: "remove"})[0] == [TEXT]
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert not [name for name, content in written.items() if text.encode() in content or b"It is" in content]
    assert json.loads(written["removed.jsonl"])["detail"] == "at character 6"


def test_held_out_documents_of_a_prepared_folder_are_read(tmp_path):
    texts = [f"Document {i}: {'word ' * i}ends here" for i in range(20)]
    tokenizer, splits = Bytes(), {}
    for name, part in {"train": ["training text"], "val": texts[:15], "test": texts[15:]}.items():
        with ShardWriter(tmp_path, name, vocab_size=tokenizer.vocab_size, shard_tokens=300) as writer:
            for text in part:
                writer.write(np.append(tokenizer.encode(text), tokenizer.eos_id))
                writer.end_document()
        splits[name] = SplitInfo(len(part), 0, writer.tokens, 0, 0, writer.tokens_blake2b, tuple(writer.shards))
    Manifest(tokenizer.identity(), tokenizer.vocab_size, None, tokenizer.eos_id, splits).write(tmp_path)
    tokenizer.save(tmp_path)
    assert len(splits["val"].shards) == 3  # documents continue in the next shard
    references = References([str(tmp_path)], text_key="text")
    assert [document.text for document in references] == texts
    assert [document.source for document in references][-6:-4] == [f"{tmp_path}/val:15", f"{tmp_path}/test:1"]
    (tmp_path / "val_000001.docs").unlink()
    with pytest.raises(UserError, match=r"val_000001.docs is missing: prepare .* again, or give text files \(--against\)."):
        list(references)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--secrets", "hide"], "secrets is 'hide', but must be redact or remove (--secrets)."),
        (["--languages", "en", "eng"], "Language 'eng' is not known: give an ISO 639 code, such as en"),
        (["--against", "{folder}/gone.jsonl"], "gone.jsonl"),
        (["--against", "{folder}/a.jsonl"], "has 8 words: nothing can be found (--against)."),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(tmp_path, capsys, words, sentence):
    read = write(tmp_path / "a.jsonl", ["hello"])
    words = [word.format(folder=tmp_path) for word in words]
    assert main(["clean", "--data.paths", str(read), "--out", str(tmp_path / "out"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".log")] == ["a.jsonl"]
