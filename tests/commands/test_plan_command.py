"""`plan` as a user meets it: the recipes and flags of `fit`, its messages, and what it prints."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_llm.__main__ import main
from lit_llm.config.recipe_files import SHIPPED, Header
from lit_llm.ingest.shards import ShardWriter
from lit_llm.models.gpt import GPTConfig
from lit_llm.plan import Optimizer, PlannedRun, table
from lit_llm.plan.measured_run import certified_run, settings_values
from lit_llm.plan.planned_recipe import build_to_plan, planned_run

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = """
model: {n_layer: 2, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TextFiles
  init_args: {paths: text.txt, micro_batch_size: 2, global_batch_size: 8}
schedule: {class_path: Cosine, init_args: {warmup_steps: 2}}
validation: {every_n_steps: 4}
checkpoint: {every_n_steps: 3}
trainer: {max_steps: 8, accelerator: cpu}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a line of text, and another one\n" * 200)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def plan(capsys, *arguments: str) -> dict:
    code, out, err = run(capsys, "plan", *arguments, "--json")
    assert out, err
    found = json.loads(out)
    assert code == (found["fits"] is False), err
    return found


def test_the_issues_own_example(folder, capsys):
    flags = ["--config", str(RECIPES / "gpt2-1.5b.yaml"), "--config", str(RECIPES / "strategy" / "fsdp2.yaml")]
    found = plan(capsys, *flags, "--hardware", "a100-80gb", "--devices", "8")
    expected = {"strategy": "mesh", "devices": 8, "replicate": 1, "shard": 8, "tensor_parallel": 1, "context": 1}
    assert found["settings"]["layout"].items() >= expected.items()
    assert found["fits"] is True and found["memory"]["parts"]["weights"] == 1_557_686_400 * 4 // 8
    assert not (folder / "runs").exists(), "a plan leaves nothing behind"


DPO = ["--objective", "Preference", "--model.mask_documents", "true"]


@pytest.mark.parametrize("weights", [[], ["--init_from", "runs/none"], DPO])
def test_adapters_are_planned_before_their_weights_are_on_the_disk(folder, capsys, weights):
    flags = ["--config", "llama2-7b", "--config", "lora", "--hardware", "h100-sxm", "--devices", "1", *weights]
    found, (d, f) = plan(capsys, *flags), (4096, 11008)
    assert found["settings"]["uses_reference"] is (weights is DPO)
    adapters = 32 * 16 * (4 * (d + d) + 3 * (d + f))
    assert found["parts"]["adapters"] == adapters and found["parameters"] == 6_738_415_616 + adapters
    assert found["memory"]["parts"]["optimizer state"] == 8 * adapters
    for refused in (["plan", "--config", "finetune"], ["fit", *flags[:4]]):  # the model follows from weights; it would train
        code, _, err = run(capsys, *refused, "--config", "lora", *weights)
        assert code == 2 and "--init_from" in err


def test_a_plan_counts_the_blocks_of_packed_documents_and_says_what_packing_does(folder, capsys):
    # 20 documents of 12 bytes and an end, in blocks of 16: each alone, with 3 positions of padding, 4 for the first.
    (folder / "text.jsonl").write_text('{"text": "twelve bytes"}\n' * 20)
    (folder / "held.txt").write_text("some more text")
    texts = "--data TextFiles --data.train text.jsonl --data.val held.txt --out shards"
    assert run(capsys, "prepare", *texts.split())[0] == 0
    flags = "--config tiny.yaml --data TokenShards --data.path shards --data.packing best_fit --trainer.max_epochs 4"
    for max_steps in ("-1", "500"):  # a run ends where either limit does
        _, out, _ = run(capsys, "plan", *flags.split(), "--trainer.max_steps", max_steps, "--data.global_batch_size", "8")
        text = " ".join(out.split())
        assert "tokens 10 steps = 1.28 k" in text
        assert re.search(r"counted [^:]*: 4 epochs", text), "padding is no part of an epoch"
    assert "20 documents in 20 blocks, 19.06% padding. Cut: 0.0% of the documents (concatenate: 75.0%)" in text
    assert not list((folder / "shards").glob("*.idx")), "a plan leaves nothing behind"


def test_a_plan_ends_after_steps_or_epochs_whichever_comes_first(folder):
    (folder / "text.txt").write_text("x" * 319)  # with the end of the document 320 tokens: 19 blocks of 16 and their targets
    (folder / "held.txt").write_text("some more text")
    flags = ["--config", "tiny.yaml", "--data", "TextFiles", "--data.train", "text.txt", "--data.val", "held.txt"]
    flags += ["--data.paths", "null", "--data.tokenizer", "Bytes", "--data.global_batch_size", "4"]
    for steps, end in (("50", 10), ("7", 7), ("-1", 10)):  # 2 epochs: 38 samples
        built = build_to_plan([*flags, "--trainer.max_steps", steps, "--trainer.max_epochs", "2"])
        assert planned_run(built)[0].max_steps == end
        assert built.parts["schedule"].rate(end, 1.0) == pytest.approx(0.0, abs=0.2)  # it ends with the run
    gone = ["--config", "tiny.yaml", "--data", "TokenShards", "--data.path", "gone"]
    shards, notes = planned_run(build_to_plan([*gone, "--trainer.max_steps", "8", "--trainer.max_epochs", "2"]))
    assert shards.max_steps == 8 and any("--trainer.max_epochs" in note for note in notes)


QUICK = ("strategy/fsdp2-ep.yaml", "strategy/3d.yaml", "precision/bf16-mixed.yaml")
OVERLAYS = sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("*/*.yaml") if p.parent.name != "base")


