"""A run's tokenizer.json that has changed since its checkpoint is refused by every command that uses the run."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from recipe_runs import run, table
from torch.nn.functional import cross_entropy

from lit_llm import TrainedModel
from lit_llm.tokenizers import Bytes, load_tokenizer

FILE = "runs/tiny/tokenizer.json"


@pytest.fixture
def swapped(folder, capsys):
    """A run whose tokenizer.json maps two characters to each other's ids."""
    run(capsys, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "2", "--checkpoint.every_n_steps", "1")
    content = json.loads(Path(FILE).read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path(FILE).write_text(json.dumps(content))
    return folder


@pytest.mark.slow
def test_every_command_names_the_changed_file(swapped, capsys):
    before = sorted(Path("runs").rglob("*"))
    for command in (
        ("generate", "--run", "runs/tiny", "--max_new_tokens", "2"),
        ("chat", "--run", "runs/tiny"),
        ("export", "--run", "runs/tiny", "--out", "exported"),
        ("validate", "--run", "runs/tiny"),
        ("test", "--run", "runs/tiny"),
        ("fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "3"),
        ("fit", "--config", "tiny.yaml", "--init_from", "runs/tiny", "--run_dir", "runs/other"),
    ):
        code, _, err = run(capsys, *command)
        assert code == 2, (command, err)
        assert f"{FILE} is not the file with which step-00000002.ckpt was trained" in err, (command, err)
    assert sorted(Path("runs").rglob("*")) == before and not Path("exported").exists()


def test_a_resume_may_accept_it_and_writes_the_tokenizer_of_the_data_again(swapped, capsys):
    flags = ("fit", "--config", "tiny.yaml", "--resume", "auto", "--trainer.max_steps", "3", "--accept_changes", "true")
    assert run(capsys, *flags)[0] == 0
    assert run(capsys, "generate", "--run", "runs/tiny", "--max_new_tokens", "2")[0] == 0


def test_the_ids_around_a_document_are_part_of_it(folder, capsys):
    """They are saved with the run, exported, and compared with the checkpoint's."""
    library = json.loads(Bytes().to_json())
    library["added_tokens"] += [library["added_tokens"][0] | {"id": 257, "content": "<doc>"}]
    Path("t.json").write_text(json.dumps(library))
    flags = ("--data.tokenizer", "TokenizerJSON", "--data.tokenizer.path", "t.json", "--data.tokenizer.eos_token", "<doc>")
    flags += ("--data.tokenizer.bos_token", "<|endoftext|>", "--trainer.max_steps", "2")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert code == 0, err
    saved = load_tokenizer("runs/tiny")
    assert (saved.bos_id, saved.eos_id) == (256, 257)
    assert run(capsys, "export", "--run", "runs/tiny", "--out", "exported")[0] == 0
    exported = json.loads(Path("exported/tokenizer_config.json").read_text())
    assert (exported["bos_token"], exported["eos_token"]) == ("<|endoftext|>", "<doc>")
    for file in ("config.json", "generation_config.json"):
        exported = json.loads(Path("exported", file).read_text())
        assert (exported["bos_token_id"], exported["eos_token_id"]) == (256, 257)
    Path("runs/tiny/document_ids.json").write_text('{"bos_id": null, "eos_id": 257}')
    code, _, err = run(capsys, "generate", "--run", "runs/tiny", "--max_new_tokens", "2")
    assert code == 2 and "document_ids.json" in err, err


LEARNED = ("--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "300", "--trainer.max_steps", "4")


def test_other_text_is_read_with_the_tokenizer_that_the_run_learned(folder, capsys):
    """The loss is that of the weights on the ids of the run's tokenizer.json; `paths` of the recipe gives way to the flags."""
    Path("a.txt").write_text("".join(f"Alpha {i} begets beta.\n" for i in range(200)))  # another BPE would be learned of it
    Path("b.txt").write_text("".join(f"Wholly other words, {i * 7} times\n" for i in range(100)))
    assert run(capsys, "fit", "--config", "tiny.yaml", *LEARNED)[0] == 0
    flags = "--data.train", "a.txt", "--data.val", "b.txt", "--trainer.limit_val_batches", "1.0"
    code, out, err = run(capsys, "validate", "--run", "runs/tiny", *flags)
    assert code == 0 and "data.paths text.txt" in err, err
    trained = TrainedModel("runs/tiny", device="cpu").double()
    ids = tokenizers.Tokenizer.from_file(FILE).encode(Path("b.txt").read_text(), add_special_tokens=False).ids
    ids.append(json.loads(Path("runs/tiny/document_ids.json").read_text())["eos_id"])
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):  # blocks of 16 targets
            block = torch.tensor(ids[start : start + 17])
            total += cross_entropy(trained(block[None, :-1])[0], block[1:], reduction="sum")
    assert table(out)["val/loss"] == pytest.approx(total.item() / (len(ids) - 1), abs=1e-4)


def test_chats_are_read_with_the_tokenizer_of_a_run_of_text(folder, capsys):
    assert run(capsys, "fit", "--config", "tiny.yaml", *LEARNED)[0] == 0
    Path("chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "line 1?"}, {"role": "assistant", "content": "of a text"}]
    Path("chat.jsonl").write_text(
        "".join(json.dumps({"messages": [*turns, {"role": "user", "content": str(i)}]}) + "\n" for i in range(90))
    )
    flags = "--data", "ChatFiles", "--data.paths", "chat.jsonl", "--data.chat_template", "chat.jinja"
    code, out, err = run(capsys, "validate", "--run", "runs/tiny", *flags)
    assert code == 0 and table(out)["val/loss"] > 0, err
