"""Every family, in and out: the same logits as transformers, the same greedy text, and the same bits after a round trip."""

import pytest
import torch
from folders import CONTEXT, THEIRS, ids, ours, same_tensors, save, theirs
from transformers import AutoModelForCausalLM

from lit_llm.export_folder import export_folder
from lit_llm.generate import load_model
from lit_llm.import_folder import import_folder
from lit_llm.sampling import Sampling, generate

TOLERANCE = 1e-4


def export(checkpoint, out, **options):
    return export_folder(checkpoint, out.parent, out, **{"dtype": None, "max_bytes": 1e9} | options)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model, tokens):
    out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


def differ(a, b) -> float:
    return float((a - b).abs().max())


@pytest.fixture(params=THEIRS)
def folder(request, tmp_path):
    """(their model, the folder it was saved into, the run folder made of that)."""
    model = theirs(request.param)
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    return model, tmp_path


def test_imported_and_exported_again_it_is_the_same_model(folder):
    model, path = folder
    imported = load_model(path / "run/checkpoints/last.ckpt")
    tokens = ids(3, CONTEXT)
    expected = logits(model, tokens)
    assert expected.std() > 1  # so that the tolerance means something
    assert differ(logits(imported, tokens), expected) < TOLERANCE
    architecture, _ = export(path / "run/checkpoints/last.ckpt", path / "out")
    again = load(path / "out")
    # A Mistral without a window is a LLaMA, in its weights too.
    windowless = type(model).__name__ == "MistralForCausalLM" and model.config.sliding_window is None
    assert architecture == type(again).__name__ == ("LlamaForCausalLM" if windowless else type(model).__name__)
    assert same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert torch.equal(logits(again, tokens), expected)


def test_greedy_text_is_the_same_token_by_token(folder):
    model, path = folder
    imported = load_model(path / "run/checkpoints/last.ckpt")
    prompt = ids(1, 7)
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, pad_token_id=0
    )
    expected = expected[0, 7:].tolist()
    assert len(set(expected)) > 2  # not one token over and over
    greedy = Sampling(temperature=0, top_k=None)
    assert list(generate(imported, prompt[0].tolist(), max_new_tokens=40, sampling=greedy)) == expected


@pytest.mark.parametrize("name", ["mistral", "qwen2, window, tied", "qwen3, window", "llama 3.1"])
def test_windows_and_scaling_matter_in_these_comparisons(name, tmp_path):
    """Without this the comparisons above would not show that a window or a rotary scaling was read at all."""
    theirs(name).save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    model = load_model(tmp_path / "run/checkpoints/last.ckpt")
    tokens = ids(1, CONTEXT)
    with_it = logits(model, tokens)
    model.config.window, model.config.rope_scaling = None, None
    model._fill_rotation()
    assert differ(logits(model, tokens), with_it) > 0.1


LLAMA = {"mlp": "swiglu", "qk_norm": False}
LEARNED = {"position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False}
OURS = {
    "the defaults": ({}, "Qwen3ForCausalLM"),
    "defaults with a window": ({"window": 7, "n_kv_head": 2}, "Qwen3ForCausalLM"),
    "GPT-2": ({**LEARNED, "bias": True, "tie_embeddings": True}, "GPT2LMHeadModel"),
    "GPT-2 without biases": (LEARNED, "GPT2LMHeadModel"),
    "LLaMA": (LLAMA, "LlamaForCausalLM"),
    "LLaMA, ReLU², biases": ({**LLAMA, "mlp": "relu2", "bias": True}, "LlamaForCausalLM"),
    "Mistral": ({**LLAMA, "n_kv_head": 1, "window": 5, "mlp_width": 40}, "MistralForCausalLM"),
    "Qwen2": ({**LLAMA, "mlp": "geglu", "qkv_bias": True, "tie_embeddings": True, "head_dim": 10}, "Qwen2ForCausalLM"),
    "Qwen2 with a window": ({**LLAMA, "qkv_bias": True, "window": 5}, "Qwen2ForCausalLM"),
    "Qwen3 with biases": ({"mlp": "swiglu", "qkv_bias": True, "rope_theta": 99.0, "norm_eps": 0.1}, "Qwen3ForCausalLM"),
    "vocabulary without padding": ({"pad_vocab_to": 1, "tie_embeddings": True}, "Qwen3ForCausalLM"),
    "Llama 3.1": (
        {
            **LLAMA,
            "rope_scaling": {
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16.0,
            },
        },
        "LlamaForCausalLM",
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_a_model_of_ours_exported_gives_the_same_logits(name, tmp_path):
    changes, architecture = OURS[name]
    model = ours(**changes)
    save(model, tmp_path / "a.ckpt")
    assert export(tmp_path / "a.ckpt", tmp_path / "out")[0] == architecture
    exported = load(tmp_path / "out")
    tokens = ids(3, CONTEXT)
    expected = logits(model, tokens)
    assert expected.std() > 0.5
    got = logits(exported, tokens)
    assert type(exported).__name__ == architecture and got.shape == expected.shape  # padded ids are gone
    assert differ(got, expected) < TOLERANCE
    if "without biases" in name or "with biases" in name:
        return  # theirs has zeros where ours has nothing, so it comes back as another, equal model
    import_folder(tmp_path / "out", tmp_path / "run")
    back = load_model(tmp_path / "run/checkpoints/last.ckpt")
    rows = {
        n: t[: model.config.vocab_size] if n in ("embedding.weight", "head.weight") else t
        for n, t in model.state_dict().items()
    }
    for tensor_name, tensor in rows.items():
        assert torch.equal(back.state_dict()[tensor_name][: len(tensor)], tensor), tensor_name


LACKING = {
    "softcap": ({"logit_softcap": 15.0}, ["--model.logit_softcap null"]),
    "GELU without a gate": ({"mlp": "gelu"}, ["--model.mlp swiglu, geglu or relu2"]),
    "rotary LayerNorm": ({"norm": "layernorm"}, ["--model.norm rmsnorm"]),
    "learned and modern": (
        {"position": "learned", "mlp": "swiglu", "n_kv_head": 2, "window": 4, "head_dim": 6, "logit_softcap": 9.0},
        [f"--model.{x}" for x in ("logit_softcap", "norm", "mlp", "qk_norm", "window", "n_kv_head", "head_dim")],
    ),
    "biases and q/k norms": ({"mlp": "swiglu", "bias": True}, ["--model.bias false"]),
    "biases and a window": ({**LLAMA, "bias": True, "window": 3}, ["--model.bias false"]),
    "biases but not these": ({**LLAMA, "bias": True, "qkv_bias": False}, ["--model.qkv_bias null"]),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_has_no_equivalent_is_named_all_at_once_and_nothing_is_left(name, tmp_path):
    changes, flags = LACKING[name]
    save(ours(**changes), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="has no equivalent in") as caught:
        export(tmp_path / "a.ckpt", tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(flags)
    for line, flag in zip(lines, flags, strict=True):
        assert flag in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]