@pytest.mark.parametrize("overlay", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in OVERLAYS])
def test_every_overlay_can_be_planned(overlay, folder, capsys):
    flags = ["--config", "tiny.yaml", "--model.n_head", "4", "--model.n_layer", "4", "--config", str(RECIPES / overlay)]
    if re.search(r"\bep\b", overlay):
        flags += ["--model.mlp", "swiglu", "--model.bias", "false", "--model.moe", "{experts: 8, top_k: 2, expert_width: 16}"]
    if "float8" in overlay:
        pytest.importorskip("torchao")  # `fit` refuses it here, and so does the plan
    sizes = {"single": 1, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "4d": 8}
    devices = str(sizes.get(Path(overlay).stem, 4))
    found = plan(capsys, *flags, "--hardware", "h100-sxm", "--devices", devices)
    assert found["settings"]["layout"]["devices"] == int(devices)
    assert found["tokens_per_second"] > 0


def phases(found: dict) -> list[tuple[str, int, int]]:
    return [(phase["name"], phase["steps"], phase["tokens"]) for phase in found["phases"]]


def test_a_gpt3_is_planned_with_the_papers_tokens(folder, capsys):
    found = plan(capsys, "--config", "gpt3-6.7b", "--hardware", "h100-sxm")
    # The recipe's sizes by hand: 889M tokens are 6,782.5 steps of 131,072, so 6,783; then 3,876 of 262,144 up to 1,905M, 3,876
    # of 524,288 up to 3,937M, 3,875 of 1,048,576 up to 8,000M, which makes 18,410 steps; all others are of 2,097,152.
    grown = 6_783 * 131_072 + 3_876 * 262_144 + 3_876 * 524_288 + 3_875 * 1_048_576
    assert grown - 1_048_576 < 8_000_000_000 <= grown
    warmup = 2_862 * 131_072
    end = grown + (138_573 - 18_410) * 2_097_152
    constant = (157_647 - 138_573) * 2_097_152
    assert phases(found) == [
        ("warmup", 2_862, warmup),
        ("decay", 138_573 - 2_862, end - warmup),
        ("constant", 157_647 - 138_573, constant),
    ]
    assert (round(warmup / 1e6), round(end / 1e9), round((end + constant) / 1e9)) == (375, 260, 300)
    assert found["settings"]["tokens"] == end + constant and found["settings"]["ramp"][-1][0] == 18_410
    speed = found["tokens_per_second"]
    assert found["run_seconds"] == pytest.approx((end + constant) / speed)


def test_a_ramp_by_flags_is_counted_and_noted(folder, capsys):
    ramp = ["--batch_ramp", "BatchRamp", "--batch_ramp.tokens_per_batch", "[[0, 64], [192, 128]]"]
    flags = ["--config", "tiny.yaml", *ramp, "--schedule.total_steps", "6"]
    found = plan(capsys, *flags)
    # 3 steps of 64 tokens, 5 of 128
    assert phases(found) == [("warmup", 2, 2 * 64), ("decay", 4, 64 + 3 * 128), ("constant", 2, 2 * 128)]
    assert found["settings"]["ramp"] == [[0, 4], [3, 8]]
    code, out, err = run(capsys, "plan", *flags, "--markdown")
    assert code == 0 and "batch_ramp: 832 tokens in total" in err and "8 steps = 832 (832)" in out


