"""Strategy and precision overlays on the command line: one file moves a run, and an impossible layout is refused at once."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml
from recipe_runs import curve, run, table
from resume.launcher import Launcher

from lit_llm.checkpoint.io import AsyncFolderCheckpointIO
from lit_llm.config.build import build
from lit_llm.config.parse import parse
from lit_llm.config.resolve import decide
from lit_llm.core.errors import UserError
from lit_llm.distributed.mesh_strategy import MeshStrategy

RECIPES = Path(__file__).parents[2] / "recipes"
STRATEGIES = ("single", "ddp", "fsdp", "fsdp2", "hsdp", "tp", "fsdp2-tp", "cp", "fsdp2-cp", "pp", "fsdp2-pp", "3d", "4d")
STRATEGIES += ("ep", "fsdp2-ep", "ep-tp", "ep-pp")
PRECISIONS = ("32-true", "tf32", "bf16-mixed", "bf16-true", "16-mixed", "float8")


def overlay(name: str) -> list[str]:
    return ["--config", str(RECIPES / f"{name}.yaml")]


def fit(*arguments: str) -> str:
    """`fit` on two ranks."""
    done = Launcher().run(
        ["fit", "--config", "tiny.yaml", *arguments], Path.cwd(), ranks=2, log=f"{Path(arguments[1]).stem}.log"
    )
    assert done.codes == [0, 0], done.said()[-6000:]
    return done.said()


def test_every_overlay_is_named_here():
    assert {p.stem for p in (RECIPES / "strategy").glob("*.yaml")} == set(STRATEGIES)
    assert {p.stem for p in (RECIPES / "precision").glob("*.yaml")} == set(PRECISIONS)


@pytest.mark.slow
def test_an_overlay_replaces_the_layout_before_it_as_a_whole(tmp_path):
    """Whatever came before, with values that no overlay has: files are merged key by key, so each overlay sets every key."""
    kept = {"reshard_after_forward", "reduce_each_micro_batch", "prefetch", "cpu_offload", "timeout_seconds"}
    other = {"replicate": 3, "shard": 5, "context": 7, "tensor_parallel": 11, "pipeline": 13, "expert": 29}
    other |= {"context_attention": "heads", "schedule": "zbv", "stages_per_rank": 2, "layers_first": 17, "layers_last": 19}
    assert set(inspect.signature(MeshStrategy).parameters) == kept | other.keys()
    mesh = {"class_path": f"{MeshStrategy.__module__}.MeshStrategy", "init_args": other | {"prefetch": 23}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": mesh}}))
    raw = {name: yaml.safe_load((RECIPES / f"strategy/{name}.yaml").read_text())["trainer"]["strategy"] for name in STRATEGIES}
    meshes = {name: strategy["init_args"] for name, strategy in raw.items() if mesh["class_path"] in str(strategy)}
    assert len(meshes) == 14 and all(keys.keys() == other.keys() for keys in meshes.values())
    for name in ("single", "ddp", "tp", "4d"):
        alone, after = (
            parse("fit", [*before, *overlay(f"strategy/{name}")]).config.trainer.strategy
            for before in ([], ["--config", str(tmp_path / "other.yaml")])
        )
        if not isinstance(alone, str) and alone.class_path == mesh["class_path"]:
            assert after.init_args.prefetch == 23, "what is not of the layout stays"
            after.init_args.prefetch = alone.init_args.prefetch
        assert after == alone, name


@pytest.mark.slow
def test_a_run_moves_between_layouts_and_back_with_nothing_else_to_edit(folder, capsys, monkeypatch):
    """fsdp2 in shards → tp → pipeline → one process: the curve of a run that never moved, and one file of it at the end."""
    ten = ["--trainer.max_steps", "12", "--schedule.total_steps", "12", "--samples", "TextSamples"]
    ten += ["--samples.prompts", "[line]", "--samples.every_n_steps", "4", "--samples.max_new_tokens", "5"]
    ten += ["--model.n_layer", "2", "--data.micro_batch_size", "4"]  # the whole batch: no two ranks have as much
    ten += ["--trainer.limit_val_batches", "1.0"]  # a limit is one of each rank
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/straight", *ten)
    stop = ["--schedule.total_steps", "12", *ten[4:]]
    two = ["--trainer.devices", "2", "--resume", "auto"]
    out = fit(*overlay("strategy/fsdp2"), *stop, *two, "--trainer.max_steps", "4", "--sharded_checkpoints", "true")
    assert "in 1 micro-batch on each of 2 processes, of 2 (data.micro_batch_size 4)" in out
    assert len(list(Path("runs/tiny/checkpoints/last.ckpt/").glob("shard-*"))) == 2
    # Looking at it before resuming leaves its tensors on disk: a model may be larger than one rank's memory.
    monkeypatch.setattr("lit_llm.checkpoint.disk_format.join", None)
    build(decide(parse("fit", ["--config", "tiny.yaml", *stop, "--trainer.max_steps", "8", "--resume", "auto"])))
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    out = fit(*overlay("strategy/tp"), *stop, *two, "--trainer.max_steps", "8", "--async_checkpoints", "true")
    assert "in 1 micro-batch on each of 2 processes\n" in out
    out = fit(*overlay("strategy/pp"), *stop, *two, "--trainer.max_steps", "10")
    assert "in 2 micro-batches on each of 2 processes, of 2 (data.micro_batch_size 4)" in out
    code, out, err = run(capsys, "fit", "--config", "tiny.yaml", *overlay("strategy/single"), *ten, "--resume", "auto")
    assert code == 0, err
    straight, moved = Path("runs/straight"), Path("runs/tiny")
    assert curve(moved, "val/loss").keys() == curve(straight, "val/loss").keys() | {10}, "where the pipeline ended"
    for name in ("train/loss", "val/loss", "grad/norm"):
        found, wanted = curve(moved, name), curve(straight, name)
        assert {step: found[step] for step in wanted} == pytest.approx(wanted, rel=1e-4), name
    for name in ("lr", "progress/tokens"):
        assert curve(moved, name) == curve(straight, name), name
    code, out, _ = run(capsys, "export", "--format", "ckpt", "--run", "runs/tiny", "--out", "one.ckpt", "--weights")
    assert code == 0 and "step 12" in out
    content = torch.load("one.ckpt", weights_only=True)
    assert content["global_step"] == 12 and "optimizer_states" not in content
    code, out, _ = run(capsys, "validate", "--config", "runs/tiny/config.yaml", "--ckpt_path", "one.ckpt")
    assert code == 0 and table(out)["val/loss"] == pytest.approx(curve(moved, "val/loss")[12], abs=1e-4)
    code, _, err = run(capsys, "export", "--format", "ckpt", "--run", "runs/tiny", "--out", "one.ckpt")
    assert code == 2 and "one.ckpt exists already: give another name (--out), or replace it with --replace true" in err


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_launched_processes_without_a_device_each_are_counted_whatever_the_strategy(folder, monkeypatch, launcher, strategy):
    """Strategies take the number of ranks from the launcher. Rank 1 would then look for a second device."""
    rank = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    if launcher == "srun":
        rank = dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), "0")
        rank |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"2 processes are launched, but trainer.devices and trainer.num_nodes make 1 \("):
        build(decide(parse("fit", ["--config", "tiny.yaml", *overlay(f"strategy/{strategy}")])))


@pytest.mark.parametrize(
    "name", ["bf16-mixed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bf16-true", "16-mixed", "tf32"))]
)
def test_precision_overlays_train_on_a_cpu_too(folder, capsys, name):
    before = torch.get_float32_matmul_precision()
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *overlay(f"precision/{name}"), "--run_dir", f"runs/{name}")
    torch.set_float32_matmul_precision(before)
    assert code == 0, err
    run(capsys, "fit", "--config", "tiny.yaml", "--run_dir", "runs/fp32")
    narrow, wide = (curve(Path("runs") / n, "train/loss") for n in (name, "fp32"))
    assert narrow == pytest.approx(wide, rel=2e-2)
    saved = yaml.safe_load(Path(f"runs/{name}/config.yaml").read_text())
    assert saved["trainer"]["precision"] == ("32-true" if name == "tf32" else name)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*overlay("strategy/tp"), "--trainer.devices", "3"], "needs 2 processes, but the run has 3"),
        ([*overlay("strategy/fsdp2-tp"), "--trainer.devices", "3"], "but the run has 3: use 2 or 4"),
        (
            [*overlay("strategy/tp"), "--trainer.devices", "2", "--model.n_head", "1"],
            "tensor_parallel=2 does not divide model.n_head = 1: use 1 (--trainer.strategy.tensor_parallel 1)",
        ),
        (
            [
                *overlay("strategy/tp"),
                *("--trainer.devices", "2", "--compute.compile", "true", "--compute.activation_checkpointing", "attention"),
            ],
            "compute.activation_checkpointing is attention, which torch cannot compile with tensor_parallel=2 (--compute.",
        ),
        (
            [
                *overlay("strategy/cp"),
                *("--trainer.devices", "2", "--trainer.strategy.context_attention", "heads", "--model.n_head", "1"),
            ],
            "context_attention is heads, but context=2 does not divide model.n_head = 1",
        ),
        (
            [
                "--trainer.strategy",
                '{"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}',
                "--trainer.devices",
                "2",
            ],
            "ModelParallelStrategy is not known to train one model on 2 processes",
        ),
        ([*overlay("strategy/fsdp2"), "--optimizer", "Adafactor"], "does not work on distributed parameters: AdamW"),
        (["--trainer.accelerator", "gpu"], "trainer.accelerator is gpu, and torch finds"),
        (["--compute.activation_checkpointing", "0"], "compute.activation_checkpointing is 0, but must be at least 1"),
        ([*overlay("strategy/fsdp2"), "--trainer.strategy.replicate", "0"], "replicate is 0, but must be at least 1"),
        (
            [*overlay("strategy/fsdp2"), "--trainer.devices", "3"],
            "global_batch_size 4 is not a multiple of 3 data-parallel ranks: use 3 or 6 (--data.",
        ),
        (
            [*overlay("strategy/pp"), "--trainer.devices", "2", "--trainer.strategy.reduce_each_micro_batch", "true"],
            "error: reduce_each_micro_batch is true, but a pipeline reduces gradients once a step: use auto or false "
            "(--trainer.strategy.reduce_each_micro_batch)",
        ),
        (
            [*overlay("strategy/pp"), "--trainer.devices", "2", "--trainer.strategy.stages_per_rank", "2"],
            "error: stages_per_rank is 2, but schedule 1f1b has 1 (--trainer.strategy.stages_per_rank 1",
        ),
        (
            [*overlay("strategy/fsdp2"), "--trainer.strategy.schedule", "zbv", "--trainer.strategy.context_attention", "heads"],
            "error: context_attention is heads, but --trainer.strategy.context is 1, so it changes nothing: use at least 2, or "
            "remove it (--trainer.strategy.context_attention gather)\n"
            "error: schedule is zbv, but --trainer.strategy.pipeline is 1, so it changes nothing: use at least 2, or "
            "remove it (--trainer.strategy.schedule 1f1b)\n",
        ),
    ],
)
def test_an_impossible_layout_is_refused_in_one_sentence(folder, no_gpu, capsys, flags, said):
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", *flags)
    assert code == 2 and said in err and "Traceback" not in err and "Given value" not in err, err
    assert all(line.startswith("error: ") for line in err.splitlines())
    assert not Path("runs").exists()


DEFAULT_SAVES = {  # devices, strategy, flags: in shards, in the background
    (1, "single"): (False, False),
    (2, "fsdp2"): (True, True),
    (1, "fsdp2"): (False, False),
    (2, "fsdp2", "--trainer.strategy.replicate", "2"): (False, False),
    (2, "tp", "--sharded_checkpoints", "false"): (False, True),
    (2, "tp", "--async_checkpoints", "false"): (True, False),
}


@pytest.mark.slow
def test_a_layout_that_splits_the_model_saves_in_shards_and_in_the_background_by_default(folder):
    for (devices, strategy, *flags), expected in DEFAULT_SAVES.items():
        words = ["--config", "tiny.yaml", *overlay(f"strategy/{strategy}"), "--trainer.devices", str(devices), *flags]
        chosen = build(decide(parse("fit", words))).trainer.strategy
        background = isinstance(chosen.checkpoint_io, AsyncFolderCheckpointIO)
        assert (getattr(chosen, "sharded_checkpoints", False), background) == expected, words


def test_sharded_checkpoints_without_a_mesh_warn(folder, capsys):
    with pytest.warns(match="sharded_checkpoints changes nothing here"):
        code, *_ = run(capsys, "fit", "--config", "tiny.yaml", "--sharded_checkpoints", "true", "--trainer.max_steps", "2")
    assert code == 0


def test_constructor_errors_are_printed_once_per_machine(folder, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    code, _, err = run(capsys, "fit", "--config", "tiny.yaml", "--model.n_head", "3")
    assert code == 2 and err == ""
