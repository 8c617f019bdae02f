"""Published config.json files are read as they are, and written as models of the same shape."""

import dataclasses
import math

import pytest
import torch
from family_models import in_the_model
from folders import NO_IDS
from published import PUBLISHED
from transformers import AutoConfig, AutoModelForCausalLM

from lit_llm.config.recipe_files import SHIPPED, with_base
from lit_llm.hf.config_map import links, read_config, write_config
from lit_llm.hf.read import text_config
from lit_llm.models.gpt import GPT, GPTConfig

EXPECTED = {
    "Llama-3.2-1B": {"n_kv_head": 8, "head_dim": None, "rope_theta": 5e5, "mlp": "swiglu", "tie_embeddings": True},
    "Qwen2.5-0.5B": {"window": None, "layers": None, "qkv_bias": True, "bias": False},
    "Qwen3-0.6B": {"window": None, "qk_norm": True, "head_dim": 128},
    "Mistral-7B-v0.1": {"window": 4096},
    "Olmo-3-7B": {"norm_position": "post", "qk_norm_width": "projection"},
    "gemma-2-2b": {
        **{"layers": {"window": [4096, None]}, "attention_softcap": 50.0, "logit_softcap": 30.0, "embedding_scale": 48.0},
        **{"attention_scale": None, "mlp": "geglu", "gelu_approximate": "tanh", "norm_position": "sandwich"},
    },
    "gemma-3-1b": {
        "layers": {"window": [*[512] * 5, None], "rope_theta": [*[1e4] * 5, 1e6]},
        **{"eos_id": 1, "tie_embeddings": True, "qk_norm": True, "rope_scaling": None, "norm_unit_offset": True},
    },
    "SmolLM3-3B": {"layers": {"rope": [True, True, True, False]}, "rope_theta": 5e6},
    "Phi-3-mini-4k": {"window": 2047, "partial_rotary_factor": 1.0, "rope_scaling": None},
    "Phi-4-mini": {"window": None, "partial_rotary_factor": 0.75, "tie_embeddings": True},
    "pythia-160m": {"parallel_residual": True, "partial_rotary_factor": 0.25, "gelu_approximate": "none", "norm": "layernorm"},
    "starcoder2-3b": {"dropout": 0.1, "window": 4096, "bias": True, "mlp": "gelu"},
    "DeepSeek-V3": {"attention_scale": 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, "qk_norm": False},
    "Moonlight-16B-A3B": {"attention_scale": None, "norm_eps": 1e-5},
    "granite-3.1-2b": {"logit_scale": 0.125, "embedding_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.015625},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_and_written_as_the_same_model(name):
    config, _ = read_config(PUBLISHED[name])
    for setting, value in EXPECTED.get(name, {}).items():
        assert getattr(config, setting) == value, setting
    written, _ = write_config(config, PUBLISHED[name]["model_type"])
    assert written["architectures"] == PUBLISHED[name]["architectures"]
    assert read_config(written | {"eos_token_id": config.eos_id})[0] == dataclasses.replace(config, dropout=_kept(name, config))


def _kept(name: str, config) -> float:
    return config.dropout if name in ("gpt2", "starcoder2-3b") else 0.0


def test_the_scalings_of_published_models_are_read():
    assert read_config(PUBLISHED["Llama-3.2-1B"])[0].rope_scaling == {
        **{"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
    }
    yarn = read_config(PUBLISHED["Olmo-3-7B"])[0].layers["rope_scaling"]
    assert yarn[:3] == [None] * 3 and yarn[3]["rope_type"] == "yarn" and yarn[3]["attention_factor"] == 1.2079441541679836
    longrope = read_config(PUBLISHED["Phi-4-mini"])[0].rope_scaling
    assert longrope["rope_type"] == "longrope" and longrope["factor"] == 32.0 and len(longrope["long_factor"]) == 48


def test_the_text_model_of_a_published_config_with_images_is_read():
    """Its sizes that equal the defaults are missing."""
    text = {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }
    whole = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "text_config": text,
        "vision_config": {},
    }
    config, _ = read_config(text_config(whole))
    assert (config.n_head, config.n_kv_head, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.layers == {
        "window": [*[1024] * 5, None],
        "rope_theta": [*[1e4] * 5, 1e6],
        "rope_scaling": [*[None] * 5, {"rope_type": "linear", "factor": 8.0}],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_has_the_tensors_that_transformers_builds(name):
    """Names and shapes, on the meta device: of the published file, and of the one that is written."""
    config, _ = read_config(PUBLISHED[name])
    config = dataclasses.replace(config, pad_vocab_to=1)
    with torch.device("meta"):
        ours = {key: tensor.shape for key, tensor in GPT(config).state_dict().items()}
    for content in (PUBLISHED[name], write_config(config, PUBLISHED[name]["model_type"])[0]):
        with torch.device("meta"):
            settings = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}
            theirs = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(content["model_type"], **settings | NO_IDS | {"pad_token_id": None})
            )
        tensors = {key: t for key, t in theirs.state_dict(keep_vars=True).items() if "inv_freq" not in key}
        found = set()
        for link in links(content):
            key, expected = in_the_model(link, tensors)
            shapes = [ours[n] if link.expert is None else ours[n][1:] for n in link.ours]
            assert tuple(link.shape(shapes)) == expected.shape, link.theirs
            found.add(key)
        assert found == tensors.keys() - ({"lm_head.weight"} if config.tie_embeddings else set())


RECIPES = {
    "gpt2-124m": "gpt2",
    "pythia-160m": "pythia-160m",
    "smollm2-135m": "SmolLM2-135M",
    "qwen3-0.6b": "Qwen3-0.6B",
    "gemma3-1b": "gemma-3-1b",
    "llama3.2-1b": "Llama-3.2-1B",
    "olmo2-1b": "OLMo-2-0425-1B",
    "mistral-7b": "Mistral-7B-v0.1",
    "mixtral-8x7b": "Mixtral-8x7B-v0.1",
    "olmoe-1b-7b": "OLMoE-1B-7B-0924",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "deepseek-v3": "DeepSeek-V3",
    "moonlight-16b-a3b": "Moonlight-16B-A3B",
}
TRAINING = {
    "block_size",
    "vocab_size",
    "pad_vocab_to",
    "eos_id",
    "dropout",
    "mask_documents",
    "init_std",
    "zero_init_projections",
    "base_width",
    "base_depth",
}
"""Settings of training and of the vocabulary, which a recipe states for itself."""


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_a_recipe_is_the_published_one(name):
    model = {}
    for _, settings in with_base(SHIPPED / f"{name}.yaml"):
        model |= settings["model"]
    if name.startswith("qwen3"):  # its first stage of training; the released weights went through the third
        assert model["rope_theta"] == 1e4
        model["rope_theta"] = 1e6
    recipe, published = GPTConfig(**model), read_config(PUBLISHED[RECIPES[name]])[0]
    if name == "gpt-oss-20b":  # its context is the one before YaRN
        assert published.rope_scaling.pop("original_max_position_embeddings") == recipe.block_size
        published.rope_scaling = None
    if name == "deepseek-v3":  # as well
        assert published.rope_scaling["attention_factor"] == 1.0
        published.rope_scaling = published.attention_scale = None
    (recipe.rope_scaling or {}).pop("rope_type", None)  # llama3 is the default
    assert recipe.hidden_width == published.hidden_width
    ours, theirs = (
        {key: value for key, value in dataclasses.asdict(config).items() if key not in TRAINING | {"mlp_width"}}
        for config in (recipe, published)
    )
    for each in (ours, theirs):
        each["moe"] = {key: value for key, value in (each["moe"] or {}).items() if "balance" not in key and key != "z_loss"}
        if each["moe"]:
            each["moe"]["top_groups"] = each["moe"]["top_groups"] or each["moe"]["groups"]
    assert ours == theirs