def test_a_decay_of_a_checkpoint_is_planned_though_its_start_is_not_known(folder, capsys):
    code, out, err = run(capsys, "plan", "--config", "tiny.yaml", "--schedule", "Decay", "--markdown")
    assert code == 0 and "Decay starts at the resumed checkpoint" in err
    assert "| schedule | Decay: decay 8 steps, 1.02 k tokens  " in out


@pytest.mark.slow
def test_data_are_counted_without_being_read(folder, capsys):
    text = plan(capsys, "--config", "tiny.yaml")
    assert (
        text["settings"]["data"]["train_tokens"] + text["settings"]["data"]["val_tokens"] == 200 * 32 + 2
    )  # bytes, and an end for either part
    assert text["parts"]["token embedding"] == 320 * 16  # 257 ids, padded to a multiple of 64
    bpe = plan(capsys, "--config", "tiny.yaml", "--data.tokenizer", "BPE", "--data.tokenizer.vocab_size", "300")
    assert bpe["settings"]["data"]["origin"].startswith("estimated")
    assert bpe["settings"]["data"]["train_tokens"] == pytest.approx(0.9 * 6400 / 3.5, rel=0.02)
    with ShardWriter(folder, "train", vocab_size=500, shard_tokens=300) as writer:
        writer.write(np.arange(1000) % 500)
    with ShardWriter(folder, "val", vocab_size=500, shard_tokens=300) as writer:
        writer.write(np.arange(300))
    shards = [
        "--data",
        "TokenShards",
        "--data.train",
        "train_*.bin",
        "--data.val",
        "val_000000.bin",
        "--data.vocab_size",
        "500",
    ]
    counted = plan(capsys, "--config", "tiny.yaml", *shards, "--data.micro_batch_size", "2", "--data.global_batch_size", "8")
    assert (counted["settings"]["data"]["train_tokens"], counted["settings"]["data"]["val_tokens"]) == (1000, 300)
    assert not (folder / "cache").exists(), "nothing was tokenised"


