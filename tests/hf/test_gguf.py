"""GGUF files: transformers and llama.cpp read the tensors, the ids and the logits of the run."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from folders import LLAMA, differ, greedy, ids, logits, ours, save
from gguf_models import MODELS
from safetensors.torch import load_file
from test_exported_tokenizers import TEXTS, bpe
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_llm.__main__ import main
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands import export
from lit_llm.commands.import_hf import import_folder
from lit_llm.core.errors import UserError
from lit_llm.tokenizers import Bytes, load_tokenizer

gguf = pytest.importorskip("gguf")

READ_BY_TRANSFORMERS = ["gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "starcoder2", "qwen3_moe"]


def run_of(family, path):
    """The folder of an imported model with random weights and a small BPE; and the model."""
    tokenizer = bpe()
    config = MODELS[family]()
    config.vocab_size, config.eos_token_id = tokenizer.vocab_size, tokenizer.eos_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    model.save_pretrained(path / "hf")
    tokenizer.save(path / "hf")
    import_folder(path / "hf", path / "run")
    return path / "run", model


def write(run, out, *flags):
    assert export.main(["--run", str(run), "--out", str(out), "--format", "gguf", *flags]) == 0
    return gguf.GGUFReader(out)


def values(reader):
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_tensors_ids_and_logits(family, tmp_path, capsys):
    run, model = run_of(family, tmp_path)
    write(run, tmp_path / "m.gguf")
    assert "in float32" in capsys.readouterr().out
    # Of the settings, transformers reads sizes and heads only, and of some families not even these.
    config = None if family == "qwen2" else model.config
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        if family.startswith("gemma") and "norm" in name:  # the file has 1 + w
            assert differ(other[name], tensor) < 3e-7, name
        else:
            assert torch.equal(other[name], tensor), name
    assert differ(logits(again, ids(1, 30)), logits(model, ids(1, 30))) < 1e-5 * logits(model, ids(1, 30)).abs().max()
    tokenizer, mine = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"), load_tokenizer(run)
    for text in TEXTS:
        assert tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == mine.encode(text).tolist()


def as_gguf(family, file, config, names):
    """The tensors of a folder of transformers by their names in GGUF."""
    heads, parts = config.num_attention_heads, {}
    for name, tensor in sorted(load_file(file).items()):
        parts.setdefault(re.sub(r"\.experts\.\d\.", ".experts.", name), []).append(tensor)
    found = {}
    for name, tensors in parts.items():
        tensor = torch.stack(tensors) if len(tensors) > 1 else tensors[0]
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".sinks", ".sinks.weight")
        if family == "gpt2" and re.search(r"c_\w+\.weight", name):
            tensor = tensor.T
        if "query_key_value" in name:  # by head
            tensor = torch.cat(tensor.unflatten(0, (heads, 3, -1)).unbind(1)).flatten(0, 1)
        if family.startswith("gemma") and "norm" in name:
            tensor = 1 + tensor
        if family == "gpt_oss" and ".experts." in name:
            stem, what, bias = re.fullmatch(r"(.*)\.(\w+_proj)(_bias)?", name).groups()
            tensor, end = (tensor, "bias") if bias else (tensor.mT, "weight")
            split = {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]} if what == "gate_up_proj" else {what: tensor}
        else:
            stem, _, end = name.rpartition(".")
            stem, _, what = stem.rpartition(".")
            split = {what: tensor}
        for what, part in split.items():
            found[names.get_name(f"{stem}.{what}.{end}".removeprefix("."), try_suffixes=(".weight", ".bias"))] = part
    return found


@pytest.mark.parametrize("family", MODELS)
def test_the_file_has_the_tensors_and_settings_of_transformers(family, tmp_path):
    run, model = run_of(family, tmp_path)
    reader, config = write(run, tmp_path / "m.gguf"), model.config
    found = {name: torch.from_numpy(value.copy()) for name, value in values(reader).items()}
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields["general.architecture"]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    expected = as_gguf(family, tmp_path / "hf/model.safetensors", config, names)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if family == "llama":  # llama.cpp divides the frequencies of rope_theta by these
        plain = 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        expected["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
        assert differ(found["rope_freqs.weight"], expected["rope_freqs.weight"]) < 1e-5
        expected["rope_freqs.weight"] = found["rope_freqs.weight"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if family in ("llama", "mistral", "mixtral", "smollm3", "granite") and re.search(r"attn_[qk]\.", name):
            one = found[name].unflatten(0, (-1, head_dim))  # neighbouring rows are a pair that rotates
            found[name] = torch.cat((one[:, ::2], one[:, 1::2]), dim=1).flatten(0, 1)
        assert torch.equal(found[name], tensor.float()), name

    def first(*keys, default=None):
        return next((value for key in keys if (value := getattr(config, key, None)) is not None), default)

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    settings = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": first("intermediate_size", default=4 * config.hidden_size),
        "attention.head_count": heads,
        "attention.head_count_kv": first("num_key_value_heads", default=heads),
        "attention.key_length": head_dim,
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": round(head_dim * rope.get("partial_rotary_factor", 1)) if rope else None,
        "rope.scaling.factor": rope.get("factor") if rope.get("rope_type") in ("linear", "yarn") else None,
        "attention.sliding_window": first("sliding_window"),
        "attn_logit_softcapping": first("attn_logit_softcapping"),
        "final_logit_softcapping": first("final_logit_softcapping"),
        "attention.scale": first("attention_multiplier"),
        "embedding_scale": first("embedding_multiplier"),
        "residual_scale": first("residual_multiplier"),
        "logit_scale": first("logits_scaling"),
        "expert_count": first("num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": first("num_experts_per_tok"),
        "leading_dense_block_count": first("first_k_dense_replace", default=0 if first("num_experts_per_tok") else None),
        "expert_weights_scale": first("routed_scaling_factor", default=1.0 if first("num_experts_per_tok") else None),
    }
    eps = first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    assert eps in [pytest.approx(value) for name, value in fields.items() if name.endswith("epsilon")]
    for key, value in settings.items():
        written = fields.get(f"{architecture}.{key}")
        assert written is None if value is None else written == pytest.approx(value), key


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_llama_cpp_continues_with_the_same_tokens_and_probabilities(family, tmp_path):
    """Greedy text after a prompt longer than the windows, and the log-probabilities of every id at each of its places."""
    llama_cpp = pytest.importorskip("xllamacpp")
    run, _ = run_of(family, tmp_path)
    write(run, tmp_path / "m.gguf")
    model = load_model(run / "checkpoints/last.ckpt")
    prompt = ids(1, 20)[0].tolist()
    settings = llama_cpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(tmp_path / "m.gguf"), 64, 1, False
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    request = {"prompt": prompt, "n_predict": 8, "temperature": 0, "n_probs": 1000}
    found = llama_cpp.Server(settings).handle_completions(request)["choices"][0]["logprobs"]["content"]
    assert found
    own = greedy(model, prompt, 8)
    expected = logits(model, torch.tensor([prompt + own]))[0, len(prompt) - 1 :].log_softmax(-1)  # (9, V)
    # GELU is a table in float16 there.
    tolerance = 3e-2 if model.config.mlp in ("gelu", "geglu") else 1e-3
    place = -1
    for each in found:
        place = own.index(each["id"], place + 1)  # its server leaves out the first bytes of a character
        probable = {one["id"]: one["logprob"] for one in each["top_logprobs"] if one["logprob"] > -15}
        assert len(probable) > 5
        assert max(abs(expected[place, token] - value) for token, value in probable.items()) < tolerance


def test_q8_0_is_within_half_a_step(tmp_path):
    """A step is the largest of 32 values over 127."""
    model = ours(n_embd=64, n_head=2, mlp_width=96, vocab_size=71, **LLAMA)
    save(model, tmp_path / "a.ckpt")
    export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "exact", dtype=None)
    _, notes = export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "q8_0", dtype="q8_0")
    assert not any("float16" in note for note in notes)
    exact, reader = values(gguf.GGUFReader(tmp_path / "exact")), gguf.GGUFReader(tmp_path / "q8_0")
    for tensor in reader.tensors:
        value = exact[tensor.name]
        assert tensor.tensor_type.name == ("F32" if value.ndim == 1 else "Q8_0")
        blocks = value.reshape(-1, 32)
        step = np.abs(blocks).max(1, keepdims=True) / 127
        error = np.abs(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1, 32) - blocks)
        # The step is stored in float16: half a unit in the last place of 11 bits, times 127.
        assert (error <= step * (0.5 + 127 * 2**-11 + 1e-3)).all()


def test_settings_without_a_form_are_refused_by_name(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.3}
    for settings, name in (
        ({}, "mlp"),
        ({**LLAMA, "window": 5}, "window"),
        ({**LLAMA, "mlp": "geglu"}, "mlp"),
        ({**LLAMA, "qkv_bias": True, "head_dim": 10}, "head_dim"),
        ({**LLAMA, "rope_scaling": yarn}, "rope_scaling"),
        ({**LLAMA, "layers": {"rope": [True, False]}}, "layers.rope"),
        ({**LLAMA, "qk_norm": True, "moe": {"experts": 4, "top_k": 2, "normalise": False}}, "moe.normalise"),
    ):
        save(ours(**settings), tmp_path / "a.ckpt")
        with pytest.raises(UserError, match=f"model.{name} .*has no form in GGUF's"):
            export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "m.gguf", dtype=None)
        assert not (tmp_path / "m.gguf").exists()


def test_tokenizers_without_a_form_are_refused_and_a_missing_package_is_named(tmp_path, monkeypatch):
    Bytes().save(tmp_path)
    save(ours(vocab_size=257, eos_id=256, **LLAMA), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="no BPE with merges"):
        export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "m.gguf", dtype=None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install gguf"):
        export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "m.gguf", dtype=None)
    assert list(tmp_path.glob("*.gguf*")) == []


def test_a_chat_has_its_template_and_both_ends(tmp_path):
    tokenizer = bpe()
    backend = tokenizer.backend
    backend.add_special_tokens(["<|end|>"])
    tokenizer.save(tmp_path)
    end = backend.token_to_id("<|end|>")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, tokenizer.eos_id]}))
    save(ours(vocab_size=end + 3, eos_id=tokenizer.eos_id, **LLAMA), tmp_path / "a.ckpt")
    export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "m.gguf", dtype=None)
    found = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert found["tokenizer.chat_template"] == (tmp_path / "chat_template.jinja").read_text()
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (tokenizer.eos_id, end)
    assert found["tokenizer.ggml.tokens"][end:] == ["<|end|>", f"[PAD{end + 1}]", f"[PAD{end + 2}]"]
    assert found["tokenizer.ggml.token_type"][end:] == [3, 5, 5] and not found["tokenizer.ggml.add_bos_token"]


def test_sentencepiece_gets_scores_in_the_order_of_its_merges(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "<0x41>": 2, "ab": 3, "abc": 4, "bc": 5, "a": 6, "b": 7, "c": 8, "▁": 9}
    merges = [("a", "b"), ("a", "bc"), ("ab", "c"), ("b", "c")]
    for merged in (merges, merges[:2] + merges[3:], merges[:3]):  # two ways of three; "bc" without a way
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merged, unk_token="<unk>", byte_fallback=True))
        backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        backend.add_special_tokens(["</s>"])
        backend.save(str(tmp_path / "tokenizer.json"))
        save(ours(vocab_size=10, eos_id=1, **LLAMA), tmp_path / "a.ckpt")
        if merged is merges:
            export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "m.gguf", dtype=None)
            continue
        with pytest.raises(UserError, match=r"'a?bc' does not depend on the token alone"):
            export.export_gguf(export.Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "n.gguf", dtype=None)
    found = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert found["tokenizer.ggml.scores"][3:6] == [0, -1, -3]
    assert found["tokenizer.ggml.token_type"] == [2, 3, 6, 1, 1, 1, 1, 1, 1, 1]
    assert found["tokenizer.ggml.model"] == "llama" and not found["tokenizer.ggml.add_space_prefix"]


def test_the_commands_of_serve_md_run(tmp_path, monkeypatch):
    run, _ = run_of("qwen3", tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs/tuned")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    commands = re.findall(r"^    python -m lit_llm (.*)$", page, re.M)
    assert len(commands) == 3
    for command in commands:
        assert main(shlex.split(command)) == 0
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    loads = re.findall(r"^    \w+ = (\w+)\.from_pretrained\((.*)\)$", page, re.M)
    assert [name for name, _ in loads] == ["AutoModelForCausalLM", "AutoTokenizer"]
    for name, arguments in loads:
        assert eval(f"{name}.from_pretrained({arguments})")
    assert (tmp_path / "tuned-q8.gguf").stat().st_size < 0.6 * (tmp_path / "tuned.gguf").stat().st_size
