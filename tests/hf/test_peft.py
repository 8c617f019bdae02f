"""Adapters to and from the package peft: equal logits both ways, exact tensors, and refusals."""

import json
from pathlib import Path

import family_models
import folders
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Phi3Config

from lit_llm.__main__ import main
from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.adapters import base_record
from lit_llm.checkpoint.disk_format import read
from lit_llm.checkpoint.load_weights import load_model
from lit_llm.commands.export import main as export
from lit_llm.commands.import_hf import import_folder
from lit_llm.core.errors import UserError
from lit_llm.hf.config_map import links
from lit_llm.hf.peft import read_adapter, shortest_endings, write_adapter
from lit_llm.hf.tensor_map import Link
from lit_llm.models.gpt import GPT, GPTConfig, reset_adapters
from lit_llm.models.lora import LoRAConfig, apply_lora

TOLERANCE = 1e-5  # of logits with a standard deviation above 1: sums in another order, in fp32
LAST = "checkpoints/last.ckpt"
MORE = {
    "deepseek": family_models.MODELS["deepseek_v3"],
    "phi3": lambda: Phi3Config(**folders.SIZE, pad_token_id=0),
    "pythia": lambda: GPTNeoXConfig(
        **{key: value for key, value in folders.SIZE.items() if key != "num_key_value_heads"}, rotary_pct=0.5
    ),
}
ATTENTION = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"], "pythia": ["query_key_value"], "llama": ["q_proj", "v_proj"]}
ATTENTION |= {"deepseek": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}
MLP = {"gpt2": ["c_fc", "mlp.c_proj"], "phi3": ["gate_up_proj"], "pythia": ["dense_4h_to_h"], "llama": ["down_proj"]}
MLP |= {"deepseek": []}


def built(family: str):
    torch.manual_seed(0)
    config = (MORE.get(family) or folders.THEIRS[family])()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    folders.randomise(model)
    return model.eval()


def logits(model, theirs: bool) -> torch.Tensor:
    ids = folders.ids(2, 23)
    with torch.no_grad():
        return (model(ids).logits if theirs else model(ids)).float()


def base_of(family: str, folder: Path) -> Path:
    """hf/ and its import runs/base in a folder."""
    built(family).save_pretrained(folder / "hf")
    import_folder(folder / "hf", folder / "runs/base")
    return folder / "runs/base"


def check_import(family: str, folder: Path, **settings) -> dict:
    base_of(family, folder)
    torch.manual_seed(4)
    theirs = get_peft_model(built(family), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(folder / "adapter")
    assert main(["import", "--from", str(folder / "adapter"), "--init_from", str(folder / "runs/base"), "--out",
                 str(folder / "runs/adapter")]) == 0  # fmt: skip
    expected = logits(theirs, True)
    assert expected.std() > 1 and (expected - logits(built(family), True)).abs().max() > 0.1, "the adapter matters"
    difference = (logits(load_model(folder / "runs/adapter" / LAST), False) - expected).abs().max()
    assert difference < TOLERANCE * expected.abs().max(), difference
    return read(folder / "runs/adapter" / LAST)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f == "gpt2" else pytest.mark.slow) for f in ATTENTION])