@pytest.mark.slow
def test_a_mixture_is_counted_by_phase_and_source_and_a_limit_of_epochs_refuses_the_run(folder, capsys):
    for name, tokens in {"web": 1600 + 1, "code": 160 + 1}.items():  # 100 and 10 blocks of 16
        (folder / name).mkdir()
        for split in ("train", "val"):
            with ShardWriter(folder / name, split, vocab_size=500, shard_tokens=2000) as writer:
                writer.write(np.arange(tokens) % 500)
    (folder / "mixed.yaml").write_text(
        "data:\n  class_path: Mixture\n  init_args:\n    vocab_size: 500\n    sources:\n"
        "      web: {train: web/train_*.bin, val: web/val_*.bin}\n      code: {train: code/train_*.bin, max_epochs: 2}\n"
        "    phases: [{until: 0.5, weights: {web: 100}}, {until: 1.0, weights: {web: 25, code: 75}}]\n"
    )
    flags = ["--config", "tiny.yaml", "--config", "mixed.yaml", "--data.global_batch_size", "4", "--data.micro_batch_size", "2"]
    planned = plan(capsys, *flags)
    found = planned["settings"]["data"]
    # 8 steps of 4 samples: 16 of "web", then 4 of it and 12 of "code"
    drawn = [(phase["end"], {name: [*of.values()] for name, of in phase["sources"].items()}) for phase in found["phases"]]
    assert drawn == [
        (16, {"web": [16, 256, 0.16, None], "code": [0, 0, 0.0, 2]}),
        (32, {"web": [4, 64, 0.20, None], "code": [12, 192, 1.2, 2]}),
    ]
    assert (found["train_tokens"], found["val_tokens"], planned["epochs"]) == (1762, 1601, None)
    code, out, err = run(capsys, "plan", *flags, "--trainer.max_steps", "16", "--schedule.total_steps", "16")
    assert code == 2 and not out and err.count("error") == 1
    assert "would read source code 2.4 times, but its max_epochs is 2" in err
    code, _, err = run(capsys, "plan", *flags, "--trainer.max_steps", "-1")
    assert code == 2 and err.count("error") == 1 and "set --trainer.max_steps." in err and "max_epochs" not in err

    # A source that is not here leaves its phases unknown, but not the vocabulary of the others.
    code, out, err = run(capsys, "plan", *flags, "--data.sources.code.train", "away/*.bin", "--data.vocab_size", "null")
    assert code == 0 and "dataset size: unknown: No non-empty file matches away/*.bin" in out
    # A run that goes on with other weights has read 4 steps of the first ones: 8 of "web", then 2 of it and 6 of "code".
    code, out, err = run(capsys, "fit", *flags, "--trainer.max_steps", "4", "--run_dir", "runs/mixed")
    assert code == 0, err
    assert "phases: until step 2 web 1; until step 4 web 1, code 3\n" in out
    more = ["--run", "runs/mixed", "--trainer.max_steps", "8", "--data.phases", "[{weights: {web: 50, code: 50}}]"]
    planned = [
        (phase["end"], {name: source["tokens"] // 16 for name, source in phase["sources"].items() if source["tokens"]})
        for phase in plan(capsys, *more)["settings"]["data"]["phases"]
    ]
    assert planned == [(8, {"web": 8}), (16, {"web": 2, "code": 6}), (32, {"web": 8, "code": 8})]
    code, _, err = run(capsys, "plan", *more, "--data.sources.code.max_epochs", "1")
    assert code == 2 and "would read source code 1.4 times, but its max_epochs is 1" in err


def test_devices_of_all_machines_beside_a_number_of_machines_are_a_note(folder, capsys):
    words = ["plan", "--config", "tiny.yaml", "--hardware", "h100-sxm", "--trainer.num_nodes", "4"]
    words += ["--data.global_batch_size", "32"]
    said = "note: 16 devices in all, on 2 machines: h100-sxm has 8 in each (--devices counts all, --trainer.num_nodes 4 is not"
    _, out, err = run(capsys, *words, "--devices", "16", "--json")
    assert json.loads(out)["settings"]["layout"]["devices"] == 16 and err.count(said) == 1
    _, out, err = run(capsys, *words, "--trainer.devices", "2", "--json")
    assert json.loads(out)["settings"]["layout"]["devices"] == 8 and "devices in all" not in err


def test_data_that_are_not_here_are_a_row_of_the_page(folder, capsys):
    code, out, err = run(capsys, "plan", "--config", str(RECIPES / "gpt2-124m.yaml"), "--hardware", "h200", "--markdown")
    assert code == 0 and "dataset size: unknown: No non-empty file matches" in out and "| parameters | 124,475,904 |" in out
    assert "note: " not in err, "the page says it"


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.n_head", "3"],
        ["--model.n_hed", "3", "--optimizer.lrr", "1"],
        *(
            pytest.param(flags.split(), marks=pytest.mark.slow)
            for flags in (
                "--trainer.devices 3",
                "--data.paths text.txt --data.val_fraction 2",
                "--schedule.warmup_steps 100",
                "--trainer.max_steps -1",
            )
        ),
        ["--trainer.precision", "nonsense"],
        ["--config", "absent.yaml"],
        ["--compute.activation_checkpointing", "0"],
        ["--compute.attention", "sdpa", "--model.window", "8"],
    ],
)
def test_what_fit_refuses_plan_refuses_in_the_same_words(flags, folder, capsys):
    planned = run(capsys, "plan", "--config", "tiny.yaml", *flags)
    fitted = run(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert planned[0] == fitted[0] == 2
    assert planned[2] == fitted[2] and planned[2].startswith("error: ")


@pytest.mark.parametrize(
    ("hardware", "flags", "said"),
    [
        ("h100-sxm", ["flex", "--model.dropout", "0.1"], "FlexAttention has no dropout and model.dropout is 0.1"),
        ("a100-80gb", ["flash3"], "needs an NVIDIA GPU of compute capability 9.x, but this device is a100-80gb"),
        ("mi300x", ["flash4"], "9.x or 10.x, but this device is mi300x"),
        ("cpu", ["flex"], "FlexAttention has no backward pass on cpu"),
        ("b200", ["flash4"], None),
        ("h100-sxm", ["flash3"], None),  # whether it is installed there, is not known here
    ],
)
def test_kernels_of_attention_are_checked_for_the_hardware_of_the_plan(hardware, flags, said, folder, capsys):
    code, _, err = run(capsys, "plan", "--config", "tiny.yaml", "--hardware", hardware, "--compute.attention", *flags)
    assert (code, err.count("compute.attention is")) == ((2, 1) if said else (0, 0)) and (said or "") in err


@pytest.mark.slow
def test_all_figures_are_of_the_sequences_of_the_data(folder, capsys):
    """The window is longer than these sequences: `fit`, too, estimates its memory without refusing that."""
    flags = ["--config", "tiny.yaml", "--model.window", "12", "--data.block_size", "8"]
    found = plan(capsys, *flags, "--hardware", "h100-sxm")
    model = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, window=12, vocab_size=257)
    assert found["flops_per_token"]["total"] == model.flops_per_token(8) < model.flops_per_token()
    assert found["settings"]["tokens_per_step"] == 8 * 8 and found["settings"]["tokens"] == 8 * 8 * 8
    code, out, err = run(capsys, "plan", *flags, "--markdown")
    assert code == 0 and "8 sequences of 8 = 64 tokens" in out
    assert "figures are of sequences of data.block_size = 8 tokens, not of model.block_size = 16" in err
    code, _, err = run(capsys, "fit", *flags, "--trainer.max_steps", "1", "--schedule.warmup_steps", "0")
    assert code == 0, err


