"""Folders in shards, as pickles, in bf16 or without the head's prefix, and every kind of broken folder."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from folders import SIZE, VOCAB, differ, export, ids, load, logits, ours, randomise, same_tensors, save, theirs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.export import Source, export_folder
from lit_llm.commands.import_hf import import_folder


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(file, **changes):
    """Replace tensors by name; None removes one."""
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, metadata={"format": "pt"})


def state(run):
    return read(run / "checkpoints/last.ckpt")["state_dict"]


def test_a_head_that_is_stored_alone_is_the_embedding_too(tmp_path):
    config = theirs("llama").config
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    embedding = model.model.embed_tokens.weight.detach()
    edit_weights(tmp_path / "hf/model.safetensors", **{"model.embed_tokens.weight": None, "lm_head.weight": embedding.clone()})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert differ(logits(load_model(tmp_path / "run/checkpoints/last.ckpt"), ids(2, 20)), logits(again, ids(2, 20))) < 1e-5


@pytest.fixture
def hf(tmp_path):
    theirs("llama").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def refused(folder, run) -> list[str]:
    with pytest.raises(ValueError) as caught:
        import_folder(folder, run)
    assert not run.exists() and not list(run.parent.glob(".*")), "nothing is left of it"
    return str(caught.value).splitlines()


# -- kinds of folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "qwen3, window"])
def test_shards_in_and_out_are_the_same_weights(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "shards", max_shard_size="15KB")
    model.save_pretrained(tmp_path / "one")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for kind in ("shards", "one"):
        import_folder(tmp_path / kind, tmp_path / f"run-{kind}")
    assert same_tensors(state(tmp_path / "run-shards"), state(tmp_path / "run-one"))
    export_folder(
        Source(tmp_path / "run-one/checkpoints/last.ckpt", tmp_path / "run-one"), tmp_path / "out", dtype=None, max_bytes=15e3
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 17e3 for file in files)  # and their headers
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for file in files for t in load_file(file).values()
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_tensors(dict(again.state_dict()), dict(model.state_dict()))


def test_bf16_stays_bf16_and_dtype_changes_it(tmp_path):
    model = theirs("qwen2", torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert {t.dtype for t in state(tmp_path / "run").values()} == {torch.bfloat16}
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32), (torch.float16, torch.float16)):
        out = tmp_path / f"out-{dtype}"
        export_folder(Source(tmp_path / "run/checkpoints/last.ckpt", tmp_path / "run"), out, dtype=dtype, max_bytes=1e9)
        again = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert again.dtype == expected
        assert same_tensors(dict(again.state_dict()), {name: t.to(expected) for name, t in model.state_dict().items()})


def test_weights_take_no_more_room_than_they_have_values(hf, tmp_path):
    """Saving a view of a memory-mapped file would save the whole file."""
    import_folder(hf, tmp_path / "run")
    size = (tmp_path / "run/checkpoints/last.ckpt/checkpoint.pt").stat().st_size
    assert size < 1.3 * (hf / "model.safetensors").stat().st_size + 20_000


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_pickles_of_plain_tensors_are_read(shards, legacy, hf, tmp_path):
    import_folder(hf, tmp_path / "expected")
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    options = {"_use_new_zipfile_serialization": not legacy}
    if shards:
        names = sorted(tensors)
        parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
        for file, part in parts.items():
            torch.save({name: tensors[name] for name in part}, hf / file, **options)
        where = {name: file for file, part in parts.items() for name in part}
        (hf / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        torch.save(tensors, hf / "pytorch_model.bin", **options)
    import_folder(hf, tmp_path / "run")
    assert same_tensors(state(tmp_path / "run"), state(tmp_path / "expected"))


class Evil:
    def __reduce__(self):
        return (open, ("was-executed", "w"))


def test_a_pickle_with_code_is_refused_and_not_run(hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (hf / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, hf / "pytorch_model.bin")
    assert f"{hf}/pytorch_model.bin cannot be read" in refused(hf, tmp_path / "run")[0]
    assert not (tmp_path / "was-executed").exists()


def test_folders_of_the_model_without_its_head_and_with_old_masks_are_read(tmp_path):
    """The first GPT-2 folders have no prefix, and the causal mask among the weights."""
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "expected")
    file = tmp_path / "hf/model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, file)
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert same_tensors(state(tmp_path / "run"), state(tmp_path / "expected"))


@pytest.mark.parametrize("old_names", [False, True])
def test_the_text_model_of_a_folder_with_images_is_imported(old_names, tmp_path):
    torch.manual_seed(0)
    size = {**SIZE, "head_dim": 8, "sliding_window": 9, "pad_token_id": None}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = Gemma3Config(
        text_config=size,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        **{"mm_tokens_per_image": 4, "image_token_index": 100, "boi_token_index": 98, "eoi_token_index": 99},
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    assert any("vision_tower" in name for name in tensors)
    if old_names:
        renamed = {name.replace("model.language_model.", "language_model.model."): tensor for name, tensor in tensors.items()}
    else:
        renamed = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    notes = import_folder(tmp_path / "hf", tmp_path / "run")
    assert "of gemma3, only the text model is imported: it reads no images" in notes
    ours = load_model(tmp_path / "run/checkpoints/last.ckpt")
    assert differ(logits(ours, ids(2, 40)), logits(model, ids(2, 40))) < 1e-4
    out = export_folder(
        Source(tmp_path / "run/checkpoints/last.ckpt", tmp_path / "run"), tmp_path / "out", dtype=None, max_bytes=1e9
    )
    assert out[0] == "Gemma3ForCausalLM"


def test_a_config_of_transformers_4_is_read(tmp_path):
    theirs("llama 3.1").save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "expected")
    file = tmp_path / "hf/config.json"
    content = json.loads(file.read_text())
    rope = content.pop("rope_parameters")
    content |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": content.pop("dtype")}
    del content["head_dim"]
    file.write_text(json.dumps(content))
    import_folder(tmp_path / "hf", tmp_path / "run")
    a, b = (read(tmp_path / run / "checkpoints/last.ckpt")["model_config"] for run in ("run", "expected"))
    assert a == b and a["rope_scaling"]["factor"] == 8.0 and a["rope_theta"] == 1000.0


def test_blocks_that_predict_ahead_are_left_out_with_a_note(tmp_path):
    model = ours(mlp="swiglu", qk_norm=False, predict_ahead=2, moe=None)
    save(model, tmp_path / "last.ckpt")
    architecture, notes = export(tmp_path / "last.ckpt", tmp_path / "hf")
    assert architecture == "LlamaForCausalLM" and any("model.predict_ahead 2" in note for note in notes)
    assert differ(logits(load(tmp_path / "hf"), ids(2, 20)), logits(model, ids(2, 20))) < 1e-4
    assert not any("layers.2" in name for name in load_file(tmp_path / "hf/model.safetensors"))


# -- what is wrong ------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "hf").mkdir()
    assert refused(tmp_path / "hf", tmp_path / "run") == [
        f"{tmp_path}/hf is not a Hugging Face model: it has no config.json (--from)"
    ]
    (tmp_path / "hf/config.json").write_text("{]")
    assert f"{tmp_path}/hf/config.json is not valid JSON" in refused(tmp_path / "hf", tmp_path / "run")[0]
    (tmp_path / "hf/config.json").write_text("{}")
    assert "config.json: it has no 'model_type'" in refused(tmp_path / "hf", tmp_path / "run")[0]


def test_an_unknown_family_names_those_that_are_known(hf, tmp_path):
    edit_json(hf / "config.json", model_type="minicpm")
    [refusal] = refused(hf, tmp_path / "run")
    assert "config.json: 'model_type' is 'minicpm'" in refusal
    assert "gemma2, gemma3_text, glm4_moe, gpt2, gpt_neox, gpt_oss, granite, llama" in refusal


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"model_type": "qwen2_vl", "vision_config": {"hidden_size": 8}}, "inputs other than text"),
        ({"model_type": "mamba", "state_size": 16}, "state-space layers"),
    ],
)
def test_an_unknown_family_names_what_it_needs(changes, needs, hf, tmp_path):
    edit_json(hf / "config.json", **changes)
    name = changes["model_type"]
    assert refused(hf, tmp_path / "run") == [
        f"{hf}/config.json: 'model_type' is '{name}', which needs {needs}: lit_llm does not support that"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "quick_gelu"},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None},
        {"rope_scaling": {"type": "linear"}, "factor": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "slope": 1}, "slope": None},
        {"quantization_config": {"bits": 4}},
        {"hidden_size": None},
        {"a_new_trick": 2},
        {"logit_multiplier": 0},
        {"is_encoder_decoder": True},
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention", "linear_attention"]},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "gemma3_text", "rope_parameters": None, "attn_logit_softcapping": 50.0},
        {"model_type": "smollm3", "no_rope_layers": [1, 2, 3]},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_unsupported_settings_of_a_config_are_named(changes, hf, tmp_path):
    edit_json(hf / "config.json", **changes)
    key = [key for key in changes if key != "model_type"][-1]
    key = {"rope_parameters": "rope_type", "rope_scaling": "rope_type"}.get(key, key)
    (line,) = refused(hf, tmp_path / "run")
    assert line.startswith(f"{hf}/config.json: ") and f"'{key}'" in line


def test_missing_and_damaged_files_are_named(tmp_path):
    model = theirs("llama")
    model.save_pretrained(tmp_path / "hf", max_shard_size="15KB")
    hf = tmp_path / "hf"
    shards = sorted(hf.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    (line,) = refused(hf, tmp_path / "run")
    assert line == f"{shards[1]} is missing, but model.safetensors.index.json lists it"
    shards[1].write_bytes(kept[:1000])
    assert f"{shards[1]} cannot be read" in refused(hf, tmp_path / "run")[0]
    shards[1].write_bytes(shards[0].read_bytes())
    assert f"{shards[1]} has no tensor" in refused(hf, tmp_path / "run")[0]
    for file in [*shards, hf / "model.safetensors.index.json"]:
        file.unlink()
    assert f"{hf} has no weights" in refused(hf, tmp_path / "run")[0]


def test_missing_unknown_and_integer_tensors_are_named(hf, tmp_path):
    edit_weights(hf / "model.safetensors", model__norm__weight=None, model__norm__gain=torch.ones(32))
    lines = refused(hf, tmp_path / "run")
    assert lines[0] == f"{hf} has no tensor model.norm.weight, but config.json implies it"
    assert lines[1] == f"{hf}/model.safetensors has a tensor model.norm.gain, which is not part of the model in config.json"
    ints = torch.ones(32, dtype=torch.int8)
    edit_weights(hf / "model.safetensors", model__norm__weight=ints, model__norm__gain=None)
    assert "model.norm.weight has dtype torch.int8" in refused(hf, tmp_path / "run")[0]


def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_must_equal_it(tmp_path):
    theirs("qwen2, window, tied").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    embedding = load_file(file)["model.embed_tokens.weight"]
    edit_weights(file, lm_head__weight=embedding.clone())
    import_folder(tmp_path / "hf", tmp_path / "run")
    for head in (embedding + 1, torch.tensor(1.0)):
        edit_weights(file, lm_head__weight=head)
        assert f"{file}: lm_head.weight differs from the embedding" in refused(tmp_path / "hf", tmp_path / "again")[0]


def test_an_existing_folder_is_never_written_into(hf, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("mine")
    with pytest.raises(ValueError, match=r"run exists already.*--out"):
        import_folder(hf, tmp_path / "run")
    save(ours(), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"run exists already.*--out"):
        export_folder(Source(tmp_path / "a.ckpt", tmp_path), tmp_path / "run", dtype=None, max_bytes=1e9)
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_both_commands_print_what_they_made_and_mistakes_are_one_line(hf, tmp_path, capsys):
    assert main(["import", "--from", str(hf), "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    parameters = 2 * VOCAB * 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 44 + 2 * 32) + 32 + 2 * (128 - VOCAB) * 32
    assert f"{parameters:,} parameters in float32" in out
    assert f"read: {parameters - 2 * (128 - VOCAB) * 32:,} values in {3 + 3 * 9} tensors of {hf}" in out  # without padding
    assert "has no tokenizer.json, so text cannot be tokenized" in out
    assert main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "x"), "--ckpt_path", "best"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "last.ckpt" in err and len(err.splitlines()) == 1
    assert main(["import", "--from", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is not a Hugging Face model")
    assert main(["import", "--from", "Qwen/Qwen3-0.6B", "--out", str(tmp_path / "x")]) == 2
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` (--from Qwen3-0.6B)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["import", "export"])
def test_without_safetensors_the_error_names_the_pip_command(command, hf, tmp_path, monkeypatch, capsys):
    import_folder(hf, tmp_path / "run")
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    arguments = {"import": ["--from", str(hf)], "export": ["--run", str(tmp_path / "run")]}[command]
    assert main([command, *arguments, "--out", str(tmp_path / "x")]) == 2
    assert "pip install safetensors" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_extras_are_imported_only_when_used():
    extras = {"transformers", "safetensors", "torchao", "lm_eval", "lm_eval_tasks", "gguf"}
    root = Path(__file__).parents[2]
    files = [*(root / "lit_llm").rglob("*.py"), *(root / "callbacks").rglob("*.py")]
    assert len(files) > 40
    for file in files:
        if file.name in ("lm_eval_tasks.py", "modeling_lit_llm.py"):  # others import these
            continue
        for statement in ast.parse(file.read_text()).body:  # of the module: what is in functions is imported when it is used
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            assert not extras & {name.split(".")[0] for name in names}, file
