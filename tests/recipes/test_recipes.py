"""The shipped recipes: headers agree with `plan` and with the built model, and each recipe trains for ten small steps."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lit_llm.__main__ import main
from lit_llm.commands.plan import own_flags
from lit_llm.config.objects import RunObjects
from lit_llm.config.recipe_files import SHIPPED, Header, base_of, shipped, with_base
from lit_llm.config.resolve import resolved
from lit_llm.core.number_text import duration, percent
from lit_llm.ingest.shards import ShardWriter
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.plan import Plan, find, make_plan
from lit_llm.plan.planned_recipe import build_to_plan, planned_run
from lit_llm.reporting.recipe_header import smallest
from lit_llm.training.auto_precision import choose_for

NAMES = [name for name, header in shipped().items() if not header.is_overlay]
OVERLAYS = [name for name, header in shipped().items() if header.is_overlay]
IMPORTED = ("finetune", "cpt", "sft", "dpo")  # take their model from a checkpoint
PLANNED = [name for name in NAMES if name not in IMPORTED]
# One that two cores can finish, and one with WSD and rates by width.
QUICK = ("quickstart", "minicpm-2.4b")
TIERED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANNED]
SHRUNK_ALIKE = {
    *("gpt2-355m", "gpt2-774m", "gpt2-1.5b"),  # as gpt2-124m, and the next line as gpt3-125m
    *("gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "gpt3-175b"),
    *("qwen3-4b", "olmo2-7b", "llama2-70b"),  # as qwen3-0.6b, olmo2-1b, tinyllama-1.1b
    *("llama2-7b", "llama2-13b", "llama3.2-1b", "mixtral-8x7b"),  # each setting is that of one of the others
}
"""Recipes that only differ from another one in what a run of ten small steps replaces."""


def test_every_file_is_a_recipe_an_overlay_or_the_base_of_a_recipe():
    recipes = [SHIPPED / f"{name}.yaml" for name in NAMES]
    bases = {base_of(recipe) for recipe in recipes} - {None}
    rule = "the `base:` of a recipe is a file of recipes/base/, and each of these is the base of a recipe"
    assert bases == set((SHIPPED / "base").glob("*.yaml")), rule
    assert {SHIPPED / f"{name}.yaml" for name in NAMES + OVERLAYS} | bases == set(SHIPPED.rglob("*.yaml"))
    assert all("/" not in name for name in NAMES), "recipes lie flat"
    assert len(NAMES) >= 24


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if "/" not in name])  # the others: test_plan_command.py
def test_an_overlay_changes_only_the_groups_it_names(overlay):
    before, after = (yaml.safe_load(resolved(["--config", "llama2-7b", *more])) for more in ([], ["--config", overlay]))
    named = yaml.safe_load((SHIPPED / f"{overlay}.yaml").read_text())
    why = f"{overlay}.yaml counts as an overlay, because its header has no line `# parameters …`, which a recipe must have"
    assert {key for key in after if before.get(key) != after[key]} <= named.keys(), f"{why}; it changes groups it does not name"
    assert after != before, f"{why}; it changes nothing"


@pytest.mark.parametrize("overlay", [[], ["strategy/fsdp2"], ["lora"], ["debug"]], ids=lambda names: "+".join(names) or "alone")
@pytest.mark.parametrize("name", TIERED)
def test_a_configuration_that_was_written_is_read_back_equal(name, overlay, tmp_path):
    text = resolved(["--config", name, *(f"--config={each}" for each in overlay)])
    (tmp_path / "config.yaml").write_text(text)
    assert resolved(["--config", str(tmp_path / "config.yaml")]) == text


PUBLISHED = {
    # Elements of the released weights: model cards and headers of their safetensors.
    "pythia-160m": 162_322_944,
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "gemma3-1b": 999_885_952,
    "tinyllama-1.1b": 1_100_048_384,
    "llama3.2-1b": 1_235_814_400,
    "olmo2-1b": 1_484_916_736,
    "qwen3-4b": 4_022_468_096,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "olmo2-7b": 7_298_617_344,
    "llama3.1-8b": 8_030_261_248,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "moonlight-16b-a3b": 15_960_108_544,  # without the biases for the choice of experts, 64 in each of 26 layers
    "deepseek-v3": 671_026_404_352,  # without the layer that predicts further tokens, and these
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_as_many_parameters_as_the_released_weights(name):
    model, source = {}, {}
    for _, settings in with_base(SHIPPED / f"{name}.yaml"):
        model |= settings["model"]
        source |= settings["data"]["init_args"]
    with torch.device("meta"):
        assert GPT(GPTConfig(**model, vocab_size=source["vocab_size"])).num_parameters() == PUBLISHED[name]


# -- headers ----------------------------------------------------------------------------------------------------------


def comment(name: str) -> str:
    """A recipe's opening comment as one line, without the `#`."""
    lines = re.match(r"(#.*\n)+", (SHIPPED / f"{name}.yaml").read_text())[0].splitlines()
    return re.sub(r" \\? +", "  ", " ".join(line.removeprefix("#") for line in lines))