def test_devices_that_do_not_divide_are_refused_as_fit_does_it(folder, capsys):
    code, _, err = run(capsys, "plan", "--config", "tiny.yaml", "--devices", "3")
    assert code == 2 and "use 6 or 9" in err
    mesh = ["--trainer.strategy", "lit_llm.distributed.mesh_strategy.MeshStrategy", "--trainer.strategy.tensor_parallel", "4"]
    code, _, err = run(capsys, "plan", "--config", "tiny.yaml", *mesh, "--devices", "4")
    assert code == 2 and "tensor_parallel=4 does not divide model.n_head = 2" in err
    code, _, err = run(capsys, "plan", "--config", "tiny.yaml", *mesh, "--devices", "6")
    assert code == 2 and "needs a multiple of 4 processes, but the run has 6" in err


def test_own_flags_are_checked_and_all_mistakes_told(folder, capsys):
    code, _, err = run(
        capsys, "plan", "--config", "tiny.yaml", "--hardware", "H100", "--sweep", "colour=red", "--model.n_head", "3"
    )
    assert code == 2 and "one of: h100-" in err and "colour=red" in err and "n_head" in err
    code, _, err = run(capsys, "plan", "--config", "tiny.yaml", "--mfu", "2", "--devices", "0", "--hardwar", "h200")
    assert code == 2 and "at most 1" in err and "above 0" in err and "did you mean hardware" in err
    code, _, err = run(capsys, "plan", "--config", "tiny.yaml", "--devices", "many")
    assert code == 2 and "--devices" in err and "Traceback" not in err


def test_flags_change_what_they_name(folder, capsys):
    base = ["--config", "tiny.yaml", "--hardware", "a100-80gb"]
    plain = plan(capsys, *base, "--mfu", "0.4")
    changed = plan(
        capsys, *base, "--mfu", "0.2", "--price", "1.5", "--mtbf_hours", "10", "--save_gbps", "2", "--storage_gbps", "1"
    )
    assert changed["times"]["step"] == pytest.approx(2 * plain["times"]["step"])
    assert changed["usd"] == [pytest.approx(changed["device_hours"] * 1.5)] * 2
    assert changed["mtbf_seconds"] == 36_000
    assert changed["save_seconds"] == pytest.approx(changed["checkpoint_bytes"] / 1e9)
    assert changed["mfu_origin"] == "given"


def at(capsys, step: int, *flags: str) -> dict[str, float]:
    found = plan(capsys, "--config", "tiny.yaml", "--trainer.max_steps", "1000", "--at", str(step), *flags)
    return found["rates_at"]


WARM = ["--schedule.warmup_steps", "100", "--optimizer.lr", "3e-3"]


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (["--schedule", "Cosine", *WARM], lambda t: 3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * (t - 100) / 900)))),
        (["--schedule", "Linear", *WARM, "--schedule.final_ratio", "0"], lambda t: 3e-3 * (1 - (t - 100) / 900)),
        (["--schedule", "WSD", *WARM], lambda t: 3e-3 * (1 - 0.9 * math.sqrt(max(0, t - 800) / 200))),
        (["--schedule", "InverseSquareRoot", *WARM], lambda t: 3e-3 * math.sqrt(100 / t)),
    ],
)
def test_the_rate_of_a_step_is_the_schedules_formula(flags, rate, folder, capsys):
    assert at(capsys, 40, *flags)["lr"] == pytest.approx(3e-3 * 40 / 100, rel=1e-12)
    for step in (101, 900, 1000):
        assert at(capsys, step, *flags)["lr"] == pytest.approx(rate(step), rel=1e-12), step


