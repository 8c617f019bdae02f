"""Import and export of variants of families: the same logits as transformers, and bit-exact round trips."""

import pytest
import torch
from folders import CONTEXT, OURS, THEIRS, differ, export, ids, load, logits, ours, same_tensors, save, theirs

from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.import_hf import import_folder

TOLERANCE = 1e-4


@pytest.fixture(params=THEIRS)
def folder(request, tmp_path):
    """(their model, its folder, the imported run folder)."""
    model = theirs(request.param)
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    return model, tmp_path


def test_imported_and_exported_again_it_is_the_same_model(folder):
    model, path = folder
    imported = load_model(path / "run/checkpoints/last.ckpt")
    tokens = ids(3, CONTEXT)
    expected = logits(model, tokens)
    assert expected.std() > 1  # so that the tolerance is meaningful
    assert differ(logits(imported, tokens), expected) < TOLERANCE
    architecture, _ = export(path / "run/checkpoints/last.ckpt", path / "out", run=path / "run")
    again = load(path / "out")
    assert architecture == type(again).__name__ == type(model).__name__  # of equivalent ones, the one it came from
    assert same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert torch.equal(logits(again, tokens), expected)


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
        return  # theirs has zero biases that ours lacks, so it returns as another, equivalent model
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
    "GELU without a gate": ({"mlp": "gelu"}, ["--model.mlp swiglu"]),
    "rotary LayerNorm": ({"norm": "layernorm"}, ["--model.norm rmsnorm"]),
    "learned and modern": (
        {"position": "learned", "mlp": "swiglu", "n_kv_head": 2, "window": 4, "head_dim": 6, "logit_softcap": 9.0},
        ["--model.position rope", "--model.logit_softcap null"],
    ),
    "biases and q/k norms": ({"mlp": "swiglu", "bias": True}, ["--model.qk_norm false"]),
    "convolution": ({"qkv_convolution": 4}, ["--model.qkv_convolution null"]),
    "input convolution": ({"input_convolution": 4}, ["--model.input_convolution null"]),
    "exclusive attention": ({"exclusive_attention": True}, ["--model.exclusive_attention false"]),
    "sinks": ({"attention_sinks": True}, ["--model.attention_sinks false"]),
    "a pattern of rotary embeddings": (
        {"layers": {"rope_theta": [1e4, 1e5]}},
        ["--model.layers null"],
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_all_settings_without_equivalent_are_named_and_no_files_remain(name, tmp_path):
    changes, flags = LACKING[name]
    save(ours(**changes), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="has no equivalent in") as caught:
        export(tmp_path / "a.ckpt", tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(flags)
    for line, flag in zip(lines, flags, strict=True):
        assert flag in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]