def planned(arguments: list[str]) -> tuple[RunObjects, Plan]:
    own, recipe = own_flags().split(arguments)
    hardware = find(own.hardware or "h200")
    precision = choose_for(find("cpu"))  # of quickstart, whose header is about CPUs
    cli = build_to_plan(recipe, devices=own.devices, devices_per_node=hardware.devices_per_node, precision=precision)
    return cli, make_plan(planned_run(cli)[0], hardware)


@pytest.mark.parametrize("name", TIERED)
def test_the_header_says_what_plan_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no data here, whatever this machine has
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path))
    facts, text = Header.of(SHIPPED / f"{name}.yaml").facts, comment(name)
    command = re.search(r"  plan  python -m lit_llm plan (.*?)  memory  ", text)[1]  # the header's own, which adds a layout
    cli, plan = planned(command.split())
    settings = plan.settings
    with torch.device("meta"):
        built = GPT(settings.model).num_parameters()
    assert facts["parameters"] == f"{built:,}" and plan.parameters == built
    unit = next(unit for unit in (1e12, 1e9, 1e6) if settings.tokens >= 0.5 * unit)
    assert facts["tokens"] == f"{settings.tokens / unit:.1f}{ {1e12: 'T', 1e9: 'B', 1e6: 'M'}[unit] }"
    assert f"({settings.max_steps:,} steps" in text
    ramp = cli.datamodule.ramp
    sequences = f"{settings.global_batch_size:,} sequences of {settings.model.block_size:,}"
    batch = f"{sequences} = {settings.tokens_per_step:,} tokens a step"
    sentences = re.sub(" +", " ", text)
    assert batch in sentences or f"= {ramp.stages[0].size:,} tokens a step, twice that from 0.7T tokens on" in sentences
    assert sum(phase.tokens for phase in plan.phases) == settings.tokens
    if claimed := re.search(r"rate warmed up over (\d+)M, down to 10 % by (\d+)B, and constant from there", sentences):
        warmup, decay, constant = plan.phases
        assert (round(warmup.tokens / 1e6), round((warmup.tokens + decay.tokens) / 1e9)) == tuple(map(int, claimed.groups()))
        assert constant.name == "constant"
    found = smallest(settings)
    assert facts["fits on"] == str(found)
    if found.hardware.is_gpu:
        flags = " ".join(found.flags) or "as it is"
        assert f"  {found}  ({flags}: {found.bytes_per_device / 1e9:.1f} GB each)" in text
    assert cli.config.run_dir is None and f"--config {name}" in command
    assert f"{plan.memory.needed / 1e9:.{1 if plan.hardware.is_gpu else 2}f} GB" == facts["memory"] and plan.fits is not False
    if plan.run_seconds is not None:
        assert facts["time"] == duration(plan.run_seconds) and f"at an MFU of {percent(plan.mfu)}" in text


# -- ten steps --------------------------------------------------------------------------------------------------------