def test_each_group_of_another_peak_has_its_rate(folder, capsys):
    flags = [
        "--schedule",
        "Cosine",
        *WARM,
        "--optimizer",
        "MuonAdamW",
        "--optimizer.lr",
        "0.02",
        "--optimizer.adamw_lr",
        "1e-3",
    ]
    share = 0.1 + 0.45 * (1 + math.cos(math.pi * 450 / 900))
    found = at(capsys, 550, *flags)
    assert found == pytest.approx({"lr": 0.02 * share, "lr/embedding": 1e-3 * share, "lr/vector": 1e-3 * share}, rel=1e-12)
    # muP, with a ratio of widths of 16 / 8: AdamW's rates of matrices are halved (docs/transfer.md)
    wide = ["--schedule", "Cosine", *WARM, "--optimizer", "AdamW", "--optimizer.lr", "1e-3"]
    found = at(capsys, 550, *wide, "--model.base_width", "8", "--model.base_depth", "2")
    assert found["lr"] == pytest.approx(5e-4 * share, rel=1e-12) and found["lr/embedding"] == pytest.approx(
        1e-3 * share, rel=1e-12
    )


def test_a_budget_needs_no_recipe_and_is_compared_with_one(folder, capsys):
    code, out, _ = run(capsys, "plan", "--flops", "1.2e21", "--json")
    assert code == 0 and json.loads(out)["models"][0]["parameters"] == pytest.approx(math.sqrt(1.2e21 / 120))
    code, out, _ = run(capsys, "plan", "--devices", "64", "--days", "10", "--hardware", "h100-sxm", "--markdown")
    assert code == 0 and "15,000 device-hours" in out and "(assumed)" in out and "| twice | 27 B | 135 B | 5 |" in out
    flags = ["--config", "tiny.yaml", "--hardware", "a100-80gb", "--days", "1", "--devices", "2"]
    found = plan(capsys, *flags)
    assert found["budget"]["flops"] == pytest.approx(found["flops_per_token"]["total"] * found["tokens_per_second"] * 86400)
    *_, own = found["budget"]["models"]
    assert (own["name"], own["parameters"], own["tokens"]) == ("this run", found["parameters"], found["settings"]["tokens"])
    assert "| this run |" in run(capsys, "plan", *flags, "--markdown")[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--days", "10", "--devices", "64"], "--hardware"),
        (["--days", "10", "--flops", "1e21"], "(--flops)"),
        (["--flops", "1e21", "--html", "page.html"], "--html needs a recipe (--config)"),
        (["--flops", "0"], "--flops"),
        (["--config", "tiny.yaml", "--at", "9"], "step 9 is after the run's last step 8 (--at)"),
        (["--config", "tiny.yaml", "--at", "3", "--sweep", "devices=1,2"], "--at"),
        (["--config", "tiny.yaml", "--scaling_efficiency", "1.2"], "--scaling_efficiency"),
    ],
)
def test_a_budget_or_a_step_that_cannot_be_is_refused(flags, said, folder, capsys):
    code, out, err = run(capsys, "plan", *flags)
    assert code == 2 and said in err and not out


def test_a_swept_name_means_the_overlay_of_that_name(folder, capsys):
    """It leaves the flags of the strategy before it that an overlay leaves."""
    base = ["--config", "tiny.yaml", "--config", "strategy/fsdp2", "--hardware", "h100-sxm", "--devices", "8"]
    base += ["--trainer.strategy.reshard_after_forward", "true", "--trainer.strategy.prefetch", "2"]
    swept = ("precision=float8,tf32", "strategy=hsdp")
    code, out, err = run(capsys, "plan", *base, "--sweep", *swept, "--json")
    assert code == 0 and "float8 is planned without saving memory" in err
    overlays = ["--config", "strategy/hsdp", "--trainer.strategy.replicate", "1"]  # 8 devices are one machine
    for name, variant in zip(("float8", "tf32"), json.loads(out)["variants"], strict=True):
        alone = plan(capsys, *base, "--config", f"precision/{name}", *overlays)
        for part in ("memory", "times", "communication"):
            assert variant["plan"][part] == alone[part], (name, part)


