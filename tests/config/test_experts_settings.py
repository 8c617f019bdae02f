"""A mixture of experts by the command line: a run and its resume, and what is refused before anything is written."""

from pathlib import Path

import pytest
import yaml
from recipe_runs import RECIPE, TEXT, curve, run

from lit_llm.checkpoint.compatibility import model_changes, saved_model_config
from lit_llm.core.errors import UserError
from lit_llm.distributed.layout import layout_of, layout_problems
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig

EXPERTS = ["--model.moe.experts", "4", "--model.moe.expert_width", "8", "--expert_balance", "ExpertBalance"]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("recipe.yaml").write_text(RECIPE)
    return ["--config", "recipe.yaml", "--run_dir", "run"]


def test_a_run_is_logged_resumed_generated_from_and_not_exported(recipe, capsys):
    code, _, err = run(capsys, "fit", *recipe, *EXPERTS, "--trainer.max_steps", "3")
    assert code == 0, err
    assert 1 <= curve(Path("run"), "experts/load")[3] <= 2 and curve(Path("run"), "experts/bias")[1] == pytest.approx(0.001)
    assert yaml.safe_load(Path("run/config.yaml").read_text())["model"]["moe"]["experts"] == 4
    code, out, err = run(capsys, "fit", "--run", "run", "--resume", "auto", "--trainer.max_steps", "4")
    assert code == 0 and "after step 4" in out, err
    code, _, err = run(
        capsys, "fit", "--run", "run", "--resume", "auto", "--trainer.max_steps", "5", "--model.moe.experts", "8"
    )
    assert code == 2 and "model.moe.experts was 4" in err and "--model.moe.experts 4" in err
    code, out, err = run(capsys, "generate", "--run", "run", "--prompt", "line", "--max_new_tokens", "3")
    assert code == 0 and out.startswith("line"), err
    code, _, err = run(capsys, "export", "--run", "run", "--out", "exported")
    assert code == 2 and "--model.mlp swiglu" in err and not Path("exported").exists()  # no family has experts of relu2
    assert "Traceback" not in err


REFUSED = {
    "top_k": (["--model.moe.top_k", "9"], ["model.moe.top_k is 9", "at most 8"]),
    "unknown": (["--model.moe.expert", "9"], ["expert"]),
    "kind": (["--model.moe.router", "tanh"], ["router"]),
    "no experts": (["--expert_balance", "ExpertBalance"], ["expert_balance", "--model.moe.experts"]),
    "lora": (["--model.moe.experts", "4", "--model.moe.balance", "0.1", "--lora.rank", "4"], ["lora", "--model.moe.balance 0"]),
    "lora, biases": (
        ["--model.moe.experts", "4", "--expert_balance", "ExpertBalance", "--lora.rank", "4"],
        ["lora", "--expert_balance null"],
    ),
    "architecture": (
        [
            "--model.moe.experts",
            "4",
            "--architecture",
            "torch.nn.Linear",
            "--architecture.in_features",
            "2",
            "--architecture.out_features",
            "2",
        ],
        ["model.moe", "--model.moe null"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused_before_anything_is_written(recipe, capsys, name):
    flags, words = REFUSED[name]
    before = sorted(Path().rglob("*"))
    code, _, err = run(capsys, "fit", *recipe, *flags)
    assert code == 2 and "Traceback" not in err, err
    assert all(word in err for word in words), err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("moe", "sizes", "words"),
    [
        (None, {"expert": 2}, ["expert=2", "model has none", "--trainer.strategy.expert 1"]),
        ({"experts": 4}, {"expert": 3}, ["expert=3 does not divide the 4 ranks", "--trainer.strategy.expert 2"]),
        ({"experts": 6}, {"expert": 4}, ["model.moe.experts=6", "--trainer.strategy.expert 2"]),
        ({"experts": 5}, {"expert": 2}, ["model.moe.experts=5", "--trainer.strategy.expert 1"]),
        ({"experts": 4, "shared_experts": 1, "shared_width": 7}, {"tensor_parallel": 2}, ["the shared experts = 7"]),
    ],
    ids=str,
)
def test_experts_that_ranks_cannot_share_are_refused_with_the_nearest_size(moe, sizes, words):
    model = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, moe=moe)
    strategy = MeshStrategy(**sizes)
    problems = layout_problems(strategy, layout_of(strategy, 4, 8), model)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_a_checkpoint_tells_what_may_change():
    model = GPTConfig(moe={"experts": 4, "balance": 0.1})
    saved = {"model_config": {**vars(GPTConfig()), "moe": vars(model.moe)}}
    assert saved_model_config(saved, Path("x"), "--resume").moe == model.moe
    assert model_changes(saved["model_config"], model, accepted=False) == []
    [dense] = model_changes(saved["model_config"], GPTConfig(), accepted=True)
    assert "model.moe.experts was 4" in dense and "do not fit" in dense
    [added] = model_changes(vars(GPTConfig()), model, accepted=True)
    assert "model.moe.experts was None" in added
    other = GPTConfig(moe={"experts": 4, "balance": 0.2})
    [weight] = model_changes(saved["model_config"], other, accepted=False)
    assert "model.moe.balance was 0.1" in weight and "--accept_changes true" in weight
    assert model_changes(saved["model_config"], other, accepted=True) == []
    saved["model_config"]["moe"]["experts"] = "many"
    with pytest.raises(UserError, match=r"model_config\.moe\.experts 'many'"):
        saved_model_config(saved, Path("x"), "--resume")
