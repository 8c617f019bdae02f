"""Files of a run, of shards, of an import and of a text that are cut, lost or foreign: each command names them, or goes on."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from recipe_runs import TEXT, run

RECIPE = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
data:
  class_path: TokenShards
  init_args: {train: shards/train_*.bin, val: shards/val_*.bin, micro_batch_size: 2, global_batch_size: 4}
schedule: {class_path: Cosine, init_args: {warmup_steps: 1}}
validation: {every_n_steps: 2}
checkpoint: {every_n_steps: 2}
trainer: {max_steps: 4, log_every_n_steps: 1, accelerator: cpu, limit_val_batches: 1}
"""
FIT = "fit --config recipe.yaml --run_dir run"
MADE = (
    "prepare --data TextFiles --data.paths texts --data.tokenizer Bytes --out shards",
    FIT,
    "export --run run --out hf",
    "fit --config recipe.yaml --run_dir tuned --init_from run --lora.rank 2",
    "export --run tuned --out adapter --adapter true",
)
RESUME = "fit --run run --resume auto --trainer.max_steps 6"
GENERATE = "generate --run run --prompt a --max_new_tokens 2"
IMPORT = "import --from hf --out new"
ADAPTER = "import --from adapter --init_from run --out new"
PREPARE = "prepare --data TextFiles --data.paths texts --data.tokenizer Bytes --out new"
NEW = "fit --config recipe.yaml --run_dir new"
NEWEST = "run/checkpoints/step-00000004.ckpt"


class Case(NamedTuple):
    """A damaged file, the command that meets it, its exit code, and a word of what it says."""

    file: str
    damage: Callable[[Path], object]
    command: str
    code: int
    word: str


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def text(content: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def entries(**changes: object) -> Callable[[Path], object]:
    """Change entries of a JSON object."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def appended(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes() + content)


CASES = [
    # a run
    Case(f"{NEWEST}/checkpoint.pt", half, RESUME, 0, "is damaged"),
    Case(f"{NEWEST}/checkpoint.pt", last_bit, RESUME, 0, "is damaged"),
    Case(f"{NEWEST}/checkpoint.pt", half, GENERATE, 2, "last.ckpt cannot be loaded"),
    Case(f"{NEWEST}/checkpoint.pt", Path.unlink, GENERATE, 2, "checkpoint.pt"),
    Case(f"{NEWEST}/manifest.json", empty, RESUME, 0, "is damaged"),
    Case(f"{NEWEST}/manifest.json", Path.unlink, GENERATE, 2, "manifest.json"),
    Case("run/config.yaml", half, RESUME, 2, "config.yaml"),
    Case("run/config.yaml", Path.unlink, "validate --run run", 2, "config.yaml"),
    Case("run/config.yaml", appended(b"model: {n_layer: 2}\n"), RESUME, 2, "line"),
    Case("run/tokenizer.json", half, GENERATE, 2, "tokenizer"),
    Case("run/tokenizer.json", Path.unlink, GENERATE, 2, "tokenizer"),
    Case("run/metrics.jsonl", half, "report --run run --out new.html", 0, "metrics.jsonl"),
    Case("run/metrics.jsonl", text(b"\xff\n"), "doctor --run run", 1, "metrics.jsonl"),
    Case("run/lock.json", text("{"), RESUME, 0, "step 6/6"),
    Case("run/checkpoints/last.ckpt", Path.unlink, RESUME, 0, "step 6/6"),
    # shards
    Case("shards/train_000000.bin", half, NEW, 2, "train_000000.bin"),
    Case("shards/train_000000.bin", empty, NEW, 2, "shards/train_*.bin"),
    Case("shards/train_000000.bin", last_bit, RESUME, 2, "train_000000.bin"),
    Case("shards/train_000000.docs", half, NEW, 2, "train_000000.docs"),
    Case("shards/meta.json", half, NEW, 2, "meta.json"),
    Case("shards/meta.json", entries(vocab_size=100), NEW, 2, "vocab"),
    Case("shards/tokenizer.json", half, NEW, 2, "tokenizer"),
    # an import
    Case("hf/model.safetensors", half, IMPORT, 2, "model.safetensors"),
    Case("hf/model.safetensors", text("version https://git-lfs.github.com/spec/v1\n"), IMPORT, 2, "model.safetensors"),
    Case("hf/model.safetensors", Path.unlink, IMPORT, 2, "hf"),
    Case("hf/config.json", half, IMPORT, 2, "config.json"),
    Case("hf/config.json", entries(num_hidden_layers="two"), IMPORT, 2, "layer"),
    Case("hf/config.json", entries(model_type="unheard"), IMPORT, 2, "unheard"),
    Case("hf/tokenizer.json", half, IMPORT, 2, "tokenizer.json"),
    Case("adapter/adapter_config.json", half, ADAPTER, 2, "adapter_config.json"),
    Case("adapter/adapter_model.safetensors", half, ADAPTER, 2, "adapter_model.safetensors"),
    # a text
    Case("texts/b.jsonl", appended(b'{"text": "cut'), PREPARE, 2, "b.jsonl"),
    Case("texts/c.jsonl.gz", text(b"\x1f\x8b\x08\0cut"), PREPARE, 2, "c.jsonl.gz"),
    # a recipe
    Case("recipe.yaml", half, NEW, 2, "recipe.yaml"),
    Case("recipe.yaml", text(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode()), NEW, 0, "step 4/4"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run, an adapter, shards, a text and an import, as the commands write them."""
    world, home = tmp_path_factory.mktemp("world"), os.getcwd()
    os.chdir(world)
    from lit_llm.__main__ import main

    for name, content in {
        "recipe.yaml": RECIPE,
        "texts/a.txt": TEXT,
        "texts/b.jsonl": '{"text": "one document of it"}\n' * 3,
    }.items():
        (world / name).parent.mkdir(exist_ok=True)
        (world / name).write_text(content)
    assert [main(words.split()) for words in MADE] == [0] * len(MADE)
    os.chdir(home)
    return world


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"
    }


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.command == GENERATE else pytest.mark.slow) for case in CASES],
    ids=lambda case: f"{case.file.rpartition('/')[2]}-{getattr(case.damage, '__name__', '')}-{case.command.split()[0]}",
)
def test_a_damaged_file_is_named_and_no_other_changes(case, world, tmp_path, monkeypatch, capsys):
    shutil.copytree(world, tmp_path / "world", symlinks=True)
    monkeypatch.chdir(tmp_path / "world")
    monkeypatch.setenv("LIT_LLM_CACHE", str(tmp_path / "cache"))
    case.damage(Path(case.file))
    before = contents(Path.cwd())
    code, out, err = run(capsys, *case.command.split())
    assert code == case.code and case.word in out + err and "Traceback" not in err, out + err
    if code == 2:
        assert err.count("error: ") == 1 and contents(Path.cwd()) == before
