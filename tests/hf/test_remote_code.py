"""`export --format code`: transformers computes the same with the modelling file of the folder, without lit_llm."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from folders import LEARNED, LLAMA, differ, greedy, ids, logits, ours, save
from test_exported_tokenizers import bpe
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from lit_llm.commands.export import Source, export_folder, main
from lit_llm.core.errors import UserError
from lit_llm.hf import remote_code
from lit_llm.hf.remote_code import code_config
from lit_llm.models.gpt import GPTConfig

MODELS = {
    "quickstart": {"input_convolution": 4, "exclusive_attention": True},
    "all convolutions, grouped, windows": {
        **{"qkv_convolution": 3, "input_convolution": 2, "n_kv_head": 2, "exclusive_attention": True},
        **{"layers": {"window": [5, None], "rope": [True, False], "rope_theta": [100.0, 5000.0]}},
    },
    "caps, sinks, scales, sandwich": {
        **{"attention_softcap": 2.0, "logit_softcap": 9.0, "attention_sinks": True, "norm_position": "sandwich"},
        **{"embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 0.7, "attention_scale": 0.4, "mlp": "geglu"},
        **{"norm_unit_offset": True, "tie_embeddings": True, "qk_norm_width": "projection", "partial_rotary_factor": 0.5},
    },
    "learned positions, biases, parallel": {**LEARNED, "bias": True, "parallel_residual": True, "qkv_convolution": 4},
    "post norms": {**LLAMA, "norm_position": "post", "head_dim": 10, "mlp_width": 37, "input_convolution": 4},
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Where transformers copies modelling files to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_are_equal(name, tmp_path):
    model = ours(**MODELS[name])
    for key, parameter in model.named_parameters():
        if "convolution" in key:
            torch.nn.init.normal_(parameter, std=0.4)
    save(model, tmp_path / "a.ckpt")
    export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "out", dtype=None, max_bytes=1e9, code=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    for length in (1, 20, 64):
        expected = logits(model, ids(2, length))
        assert differ(logits(loaded, ids(2, length)), expected) < 1e-5 * max(1, expected.abs().max())
    prompts = ids(2, 7).tolist()
    texts = [greedy(model, prompt, 20) for prompt in prompts]
    assert [greedy(loaded, prompt, 20) for prompt in prompts] == texts
    # A batch padded on the left, with a cache that beams reorder.
    padded = torch.tensor([[0, 0, *prompts[0]], [*prompts[1], 5, 6]])
    mask = torch.ones_like(padded)
    mask[0, :2] = 0
    made = loaded.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=20, pad_token_id=0)
    assert made[0, 9:].tolist() == texts[0]
    made = loaded.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=6, num_beams=3, pad_token_id=0)
    again = loaded.generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=6, num_beams=3, pad_token_id=0, use_cache=False
    )
    assert torch.equal(made, again)


def exported(tmp_path, **settings):
    save(ours(**settings), tmp_path / "a.ckpt")
    export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "out", dtype=None, max_bytes=1e9, code=True)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)


def test_arguments_have_an_effect_or_are_refused(tmp_path):
    model = exported(tmp_path, **MODELS["quickstart"]).eval()
    x = ids(2, 20)
    every = logits(model, x)
    with torch.no_grad():
        assert torch.equal(model(x, logits_to_keep=torch.tensor([3, 7]), return_dict=True).logits, every[:, [3, 7]])
        assert torch.equal(model(x, logits_to_keep=2, output_hidden_states=False).logits, every[:, -2:])
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (
        32,
        2,
        4,
        4,
    )
    assert (config.max_position_embeddings, config.intermediate_size) == (64, 128)
    for refused, name in (
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"output_attentions": True}, "output_attentions"),
        ({"position_ids": x}, "position_ids"),
        ({"return_dict": False}, "return_dict"),
        ({"attention_mask": torch.ones(2, 1, 20, 20)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 1)}, "attention_mask"),
        ({"past_key_values": StaticCache(config=config, max_cache_len=64)}, "DynamicCache"),
    ):
        with pytest.raises(ValueError, match=name):
            model(x, **refused)
    with pytest.raises(ValueError, match="block_size"):
        model(ids(1, 65))
    cache = DynamicCache(config=config)  # made for two layers, and convolutions have places, too
    parts = [logits(lambda part: model(part, past_key_values=cache), part) for part in x.split((12, 1, 7), dim=1)]
    assert differ(torch.cat(parts, dim=1), every) < 1e-4


def test_what_a_plain_export_lacks_names_the_code_and_an_adapter_is_no_code(tmp_path):
    save(ours(**MODELS["quickstart"]), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"input_convolution .*or --format code"):
        export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "out", dtype=None, max_bytes=1e9)
    flags = ["--ckpt_path", str(tmp_path / "a.ckpt"), "--format", "code", "--adapter", "true"]
    with pytest.raises(UserError, match=r"--format code .*leave out --adapter"):
        main(["--run", str(tmp_path), "--out", str(tmp_path / "out"), *flags])


@pytest.mark.slow
def test_a_process_without_lit_llm_loads_the_folder(tmp_path):
    tokenizer = bpe()
    tokenizer.save(tmp_path)
    save(ours(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, **MODELS["quickstart"]), tmp_path / "a.ckpt")
    export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "out", dtype=torch.bfloat16, max_bytes=1e9, code=True)
    program = (
        "import sys; sys.modules['lit_llm'] = None\n"
        "from transformers import pipeline\n"
        f"write = pipeline('text-generation', {str(tmp_path / 'out')!r}, trust_remote_code=True)\n"
        "print(write('plain ', max_new_tokens=3)[0]['generated_text'][:5])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert "plain" in done.stdout, done.stderr[-2000:]


def test_settings_that_the_file_lacks_are_refused(tmp_path):
    scaling = {"rope_type": "linear", "factor": 2.0}
    for settings, name in (({"moe": {"experts": 3}}, "moe"), ({"rope_scaling": scaling}, "rope_scaling")):
        save(ours(**settings), tmp_path / "a.ckpt")
        with pytest.raises(UserError, match=f"model.{name} "):
            export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "out", dtype=None, max_bytes=1e9, code=True)
        assert not (tmp_path / "out").exists()


def test_a_kind_of_mlp_that_the_modelling_file_lacks_is_refused():
    refused = []
    for kind in get_args(get_type_hints(GPTConfig)["mlp"]):
        try:
            code_config(replace(GPTConfig(vocab_size=64), mlp=kind))
        except UserError:
            refused.append(kind)
    assert refused == ["clamped_swiglu"]
    with pytest.raises(UserError, match=r"model\.mlp 'cubed'"):  # as a new kind that nobody has added there
        code_config(replace(GPTConfig(vocab_size=64), mlp="cubed"))


def test_the_modelling_file_reads_each_setting_that_is_not_refused():
    """A setting that it does not read would be exported as another model."""
    source = Path(remote_code.__file__).with_name("modeling_lit_llm.py").read_text()
    written = code_config(GPTConfig(vocab_size=8)).keys() - {"auto_map", "architectures", "model_type"}
    assert {name for name in written if not re.search(rf"\b{name}\b", source)} == set()