@pytest.mark.slow
def test_a_sweep_is_a_table_and_a_limit_picks_from_it(folder, capsys):
    base = ["plan", "--config", "tiny.yaml", "--hardware", "a100-80gb"]
    code, out, _ = run(capsys, *base, "--sweep", "devices=1,2,64", "strategy=ddp,fsdp2")
    assert code == 0 and len(out.splitlines()) == 1 + 6 + 1 and "no plan: global_batch_size 8" in out
    code, out, _ = run(capsys, *base, "--sweep", "devices=1,2", "--max_memory", "1", "--markdown")
    assert code == 0 and out.startswith("| devices |") and "cheapest that fits: devices=1" in out
    code, out, err = run(capsys, *base, "--sweep", "devices=1,2", "--max_memory", "0.000001")
    assert code == 1 and "no combination fits" in err and "--max_memory" in err.splitlines()[-1]
    code, out, err = run(capsys, *base, "--deadline", "0.00000001")
    assert code == 1 and not out and "nearest: devices=" in err and "on 64 x" not in err  # a batch of 8
    assert "--sweep devices=16" in err and "--trainer.max_steps" in err and "--deadline" in err.splitlines()[-1]
    code, out, _ = run(capsys, *base, "--deadline", "1", "--json")
    assert code == 0 and json.loads(out)["cheapest"]["devices"] == "1"
    code, _, err = run(capsys, *base, "--deadline=1", "--devices=4", "--json")
    assert code == 0 and "--devices 4 is overridden by --deadline: comparing 1, 2, 4, 8, 16, 32, 64 devices" in err


def test_what_does_not_fit_is_printed_and_ends_with_1(folder, capsys):
    base = ["plan", "--config", str(RECIPES / "gpt2-124m.yaml"), "--hardware", "rtx-4090", "--data.micro_batch_size", "64"]
    code, out, _ = run(capsys, *base, "--json")
    assert code == 1 and json.loads(out)["fits"] is False
    code, out, _ = run(capsys, *base, "--sweep", "micro_batch_size=64")
    assert code == 1 and " NO " in out
    assert run(capsys, *base, "--sweep", "micro_batch_size=1,64")[0] == 0


def test_one_device_needs_no_bandwidth_for_muon(folder, capsys):
    """A table's `cpu` has neither node_gbps nor network_gbps."""
    flags = ["--config", "tiny.yaml", "--optimizer", "MuonAdamW", "--config", str(RECIPES / "strategy" / "fsdp2.yaml")]
    assert plan(capsys, *flags, "--hardware", "cpu", "--devices", "1")["communication"] == {}


def test_a_page_is_written_beside_what_is_printed_and_replaced_only_if_asked(folder, capsys):
    base = ["plan", "--config", "tiny.yaml", "--hardware", "a100-80gb", "--html", "pages/plan.html"]
    code, out, _ = run(capsys, *base, "--json")
    page = (folder / "pages" / "plan.html").read_text()
    assert code == 0 and json.loads(out) and page.startswith("<!DOCTYPE html>") and "tiny.yaml" in page
    code, out, err = run(capsys, *base, "--sweep", "devices=1,2")
    assert code == 2 and not out and "pages/plan.html exists already" in err and "(--html)" in err
    code, out, _ = run(capsys, *base, "--sweep", "devices=1,2", "--replace", "true")
    assert code == 0 and out.startswith("devices") and "Pareto front" in (folder / "pages" / "plan.html").read_text()


def certificate(folder, settings, **changed):
    """One with the speed of a step and two links."""
    hardware = {**vars(table()["a100-80gb"]), "name": "lab", "memory_gb": 8}
    speed = {"settings": settings_values(settings), "hardware": hardware, "measured": {"step_seconds": 3.0, "rows": 20}}
    figures = {"links/inner/all_reduce": 7.5, "links/outer/all_reduce": 2.5, "links/inner/all_gather": 1.0, "disk/write": 0.25}
    checks = [{"name": name, "details": {"gbps": value}} for name, value in figures.items()]
    checks.append({"name": "speed/plain loop", "details": {"speed": speed | changed}})
    path = folder / "certificate.json"
    path.write_text(json.dumps({"checks": checks}))
    return path


