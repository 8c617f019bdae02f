"""`export --format code`: transformers computes the same with the modelling file of the folder, without lit_llm."""

import subprocess
import sys

import pytest
import torch
from folders import LEARNED, LLAMA, differ, greedy, ids, logits, ours, save
from test_exported_tokenizers import bpe
from transformers import AutoModelForCausalLM

from lit_llm.commands.export import export_folder
from lit_llm.core.errors import UserError

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
    export_folder(tmp_path / "a.ckpt", tmp_path, tmp_path / "out", dtype=None, max_bytes=1e9, code=True)
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


@pytest.mark.slow
def test_a_process_without_lit_llm_loads_the_folder(tmp_path):
    tokenizer = bpe()
    tokenizer.save(tmp_path)
    save(ours(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, **MODELS["quickstart"]), tmp_path / "a.ckpt")
    export_folder(tmp_path / "a.ckpt", tmp_path, tmp_path / "out", dtype=torch.bfloat16, max_bytes=1e9, code=True)
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
            export_folder(tmp_path / "a.ckpt", tmp_path, tmp_path / "out", dtype=None, max_bytes=1e9, code=True)
        assert not (tmp_path / "out").exists()
