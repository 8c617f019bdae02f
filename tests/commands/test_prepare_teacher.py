"""`prepare --teacher`: the files hold what the teacher says, and others are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import text_runs
import torch

from lit_llm.__main__ import main
from lit_llm.commands import text_model
from lit_llm.core.errors import UserError
from lit_llm.data import Mixture, MixturePhase, MixtureSource, TextFiles, TokenShards
from lit_llm.models.config import GPTConfig
from lit_llm.models.loss import LossConfig
from lit_llm.training import teacher
from lit_llm.training.distillation import Distillation
from lit_llm.training.teacher import _top

T, K, TEMPERATURE = 16, 5, 2.0
TEACHER = ("--teacher", "teacher", "--top_k", str(K), "--temperature", str(TEMPERATURE))
TEXT = ("--data", "TextFiles", "--data.paths", "text.txt", "--data.block_size", str(T))
SHARDS = ("--data", "TokenShards", "--data.path", "shards", "--data.block_size", str(T))
TWO = ("--data.train", "['shards/train_*.bin', 'copy/train_*.bin']", "--data.val", "shards/val_*.bin")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A random teacher of bytes, and shards of 100 tokens with what it says."""
    folder = tmp_path_factory.mktemp("teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model = text_runs.base_run(folder / "teacher")
        lines = (f"{i} plus {i} is {2 * i}" + "." * (i % 7) for i in range(30))
        Path("text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        words = ["text.jsonl" if word == "text.txt" else word for word in TEXT]
        assert main(["prepare", *TEACHER, *words, "--out", "shards", "--shard_tokens", "100"]) == 0
    return folder, model


@pytest.fixture(autouse=True)
def here(project, monkeypatch):
    monkeypatch.chdir(project[0])


def said_by(model, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T, K) log-probabilities and ids, from whole logits of (B, T) inputs."""
    with torch.no_grad():
        top = torch.log_softmax(model(rows).double() / TEMPERATURE, dim=-1).topk(K)
    return top.values, top.indices


def test_each_block_has_what_the_teacher_says_of_it(project):
    _, model = project
    tokens = np.concatenate([np.fromfile(file, "<u2")[512:] for file in sorted(Path("shards").glob("train_*.bin"))])
    record = np.dtype([("ids", "<u2", K), ("logp", "<f2", K)])
    files = sorted(Path("shards").glob("train_*.teacher"))
    found = np.concatenate([np.fromfile(file, record) for file in files])
    blocks = (len(tokens) - 1) // T
    assert len(files) > 2 and len(found) == len(tokens) and not found[blocks * T :]["logp"].any()
    logp, ids = said_by(model, torch.from_numpy(tokens[: blocks * T].astype(np.int64)).view(blocks, T))
    assert (found["ids"][: blocks * T] == ids.flatten(0, 1).numpy()).mean() > 0.999  # equals may be in either order
    np.testing.assert_allclose(found["logp"][: blocks * T], logp.flatten(0, 1).numpy(), rtol=2e-3)


def test_packed_blocks_of_existing_shards_give_it_to_training_and_not_to_validation(project, capsys):
    _, model = project
    packed = (*SHARDS, "--data.packing", "best_fit")
    assert main(["prepare", *TEACHER, *packed]) == 2 and "--replace true" in capsys.readouterr().err
    before = {file: file.read_bytes() for file in Path("shards").glob("train_*teacher*")}
    try:
        assert main(["prepare", *TEACHER, *packed, "--replace", "true"]) == 0
        data = TokenShards(path="shards", block_size=T, packing="best_fit")
        data.setup("fit")
        info = data.find_teachers()
        assert (info.top_k, info.temperature, info.packing) == (K, TEMPERATURE, "best_fit")
        batch = data.blocks("train")[np.arange(len(data.blocks("train")))]
        logp, ids = said_by(model, batch["input_ids"])
        learned = batch["targets"] != -100
        given = batch["teacher_logp"].view(torch.float16)
        assert not given[~learned].any() and (given[learned] < 0).all()
        torch.testing.assert_close(given[learned].double(), logp[learned], rtol=2e-3, atol=0)
        assert (batch["teacher_ids"][learned] == ids[learned]).double().mean() > 0.999
        assert "teacher_ids" not in next(iter(data.val_dataloader()))
    finally:
        for file, content in before.items():
            file.write_bytes(content)


def test_rows_of_a_mixture_have_what_the_teacher_says_of_their_source(project):
    shutil.copytree("shards", "others", dirs_exist_ok=True)
    sources = {name: MixtureSource(path=path) for name, path in (("a", "shards"), ("b", "others"))}
    data = Mixture(sources=sources, phases=[MixturePhase({"a": 60, "b": 40})], block_size=T)
    data.find_run(max_steps=2, max_epochs=None, saved=None)
    data.setup()
    data.find_teachers()
    batch = data.blocks("train")[np.array([(0, 0), (1, 3), (0, 2)])]
    logp, _ = said_by(project[1], batch["input_ids"])
    torch.testing.assert_close(batch["teacher_logp"].view(torch.float16).double(), logp, rtol=2e-3, atol=0)
    info = Path("others/train_teacher.json")
    info.write_text(info.read_text().replace("2.0", "3.0"))
    with pytest.raises(UserError, match="different teachers"):
        data.find_teachers()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*TEACHER[:2], "--top_k", "999", *TEXT, "--out", "out"), "--top_k 257"),
        ((*TEACHER, *TEXT, "--data.tokenizer", "Characters", "--out", "out"), "--data.tokenizer.path"),
        ((*TEACHER, *SHARDS, "--out", "out"), "--out"),
        (("--teacher", "nobody", *SHARDS), "--teacher"),
        (("--top_k", "3", *SHARDS), "--teacher RUN"),
        ((*TEACHER, "--device", "cuda:99", *SHARDS, "--replace", "true"), "--device"),
        ((*TEACHER, *SHARDS[:2], *TWO, "--data.block_size", str(T), "--replace", "true"), "several folders"),
        ((*TEACHER, *SHARDS[:-1], "128", "--model.block_size", "128", "--replace", "true"), "--data.block_size "),
    ],
)
def test_what_cannot_teach_is_a_sentence_before_anything_is_written(words, said, capsys):
    Path("text.txt").write_text("a text\n" * 40)
    shutil.copytree("shards", "copy", dirs_exist_ok=True)
    before = sorted(Path().rglob("*"))
    assert main(["prepare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("cuda", "mps", "chosen"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
@pytest.mark.parametrize(
    "words",
    [
        ("prepare", *TEACHER, *SHARDS, "--replace", "true"),
        ("prepare", *TEACHER, *TEXT[:3], "text.jsonl", *TEXT[4:], "--out", "new"),
        ("generate", "--run", "teacher"),
        ("chat", "--run", "teacher"),
    ],
)
def test_a_gpu_computes_if_there_is_one(words, cuda, mps, chosen, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    for module in (teacher, text_model):
        monkeypatch.setattr(module, "device_problem", lambda name: f"it is {name} (--device)")
    assert main([*words]) == 2 and f"error: it is {chosen} (--device)" in capsys.readouterr().err.splitlines()
    assert main([*words, "--device", "meta"]) == 2 and "error: it is meta (--device)" in capsys.readouterr().err


def test_another_teacher_than_that_of_the_data_is_refused():
    def find(**settings) -> None:
        data = TokenShards(path="shards", **{"block_size": T} | settings)
        data.setup("fit")
        data.find_teachers()

    find()
    info, file = Path("shards/train_teacher.json"), Path("shards/train_000001.teacher")
    for said, settings in (
        ("--data.block_size 16", {"block_size": 8}),
        ("--data.packing concatenate", {"packing": "best_fit"}),
    ):
        with pytest.raises(UserError, match=said):
            find(**settings)
    content, whole = info.read_text(), file.read_bytes()
    damages = {
        "has no teacher|have no teacher": lambda: info.unlink(),
        "is damaged": lambda: info.write_text(content[:-9]),
        "tokens": lambda: info.write_text(content.replace('"tokens": "', '"tokens": "0')),
        "vocab_size": lambda: info.write_text(content.replace("257", "258")),
        "bytes": lambda: file.write_bytes(whole[:-1]),
    }
    for said, damage in damages.items():
        damage()
        with pytest.raises(UserError, match=said):
            find()
        info.write_text(content)
        file.write_bytes(whole)
    file.write_bytes(b"\xff" * len(whole))
    data = TokenShards(path="shards", block_size=T)
    data.setup("fit")
    data.find_teachers()
    with pytest.raises(UserError, match=r"000001.teacher is damaged"):
        data.blocks("train")[np.arange(len(data.blocks("train")))]
    file.write_bytes(whole)


def test_a_run_does_not_continue_with_another_teacher(capsys):
    small = ("--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", str(T))
    run = ["fit", *small, *SHARDS, "--data.micro_batch_size", "2", "--data.global_batch_size", "2", "--run_dir", "run"]
    run += ["--objective", "Distillation", "--resume", "auto", "--schedule.warmup_steps", "1", "--trainer.max_steps"]
    assert main([*run, "2"]) == 0
    info = Path("shards/train_teacher.json")
    content = info.read_text()
    info.write_text(content.replace("2.0", "3.0"))
    capsys.readouterr()
    assert main([*run, "3"]) == 2 and "teacher" in capsys.readouterr().err
    info.write_text(content)
    assert main([*run, "3"]) == 0


def test_rows_of_padding_are_no_ids():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    ids, logp = _top(
        hidden, weight, torch.zeros(2, 3), ids=11, top_k=11, temperature=2.0, softcap=None, shards=None, vocab_size=16
    )
    expected = torch.log_softmax(hidden @ weight[:11].T / 2, dim=-1)
    assert ids.max() == 10
    torch.testing.assert_close(logp, expected.gather(-1, ids), rtol=1e-12, atol=0)


def test_what_has_no_teacher_is_refused_before_a_run():
    parts = {"model": GPTConfig(), "loss": LossConfig(), "data": TokenShards(path="shards")}
    assert Distillation().problems(parts) == [] and Distillation.needs_gpt
    refused = {
        "--model.predict_ahead 0": {"model": GPTConfig(predict_ahead=1)},
        "--loss.z_loss 0": {"loss": LossConfig(z_loss=0.1)},
        "--data TokenShards": {"data": TextFiles(paths="text.txt")},
    }
    for flag, part in refused.items():
        assert [flag in problem for problem in Distillation().problems(parts | part)] == [True]
    assert ["objective.weight" in problem for problem in Distillation(1.5).problems(parts)] == [True]
