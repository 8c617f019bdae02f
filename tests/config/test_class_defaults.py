"""A class starts with its own defaults; what carries over from another class is a rule in lit_llm/config/tree.py."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml

import lit_llm.data
from lit_llm import callbacks
from lit_llm.config.resolve import resolved


def values(*arguments):
    return yaml.safe_load(resolved(list(arguments)))


@pytest.mark.parametrize("name", ["torch.optim.AdamW", "SGD", "RMSprop", "Adafactor"])
def test_an_optimizer_has_the_defaults_of_its_class(name):
    group = values("--optimizer", name)["optimizer"]
    name = name.rpartition(".")[2]
    built = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))])
    for option, value in group["init_args"].items():
        wanted = built.defaults[option]
        assert value == (list(wanted) if isinstance(wanted, tuple) else wanted), option


SHORT = ["--optimizer", "AdamW"]


def adamw(*arguments):
    found = values(*arguments)["optimizer"]
    assert found["class_path"] == "torch.optim.AdamW"
    return {name: found["init_args"][name] for name in ("betas", "weight_decay", "lr")}


def test_the_short_name_adamw_has_the_values_of_language_models_below_every_other_source(files, capsys):
    assert adamw(*SHORT) | {"lr": 0} == {"betas": [0.9, 0.95], "weight_decay": 0.1, "lr": 0}
    note = capsys.readouterr().err
    assert note.count("note: ") == 1 and all(text in note for text in ("0.95", "0.1", "torch.optim.AdamW"))
    files(recipe=RECIPE, bare="optimizer: AdamW", rate="optimizer: {class_path: AdamW, lr: 0.5, weight_decay: 0}")
    whole = {"betas": [0.8, 0.9], "weight_decay": 0.3, "lr": 0.02}
    assert adamw("--config", "recipe.yaml") == adamw("--config", "recipe.yaml", "--config", "bare.yaml", *SHORT) == whole
    assert capsys.readouterr().err == ""
    assert adamw("--config", "rate.yaml") == {"betas": [0.9, 0.95], "weight_decay": 0, "lr": 0.5}
    assert "weight_decay" not in capsys.readouterr().err
    assert adamw(*SHORT, "--optimizer.betas", "[0.5, 0.6]")["betas"] == [0.5, 0.6]
    assert adamw("--config", "quickstart", *SHORT)["betas"] == [0.9, 0.95]  # instead of Muon


def test_the_configuration_of_a_run_with_the_short_name_stands_without_it(files, capsys):
    files(run=resolved(SHORT))
    capsys.readouterr()
    assert adamw("--config", "run.yaml") == adamw(*SHORT) and "--config" not in capsys.readouterr().err
    path = {"betas": [0.9, 0.999], "weight_decay": 0.01, "lr": 0.001}
    assert adamw("--optimizer", "torch.optim.AdamW") == path


@pytest.mark.parametrize(
    ("layers", "width", "rate"),
    # Kaplan et al. 2020, D.1, by hand: N = 12 · 12 · 768² = 84.9M, ln N = 18.257; 302M; 1.21B; above 10^10.
    [(12, 768, 6.92e-4), (24, 1024, 5.15e-4), (24, 2048, 3.22e-4), (96, 12288, 2.7e-5)],
)
def test_the_rate_of_the_short_name_follows_the_size(layers, width, rate):
    sizes = ["--model.n_layer", str(layers), "--model.n_embd", str(width)]
    assert adamw(*SHORT, *sizes)["lr"] == pytest.approx(rate, rel=0.005)
    other = [["--optimizer.lr", "0.5"], ["--init_from", "gone"], ["--lora.rank", "4"], ["--model.base_width", "64"]]
    assert [adamw(*SHORT, *sizes, *flags)["lr"] for flags in other] == [0.5, 0.001, 0.001, 0.001]


def test_a_schedule_has_the_defaults_of_its_class():
    own = inspect.signature(callbacks.WSD).parameters
    arguments = values("--schedule", "WSD")["schedule"]["init_args"]
    assert arguments == {name: own[name].default for name in arguments}


def default(cls, name):
    return inspect.signature(cls).parameters[name].default


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write recipe files by name."""
    monkeypatch.chdir(tmp_path)

    def write(**contents: str) -> None:
        for name, content in contents.items():
            Path(f"{name}.yaml").write_text(content)

    return write


RECIPE = """
schedule: {class_path: Cosine, init_args: {warmup_steps: 7, final_ratio: 0.3, total_steps: 900}}
optimizer: {class_path: AdamW, init_args: {lr: 0.02, weight_decay: 0.3, betas: [0.8, 0.9]}}
"""
# Ways to name another class, and its argument decay_fraction.
WAYS = {
    "dotted flags": ["--schedule", "WSD", "--schedule.decay_fraction", "0.5"],
    "dotted flags, argument first": ["--schedule.decay_fraction", "0.5", "--schedule", "WSD"],
    "flags with init_args": ["--schedule.class_path=lit_llm.callbacks.WSD", "--schedule.init_args.decay_fraction=0.5"],
    "a dict": ["--schedule", "{class_path: WSD, init_args: {decay_fraction: 0.5}}"],
    "an overlay": ["--config", "overlay.yaml"],
    "two overlays": ["--config", "bare.yaml", "--config", "arguments.yaml"],
    "an overlay and a flag": ["--config", "bare.yaml", "--schedule.decay-fraction=0.5"],
    "an overlay with a base": ["--config", "based.yaml"],
}