def test_an_adapter_of_peft_gives_the_same_logits_here_and_goes_back(family, tmp_path):
    saved = check_import(family, tmp_path, r=3, lora_alpha=12, target_modules=ATTENTION[family] + MLP[family])
    assert saved["lora"]["rank"] == 3 and saved["lora"]["alpha"] == 12
    assert all("lora" in name for name in saved["state_dict"])
    out = tmp_path / "back"
    words = ["export", "--run", str(tmp_path / "runs/adapter"), "--out", str(out), "--adapter"]
    with pytest.raises(UserError, match="leave out --max_shard_gb"):  # an adapter is one file
        export([*words[1:], "--max_shard_gb", "1"])
    assert main(words) == 0
    back = PeftModel.from_pretrained(built(family), out).eval()
    before = PeftModel.from_pretrained(built(family), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(back, True), logits(before, True), atol=2 * TOLERANCE, rtol=2 * TOLERANCE)
    if family == "llama":  # no layer of theirs is several of ours: the same tensors, bit for bit
        one, other = load_file(out / "adapter_model.safetensors"), load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "target_modules": ["q_proj", "o_proj"], "use_rslora": True},
        {"r": 4, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 5}},
        {"r": 2, "target_modules": ["k_proj"], "layers_to_transform": [1]},
    ],
)
def test_other_ranks_scales_and_layers_of_peft_are_exact(settings, tmp_path):
    check_import("llama", tmp_path, lora_alpha=7, **settings)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "phi3" else pytest.mark.slow) for f in ("phi3", "gpt2", "pythia", "llama", "qwen3")],
)
@pytest.mark.parametrize("targets", [None, ["query", "mlp.project"]])
def test_an_adapter_trained_here_gives_the_same_logits_in_peft_and_merged(family, targets, tmp_path):
    base = base_of(family, tmp_path)
    content = read(base / LAST)
    lora = LoRAConfig(rank=3, alpha=9.0, targets=targets)
    torch.manual_seed(5)
    model = GPT(GPTConfig(**content["model_config"]))
    model.load_state_dict({name.removeprefix("model."): t for name, t in content["state_dict"].items()})
    apply_lora(model, lora)
    reset_adapters(model)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.2)
    adapters = {f"model.{name}": p.detach() for name, p in model.named_parameters() if "lora" in name}
    saved = {**content, "state_dict": adapters, "lora": vars(lora), "base": base_record(base / LAST), "global_step": 1}
    disk_format.write(saved, tmp_path / "runs/tuned" / LAST)
    expected = logits(model.eval(), False)
    bound = TOLERANCE * float(expected.abs().max())
    run = ["export", "--run", str(tmp_path / "runs/tuned"), "--out"]
    assert main([*run, str(tmp_path / "adapter"), "--adapter"]) == 0
    theirs = PeftModel.from_pretrained(built(family), tmp_path / "adapter").eval()
    assert (logits(theirs, True) - expected).abs().max() < bound
    assert sum(p.numel() for name, p in theirs.named_parameters() if "lora" in name and p.any()) > 0
    assert main([*run, str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert (logits(merged, True) - expected).abs().max() < bound
    assert (logits(load_model(tmp_path / "runs/tuned" / LAST), False) - expected).abs().max() < bound


@pytest.mark.slow
def test_adapters_of_the_attention_of_a_mixture_are_those_of_peft(tmp_path):
    test_an_adapter_trained_here_gives_the_same_logits_in_peft_and_merged("deepseek", ["query", "attention.project"], tmp_path)


def test_the_shortest_endings_name_the_chosen_layers_and_no_other():
    every = [f"h.{i}.{name}" for i in range(2) for name in ("attn.q", "attn.proj", "mlp.proj")]
    assert shortest_endings(["h.0.attn.q", "h.1.attn.q"], every) == ["q"]
    assert shortest_endings(["h.0.mlp.proj", "h.1.mlp.proj"], every) == ["mlp.proj"]
    assert shortest_endings(["h.1.attn.q"], every) == ["1.attn.q"]


def weights_here(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """The merged weights by their name in transformers, from what is read of an adapter."""
    base = built(family).state_dict()
    table = links(built(family).config.to_dict())
    ours = {}
    for link in table:
        shapes = split_shapes(link, base[link.theirs])
        ours.update(zip(link.ours, link.split(base[link.theirs], shapes), strict=True))
    lora, adapters = read_adapter(folder, table, {name: weight.shape for name, weight in ours.items()})
    for name in {name.rpartition(".")[0] for name in adapters}:
        ours[f"{name}.weight"] = ours[f"{name}.weight"] + lora.scale * adapters[f"{name}.lora_b"] @ adapters[f"{name}.lora_a"]
    return {link.theirs: link.join([ours[name] for name in link.ours]) for link in table}


def split_shapes(link, theirs: torch.Tensor) -> list[torch.Size]:
    """Only GPT-2's c_attn is several of ours here: three equal parts."""
    whole = theirs.T if link.transposed else theirs
    return [torch.Size((whole.shape[0] // len(link.ours), *whole.shape[1:]))] * len(link.ours)


def write_peft(family: str, folder: Path, **settings) -> None:
    torch.manual_seed(4)
    theirs = get_peft_model(built(family), LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    theirs.save_pretrained(folder)


QV = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]}
EQUAL = {
    "plain": QV,
    "rank and alpha by default": {"target_modules": ["q_proj"]},
    "rslora": {**QV, "use_rslora": True},
    "a scale of some blocks": {**QV, "alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 40}},
    "alternatives": {**QV, "alpha_pattern": {"q_proj|v_proj": 40}},
    "a part of a name is no match": {**QV, "alpha_pattern": {"proj": 40, "layers.1": 40, "_proj": 40}},
    "the whole name": {**QV, "alpha_pattern": {"model.layers.2.self_attn.v_proj": 40}},
    "ranks and scales": {**QV, "rank_pattern": {r".*\.0\..*": 3}, "alpha_pattern": {r".*\.[12]\..*": 9}},
    "rslora, ranks and scales": {**QV, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*0.*q_proj": 9}},
    "gaussian": {**QV, "init_lora_weights": "gaussian"},
    "orthogonal": {**QV, "init_lora_weights": "orthogonal"},
    "eva": {**QV, "init_lora_weights": "eva"},
    "mica": {**QV, "init_lora_weights": "mica"},
    "random": {**QV, "init_lora_weights": False},
    "one block": {**QV, "layers_to_transform": [1], "layers_pattern": "layers"},
    "without one": {**QV, "exclude_modules": r".*layers\.0\..*"},
    "all linear layers": {**QV, "target_modules": "all-linear"},
    "targets by an expression": {**QV, "target_modules": r".*layers\.[02]\.mlp\.(up|down)_proj"},
    "dropout": {**QV, "lora_dropout": 0.3},
    "gpt2": {**QV, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "gpt2, ranks": {**QV, "target_modules": ["c_attn", "c_fc"], "rank_pattern": {r"h\.1\.\w+\.c_\w+": 2}},
}


@pytest.mark.parametrize("name", EQUAL)
def test_merged_weights_are_those_of_peft(name, tmp_path):
    family = "gpt2" if name.startswith("gpt2") else "llama"
    write_peft(family, tmp_path, **EQUAL[name])
    merged = PeftModel.from_pretrained(built(family), tmp_path).merge_and_unload().state_dict()
    ours, base = weights_here(family, tmp_path), built(family).state_dict()
    assert any((merged[key] - base[key]).abs().max() > 0.1 for key in ours), "the adapter matters"
    for key, weight in ours.items():
        torch.testing.assert_close(weight, merged[key], atol=1e-5, rtol=1e-5, msg=key)  # two orders of a sum in fp32


def test_a_converted_pissa_adapter_is_that_of_peft(tmp_path):
    torch.manual_seed(4)
    theirs = get_peft_model(built("llama"), LoraConfig(**QV, init_lora_weights="pissa"))
    theirs.peft_config["default"].init_lora_weights = True  # what peft asks for before it saves the first adapter
    theirs.save_pretrained(tmp_path / "first")
    theirs.peft_config["default"].init_lora_weights = "pissa"
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path / "new", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    expected = theirs.merge_and_unload().state_dict()
    for key, weight in weights_here("llama", tmp_path / "new").items():
        torch.testing.assert_close(weight, expected[key], atol=1e-4, rtol=1e-4, msg=key)  # weights of PiSSA were subtracted


REFUSED = [
    *(("init_lora_weights", init) for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new")),
    ("use_dora", True),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("lora_bias", True),
    ("peft_type", "IA3"),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1]),
    ("target_parameters", ["weight"]),
    ("layer_replication", [[0, 2]]),
    ("alora_invocation_tokens", [1]),
    ("use_qalora", True),
    ("arrow_config", {"top_k": 1}),
    ("kasa_config", {"beta": 1}),
    ("velora_config", {"scale": 1}),
    ("monteclora_config", {"num_samples": 1}),
    ("use_bdlora", {"nblocks": 2}),
    ("a_key_of_tomorrow", 1),
    ("lora_alpha", -1),
    ("lora_alpha", True),
    ("alpha_pattern", ["q_proj"]),
    ("alpha_pattern", {"(": 3}),
    ("use_rslora", "yes"),
    ("rank_pattern", {"q_proj|v_proj": 3}),
    ("r", 3),
]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_peft("llama", folder, **QV)
    return folder


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_what_may_change_the_result_is_refused_by_name(adapter, tmp_path, key, value):
    good = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**good, key: value}))
    (tmp_path / "adapter_model.safetensors").hardlink_to(adapter / "adapter_model.safetensors")
    with pytest.raises(UserError) as error:
        weights_here("llama", tmp_path)
    assert f"'{key}'" in str(error.value) and str(3 if key == "rank_pattern" else value) in str(error.value)


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(tmp_path, capsys):
    base = base_of("llama", tmp_path)
    theirs = get_peft_model(built("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path / "adapter")
    words = ["import", "--from", str(tmp_path / "adapter"), "--out", str(tmp_path / "runs/new"), "--init_from"]

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main([*arguments]) == 2
        assert not (tmp_path / "runs/new").exists()
        return capsys.readouterr().err

    file = tmp_path / "adapter/adapter_config.json"
    good = json.loads(file.read_text())
    file.write_text(json.dumps(good))
    assert "is an adapter: name the run folder of its base weights (--init_from)" in refused(*words[:-1])
    assert "is not an adapter" in refused("import", "--from", str(tmp_path / "hf"), *words[3:], str(base))
    assert "holds a whole model and no adapter" in refused("export", "--run", str(base), "--out", words[4], "--adapter")
    (tmp_path / "other").mkdir()
    other = base_of("gpt2", tmp_path / "other")
    assert "self_attn.q_proj.lora_A.weight adapts no linear layer in a block of the base model" in refused(*words, str(other))
    head = get_peft_model(built("llama"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    head.save_pretrained(tmp_path / "adapter")
    assert "lm_head.lora_A.weight adapts no linear layer in a block" in refused(*words, str(base))
    content = read(base / "checkpoints/last.ckpt")
    content["model_config"] |= {"mlp_width": 8}
    disk_format.remove(base / "checkpoints/last.ckpt")
    disk_format.write(content, base / "checkpoints/last.ckpt")
    assert "does not fit this model" in refused(*words, str(base))


def test_adapters_of_mlps_beside_experts_are_not_written_for_peft_to_take_for_theirs(tmp_path):
    """peft 0.19 looks for `down_proj` of such a model in its experts only, and warns of missing keys."""
    mlp = Link("model.layers.0.mlp.down_proj.weight", ("blocks.0.mlp.project.weight",))
    experts = Link("model.layers.1.mlp.experts.0.down_proj.weight", ("blocks.1.mlp.project.weight",), expert=0)
    adapters = {"blocks.0.mlp.project.lora_a": torch.zeros(2, 8), "blocks.0.mlp.project.lora_b": torch.zeros(4, 2)}
    shapes = {"blocks.0.mlp.project.weight": torch.Size((4, 8))}
    with pytest.raises(UserError, match=r"down_proj.*--adapter.*--lora\.targets"):
        write_adapter(adapters, LoRAConfig(rank=2), [mlp, experts], shapes, tmp_path)
    assert write_adapter(adapters, LoRAConfig(rank=2), [mlp], shapes, tmp_path) == 1
