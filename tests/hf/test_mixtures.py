"""Folders of models with experts: what they may hold, and which family a model of ours is exported as."""

import json

import pytest
import torch
from family_models import model_of
from folders import differ, export, ids, load, logits, ours, save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.import_hf import import_folder
from lit_llm.hf.config_map import write_config
from lit_llm.models.gpt import GPTConfig

MOE = {"experts": 5, "top_k": 3, "expert_width": 24}
PLAIN = {"mlp": "swiglu", "qk_norm": False}


def refusal(folder, run) -> str:
    with pytest.raises(ValueError) as caught:
        import_folder(folder, run)
    assert not run.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({**PLAIN, "moe": MOE}, "MixtralForCausalLM"),  # its MLP has the width of an expert
        ({**PLAIN, "moe": {**MOE, "groups": 5}}, "MixtralForCausalLM"),  # of all groups: no effect
        ({"mlp": "swiglu", "moe": {**MOE, "normalise": False}, "layers": {"experts": [False, True]}}, "Qwen3MoeForCausalLM"),
        ({**PLAIN, "qk_norm": True, "qk_norm_width": "projection", "moe": {**MOE, "normalise": False}}, "OlmoeForCausalLM"),
        ({**PLAIN, "moe": {**MOE, "router": "sigmoid"}, "layers": {"experts": [False, True]}}, "Glm4MoeForCausalLM"),
    ],
)
def test_a_model_of_ours_is_exported_as_the_family_that_computes_the_same(settings, family, tmp_path):
    model = ours(**settings)
    save(model, tmp_path / "model.ckpt")
    name, _ = export(tmp_path / "model.ckpt", tmp_path / "out")
    assert name == family
    assert differ(logits(load(tmp_path / "out"), ids(2, 30)), logits(model, ids(2, 30))) < 1e-4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**PLAIN, "moe": {**MOE, "router_bias": True}}, "model.moe.router_bias"),
        ({**PLAIN, "moe": {**MOE, "scale": 2.5}}, "model.moe.scale 2.5"),
        ({**PLAIN, "moe": {**MOE, "router": "sigmoid"}, "layers": {"experts": [True, False]}}, '--model.layers {"experts"'),
        ({**PLAIN, "moe": {**MOE, "experts": 6, "router": "sigmoid", "groups": 6, "top_groups": 4}}, "model.moe.groups 6"),
    ],
)
def test_what_no_family_computes_is_refused_by_the_nearest_with_experts(settings, said):
    with pytest.raises(ValueError, match=r"has no equivalent in (Mixtral|Qwen3Moe|Olmoe|Glm4Moe)") as caught:
        write_config(GPTConfig(n_layer=4, n_head=4, n_embd=32, vocab_size=101, **settings))
    assert said in str(caught.value) and "--model.moe null" not in str(caught.value)


def test_a_bias_that_decides_the_choice_is_not_lost(tmp_path):
    model = ours(**PLAIN, moe=MOE)
    model.routers[1].choice_bias[2] = 0.001
    save(model, tmp_path / "model.ckpt")
    with pytest.raises(
        ValueError, match=r"blocks\.1\.mlp\.router\.choice_bias.*MixtralForCausalLM has none.*--model\.moe\.balance"
    ):
        export(tmp_path / "model.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "dtype"), [("glm4_moe", None), ("glm4_moe", torch.bfloat16), ("deepseek_v3", None)])
def test_the_bias_for_the_choice_stays_in_fp32_and_layers_that_predict_further_are_left_out(family, dtype, tmp_path):
    model_of(family).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    count = json.loads((tmp_path / "hf/config.json").read_text())["num_hidden_layers"]
    save_file(tensors | {f"model.layers.{count}.eh_proj.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    notes = import_folder(tmp_path / "hf", tmp_path / "run")
    assert "the layers that predict further tokens are not imported" in notes
    name = f"model.layers.{count - 1}.mlp.gate.e_score_correction_bias"
    bias = load_model(tmp_path / "run/checkpoints/last.ckpt").blocks[-1].mlp.router.choice_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, tensors[name].float())
    export(tmp_path / "run/checkpoints/last.ckpt", tmp_path / "out", run=tmp_path / "run", dtype=dtype, max_bytes=2e4)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    written = {k: v for each in set(index["weight_map"].values()) for k, v in load_file(tmp_path / "out" / each).items()}
    assert written[name].dtype == torch.float32 and torch.equal(written[name], bias)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_tensor_with_all_experts_counts_once(tmp_path):
    settings = model_of("gpt_oss").config
    settings.num_local_experts, settings.num_hidden_layers, settings.layer_types = 64, 2, settings.layer_types[:2]
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert load_model(tmp_path / "run/checkpoints/last.ckpt").config.moe.experts == 64