@pytest.mark.parametrize("way", WAYS)
def test_another_class_starts_with_its_own_defaults_and_what_public_base_classes_declare(files, way):
    files(
        recipe=RECIPE,
        overlay="schedule: {class_path: WSD, init_args: {decay_fraction: 0.5}}",
        bare="schedule: WSD",
        arguments="schedule: {init_args: {decay_fraction: 0.5}}",
        based="base: bare.yaml\nschedule: {init_args: {decay_fraction: 0.5}}",
    )
    found = values("--config", "recipe.yaml", *WAYS[way])
    assert found["schedule"]["class_path"] == "lit_llm.callbacks.WSD"
    own = {name: parameter.default for name, parameter in inspect.signature(callbacks.WSD).parameters.items()}
    assert found["schedule"]["init_args"] == own | {"warmup_steps": 7, "decay_fraction": 0.5}
    assert found["optimizer"]["init_args"]["lr"] == 0.02  # other groups stay


def test_arguments_of_one_optimizer_are_not_those_of_another(files):
    files(recipe=RECIPE, overlay="optimizer: {class_path: Lion}")
    found = values("--config", "recipe.yaml", "--config", "overlay.yaml")
    assert found["optimizer"]["init_args"] == {"lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.99]}


def test_the_same_class_named_again_keeps_every_argument(files):
    files(recipe=RECIPE)
    for name in ("Cosine", "lit_llm.callbacks.Cosine", "lit_llm.callbacks.learning_rate_schedules.Cosine"):
        found = values("--config", "recipe.yaml", "--schedule", name)["schedule"]["init_args"]
        assert found == {"warmup_steps": 7, "final_ratio": 0.3, "total_steps": 900}, name


def test_arguments_for_the_default_class_do_not_carry_over_either(files):
    files(recipe="schedule: {init_args: {warmup_steps: 7, final_ratio: 0.3}}")
    found = values("--config", "recipe.yaml", "--schedule", "Linear")["schedule"]["init_args"]
    assert found == {"warmup_steps": 7, "final_ratio": default(callbacks.Linear, "final_ratio"), "total_steps": None}


def test_a_class_that_two_files_replace_and_restore_starts_again(files):
    files(recipe=RECIPE, overlay="schedule: WSD")
    found = values("--config", "recipe.yaml", "--config", "overlay.yaml", "--schedule", "Cosine")["schedule"]["init_args"]
    assert found == {"warmup_steps": 7, "final_ratio": default(callbacks.Cosine, "final_ratio"), "total_steps": None}


def test_other_data_keep_batch_sizes_and_tokenizer_where_both_classes_have_them_from_a_base_class(files):
    data = "{paths: a.txt, val_fraction: 0.2, global_batch_size: 6, tokenizer: {class_path: BPE, init_args: {vocab_size: 300}}}"
    files(recipe=f"data: {{class_path: TextFiles, init_args: {data}}}")
    text = values("--config", "recipe.yaml", "--data", "PythonStdlib")["data"]["init_args"]
    assert text["global_batch_size"] == 6 and text["tokenizer"]["init_args"] == {"vocab_size": 300}
    shards = values("--config", "recipe.yaml", "--data", "TokenShards", "--data.train", "x.bin")["data"]["init_args"]
    assert shards["global_batch_size"] == 6 and shards["tokenizer"] is None and shards["train"] == "x.bin"


def test_the_rule_holds_for_a_class_inside_a_group(files):
    files(recipe="data: {init_args: {tokenizer: {class_path: TokenizerJSON, init_args: {path: mine.json}}}}")
    for flags in (["--data.tokenizer", "BPE"], ["--data.tokenizer", "{class_path: BPE}"]):
        found = values("--config", "recipe.yaml", *flags)["data"]["init_args"]["tokenizer"]
        assert found["init_args"] == {"vocab_size": default(lit_llm.data.BPE, "vocab_size")}
    mesh = "lit_llm.distributed.mesh_strategy.MeshStrategy"
    files(mesh=f"trainer: {{strategy: {{class_path: {mesh}, init_args: {{tensor_parallel: 4}}}}}}")
    again = values("--config", "mesh.yaml", "--trainer.strategy", f"{{class_path: {mesh}}}")["trainer"]["strategy"]["init_args"]
    assert again["tensor_parallel"] == 4
    assert values("--config", "mesh.yaml", "--trainer.strategy", "ddp")["trainer"]["strategy"] == "ddp"


def test_the_default_class_named_again_has_its_own_defaults(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "optimizer: {class_path: AdamW}\ndata: {class_path: TextFiles, init_args: {paths: x}}"
    )
    back = values("--config", f"{tmp_path}/recipe.yaml", "--optimizer", "MuonAdamW")
    assert back["optimizer"] == values()["optimizer"]


def test_flags_with_init_args_count_as_set():
    arguments = values("--optimizer", "AdamW", "--optimizer.init_args.lr", "0.01")["optimizer"]["init_args"]
    assert arguments["lr"] == 0.01
