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
from test_exported_tokenizers import TEXTS, bpe
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_llm.__main__ import main
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands import export
from lit_llm.commands.import_hf import import_folder
from lit_llm.core.errors import UserError
from lit_llm.hf.gguf_architectures import ARCHITECTURES
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


def test_every_architecture_is_compared():
    assert MODELS.keys() == ARCHITECTURES.keys()


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


def test_each_dtype(tmp_path):
    """Matrices are rounded as torch rounds; vectors stay float32."""
    run, _ = run_of("qwen3", tmp_path)
    exact = values(write(run, tmp_path / "float32.gguf"))
    for dtype in ("bfloat16", "float16"):
        rounded = values(write(run, tmp_path / f"{dtype}.gguf", "--dtype", dtype))
        for name, value in exact.items():
            value = torch.from_numpy(value.copy())
            expected = value if value.ndim == 1 else value.to(getattr(torch, dtype)).float()
            assert torch.equal(torch.from_numpy(rounded[name].copy()).float(), expected), name


def test_q8_0_is_within_half_a_step(tmp_path):
    """A step is the largest of 32 values over 127."""
    model = ours(n_embd=64, n_head=2, mlp_width=96, vocab_size=71, **LLAMA)
    save(model, tmp_path / "a.ckpt")
    export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "exact", dtype=None)
    _, notes = export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "q8_0", dtype="q8_0")
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
    for settings, name in (
        ({}, "mlp relu2"),
        ({"input_convolution": 4}, "input_convolution"),
        ({"exclusive_attention": True}, "exclusive_attention"),
        ({**LLAMA, "window": 5}, "window"),
        ({**LLAMA, "mlp": "geglu"}, "mlp geglu"),
        ({**LLAMA, "qkv_bias": True, "qk_norm": True, "attention_scale": 0.5}, "attention_scale"),
    ):
        save(ours(**settings), tmp_path / "a.ckpt")
        with pytest.raises(UserError, match=name.split()[0]):
            export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "m.gguf", dtype=None)
        assert not (tmp_path / "m.gguf").exists()


def test_tokenizers_without_a_form_are_refused_and_a_missing_package_is_named(tmp_path, monkeypatch):
    Bytes().save(tmp_path)
    save(ours(vocab_size=257, eos_id=256, **LLAMA), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="no BPE with merges"):
        export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "m.gguf", dtype=None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'lit_llm\[gguf\]'"):
        export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "m.gguf", dtype=None)
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
    export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "m.gguf", dtype=None)
    found = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert found["tokenizer.chat_template"] == (tmp_path / "chat_template.jinja").read_text()
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (tokenizer.eos_id, end)
    assert found["tokenizer.ggml.tokens"][end:] == ["<|end|>", f"[PAD{end + 1}]", f"[PAD{end + 2}]"]
    assert found["tokenizer.ggml.token_type"][end:] == [3, 5, 5] and not found["tokenizer.ggml.add_bos_token"]


def test_sentencepiece_gets_scores_in_the_order_of_its_merges(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "<0x41>": 2, "ab": 3, "abc": 4, "bc": 5, "a": 6, "b": 7, "c": 8, "▁": 9}
    merges = [("a", "b"), ("a", "bc"), ("ab", "c"), ("b", "c")]
    for merged in (merges, merges[:2] + merges[3:]):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merged, unk_token="<unk>", byte_fallback=True))
        backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        backend.add_special_tokens(["</s>"])
        backend.save(str(tmp_path / "tokenizer.json"))
        save(ours(vocab_size=10, eos_id=1, **LLAMA), tmp_path / "a.ckpt")
        if merged is merges:
            export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "m.gguf", dtype=None)
            continue
        with pytest.raises(UserError, match="'abc' does not depend on the token alone"):
            export.export_gguf(tmp_path / "a.ckpt", tmp_path, tmp_path / "n.gguf", dtype=None)
    found = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert found["tokenizer.ggml.scores"][3:6] == [0, -1, -3]
    assert found["tokenizer.ggml.token_type"] == [2, 3, 6, 1, 1, 1, 1, 1, 1, 1]
    assert found["tokenizer.ggml.model"] == "llama" and not found["tokenizer.ggml.add_space_prefix"]


def test_the_commands_of_serve_md_run(tmp_path, monkeypatch):
    run, _ = run_of("llama", tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs/tuned")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    commands = re.findall(r"^    python -m lit_llm (.*)$", page, re.M)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)) == 0
    assert (tmp_path / "tuned-q8.gguf").stat().st_size < 0.6 * (tmp_path / "tuned.gguf").stat().st_size