VOCAB_SIZE = 5_000
"""Of all shards. The vocabulary of each recipe is checked with its number of parameters."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Learnable shards (runs of consecutive ids), a text, and a cache."""
    folder = tmp_path_factory.mktemp("data")
    stream = (np.arange(6_000) % 500 + 1000 * (np.arange(6_000) // 3_000)).astype(np.int64)
    for split_name in ("train", "val"):
        with ShardWriter(folder, split_name, vocab_size=VOCAB_SIZE, shard_tokens=4_000) as writer:
            writer.write(stream)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    return folder


def fit(run, data, monkeypatch, capsys, *arguments):
    monkeypatch.setenv("LIT_LLM_CACHE", str(data / "cache"))
    code = main(["fit", "--run_dir", str(run), "--trainer.accelerator", "cpu", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    losses = [float(x) for x in re.findall(r"step\s+\d+/\d+\s+loss ([\d.]+)", out)]
    return losses, float(re.findall(r"val/loss\s*│\s*([\d.]+)", out)[-1])


def shrunk(name: str, data: Path, folder: Path) -> str:
    """An overlay for ten steps: small width, depth, heads, context, batch and data, and a rate to match; the rest stays."""
    settings = yaml.safe_load(resolved(["--config", name]))
    model, source, schedule = settings["model"], settings["data"]["init_args"], settings["schedule"]["init_args"]
    small = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32}
    small |= {"n_kv_head": 2} if model["n_kv_head"] else {}
    small |= {"head_dim": 12} if model["head_dim"] else {}
    small |= {"mlp_width": 48} if model["mlp_width"] else {}
    small |= {"window": 16} if model["window"] else {}
    small |= {"eos_id": 2} if model["eos_id"] else {}
    small |= {"moe": {"experts": 8, "top_k": 2, "expert_width": 24}} if model["moe"] else {}
    if (model["moe"] or {}).get("first_dense"):
        small["moe"]["first_dense"] = 1
    if model["latent"]:
        small["latent"] = {"kv_rank": 12, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
    if model["layers"]:  # the last layers of a pattern, with windows shorter than the context
        small["layers"] = {key: pattern[-2:] for key, pattern in model["layers"].items()}
        small["layers"]["window"] = [window and 16 for window in small["layers"]["window"]]
    rates = {"lr": 0.02}  # at 0.05 AdamW is so unstable that rounding decides
    if settings["optimizer"]["init_args"].get("adamw_lr", 1.0) < 0.001:
        rates["adamw_lr"] = 0.02
    batch = {"micro_batch_size": 2, "global_batch_size": 4, "num_workers": 0}
    if "vocab_size" in source:
        batch |= {part: str(data / f"{part}_*.bin") for part in ("train", "val")} | {"vocab_size": VOCAB_SIZE}
    elif name == "quickstart":
        batch["tokenizer"] = "Bytes"  # training its BPE takes longer than the rest of these tests
    changes = {
        "model": small,
        "data": {"init_args": batch},
        "schedule": {"init_args": {"warmup_steps": 2} | ({"total_steps": 8} if schedule.get("total_steps") else {})},
        "optimizer": {"init_args": rates},
        "compute": {"compile": False},  # tested in tests/config/test_layouts.py
        "trainer": {"max_steps": 10, "limit_val_batches": 4},
        "samples": None,
    }
    if settings["loss"]["chunk_size"]:
        changes["loss"] = {"chunk_size": 50}
    if settings["batch_ramp"]:
        changes["batch_ramp"] = {"init_args": {"tokens_per_batch": [[0, 64], [192, 128]]}}
    path = folder / "shrunk.yaml"
    path.write_text(yaml.safe_dump(changes))
    return str(path)


VOCABULARY = {"quickstart": 257, "bytes": 257, "moe": 257, "chars": 128}  # these follow the data


def tier(name: str) -> tuple | pytest.MarkDecorator:
    return () if name in QUICK else pytest.mark.soak if name in SHRUNK_ALIKE else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier(name)) for name in PLANNED])
def test_ten_steps_of_each_recipe_start_at_ln_v_and_learn(name, data, tmp_path, monkeypatch, capsys):
    losses, val = fit(tmp_path / "run", data, monkeypatch, capsys, "--config", name, "--config", shrunk(name, data, tmp_path))
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    vocab_size = VOCABULARY.get(name) or saved["data"]["init_args"]["vocab_size"]
    assert losses[0] == pytest.approx(math.log(vocab_size), rel=0.03)
    # The last batch may hold ids that the few steps have not met; the validation batches hold all.
    assert min(losses[-1], val) < losses[0] - 0.3 and val < losses[0], (losses, val)


@pytest.mark.slow
def test_ten_steps_of_finetune_continue_from_the_given_weights(data, tmp_path, monkeypatch, capsys):
    text = ["--data.paths", str(data / "text.txt")]
    base = ["--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "32", "--model.block_size", "64"]
    base += ["--data", "TextFiles", *text, "--data.global_batch_size", "4", "--trainer.max_steps", "20"]
    before, val_before = fit(tmp_path / "base", data, monkeypatch, capsys, *base, "--trainer.limit_val_batches", "4")
    tuned = ["--config", "finetune", "--init_from", str(tmp_path / "base"), *text, "--data.block_size", "32"]
    tuned += ["--data.micro_batch_size", "2", "--data.global_batch_size", "4", "--trainer.max_steps", "10"]
    tuned += ["--optimizer.lr", "0.003", "--schedule.warmup_steps", "2", "--trainer.limit_val_batches", "4"]
    losses, val = fit(tmp_path / "tuned", data, monkeypatch, capsys, *tuned)
    assert losses[0] == pytest.approx(val_before, rel=0.1) and losses[0] < 0.8 * before[0]
    assert losses[-1] < losses[0] and val < val_before
    saved = yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())
    assert saved["trainer"]["precision"] == "bf16-mixed" and saved["model"]["n_embd"] == 32


@pytest.mark.parametrize("name", IMPORTED)
def test_the_header_of_a_recipe_without_a_model_counts_its_tokens(name):
    values = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    source, steps = values["data"]["init_args"], values["trainer"]["max_steps"]
    tokens = source["global_batch_size"] * source["block_size"]
    assert f"= {tokens:,} tokens a step, in micro-batches of {source['micro_batch_size']}" in comment(name)
    assert f"({steps:,} steps; " in comment(name)
    if "sources" not in source:
        assert f"one pass over your text is its tokens / {tokens:,}" in comment(name)
    total = Header.of(SHIPPED / f"{name}.yaml").facts["tokens"]
    assert total == (f"{tokens * steps / 1e9:.1f}B" if tokens * steps > 5e8 else f"{tokens * steps / 1e6:.1f}M")