def test_a_certificate_gives_the_speeds_of_its_machine(folder, capsys):
    model = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)
    settings = PlannedRun(model, Optimizer("AdamW", fused=True), 1, 8, 8)
    path = certificate(folder, settings)
    run_, gbps = certified_run(path)
    assert (run_.step_seconds, run_.hardware.node_gbps, gbps) == (3.0, 2.5, 0.25)
    words = ("plan", "--config", "tiny.yaml", "--from_certificate", str(path), "--json")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    found = json.loads(out)
    assert " lab" in run(capsys, *words[:-1])[1]
    code, out, _ = run(capsys, *words, "--save_gbps", "0.5")
    assert code == 0
    assert json.loads(out)["save_seconds"] == pytest.approx(found["save_seconds"] / 2)
    (folder / "few.json").write_text('{"checks": []}')
    (folder / "fast.json").write_text(json.dumps({"checks": [{"name": "links/all_reduce", "details": {"gbps": 10**400}}]}))
    for words, said in (
        (["--from_certificate", str(path), "--mfu", "0.3"], "both decide the speed"),
        (["--from_certificate", "tiny.yaml"], "is not a certificate"),
        (["--from_certificate", "missing.json"], "cannot be read"),
        (["--from_certificate", "few.json"], "has no speed"),
        (["--from_certificate", "fast.json"], "is not a certificate"),
        (["--from_certificate", str(certificate(folder, settings, hardware={}))], "cannot be used"),
    ):
        code, _, err = run(capsys, "plan", "--config", "tiny.yaml", *words)
        assert code == 2 and said in err and "(--from_certificate)" in err and err.count("error: ") == 1, err


@pytest.mark.parametrize("name", ["quickstart", "minicpm-2.4b"])
def test_the_header_is_that_of_the_shipped_recipe(name, folder, capsys):
    """tests/recipes/test_recipes.py counts the figures of shipped headers itself."""
    recipe = SHIPPED / f"{name}.yaml"
    command = re.search(r"# plan +python -m lit_llm (.*)", recipe.read_text())[1].split()
    code, out, err = run(capsys, *command, "--header")
    assert code == 0, err
    (folder / "new.yaml").write_text(f"# A title\n{out}model: {{}}\n")
    written, facts = Header.of(folder / "new.yaml"), Header.of(recipe).facts
    assert not written.is_overlay and written.facts.pop("expect") != facts["expect"]
    assert written.facts.items() <= facts.items() and len(written.facts) == 7
    code, _, err = run(capsys, *command, "--header", "--sweep", "devices=1,2")
    assert code == 2 and "--header" in err and "--sweep" in err


@pytest.mark.slow
def test_a_run_is_planned_again_with_the_speed_that_it_measured(folder, capsys):
    words = ["--config", "tiny.yaml", "--run_dir", "runs/x", "--optimizer", "AdamW", "--trainer.log_every_n_steps", "1"]
    assert run(capsys, "fit", *words)[0] == 0
    assert run(capsys, "fit", "--run", "runs/x", "--resume", "auto", "--trainer.max_steps", "14")[0] == 0
    launches = json.loads(Path("runs/x/plan.json").read_text())["launches"]
    assert [(each["first_step"], each["last_step"]) for each in launches] == [(0, 8), (8, 14)]
    measured = launches[-1]["measured"]
    assert 0 < measured["lowest_step_seconds"] <= measured["step_seconds"] <= measured["highest_step_seconds"]

    def planned(*more):
        code, out, err = run(capsys, "plan", "--from_run", "runs/x", "--json", *more)
        assert code == 0, err
        return json.loads(out), err

    same, err = planned()
    assert same["times"]["step"] == pytest.approx(measured["step_seconds"], rel=1e-9)
    assert "other settings" not in err and same["settings"]["max_steps"] == 14
    rows = {row["step"]: row for row in map(json.loads, Path("runs/x/metrics.jsonl").read_text().splitlines()) if "lr" in row}
    assert planned("--at", "11")[0]["rates_at"] == {"lr": rows[11]["lr"]}, "what fit has set, to the last bit"
    deeper, err = planned("--model.n_layer", "3")
    grown = deeper["flops_per_run"] / same["flops_per_run"]
    assert deeper["times"]["step"] / measured["step_seconds"] == pytest.approx(grown)
    assert "other settings: model.n_layer 2 → 3" in err
    gpus, _ = planned("--hardware", "h100-sxm", "--devices", "2", "--trainer.strategy", "ddp")
    assert "Not carried to h100-sxm" in gpus["measured"] and gpus["settings"]["layout"]["devices"] == 2
    code, _, err = run(capsys, "plan", "--from_run", "runs/x", "--sweep", "hardware=h100-sxm")
    assert code == 0 and "Not carried to h100-sxm" in err
    shutil.rmtree("runs/x")
    assert run(capsys, "plan", "--from_run", "runs/x")[2].count("\n") == 1
