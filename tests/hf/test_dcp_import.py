"""Weights of torchtitan, of Lightning's strategies and of other programs, from folders of torch.distributed.checkpoint."""

from dataclasses import asdict

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import theirs
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from lit_llm.__main__ import main
from lit_llm.checkpoint.disk_format import read
from lit_llm.models.gpt import GPT, GPTConfig

TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def titan(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor of transformers' Llama as torchtitan has it: rows 2i and 2i + 1 of a head are rows i and i + half of theirs."""
    for module, other in TITAN.items():
        name = name.replace(f"{module}.weight", f"{other}.weight")
    if name.endswith(("wq.weight", "wk.weight")):
        heads, turned = (4 if "wq" in name else 2), torch.empty_like(weight)
        size = len(weight) // heads
        for head in range(heads):
            for i in range(size // 2):
                turned[head * size + 2 * i] = weight[head * size + i]
                turned[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
        weight = turned
    return name.removeprefix("model."), weight


def weights(run):
    return read(run / "checkpoints/last.ckpt")["state_dict"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def llama(tmp_path):
    """(state_dict of transformers, its folder, our weights from it)"""
    model = theirs("llama")
    model.save_pretrained(tmp_path / "hf")
    assert main(["import", "--from", str(tmp_path / "hf"), "--out", str(tmp_path / "expected")]) == 0
    return model.state_dict(), tmp_path / "hf", weights(tmp_path / "expected")


def run(*words) -> int:
    return main([str(word) for word in words])


def test_torchtitans_llama_and_any_names_of_transformers_become_the_same_weights(llama, tmp_path, capsys):
    state, hf, expected = llama
    titans = dict(titan(name, weight) for name, weight in state.items())
    layouts = {
        "torchtitan": titans | {"optimizer.lr": 0.1, "train_state": {"step": 3}},
        "torchtitan, older": {"model": titans},
        "fsdp": {"model": {f"model.{name}": weight for name, weight in state.items()}, "optimizer_0": {"a": torch.ones(2)}},
        "plain": dict(state),
    }
    for layout, content in layouts.items():
        dcp.save(content, checkpoint_id=tmp_path / layout, no_dist=True)
        assert run("import", "--from", tmp_path / layout, "--config_from", hf, "--out", tmp_path / f"run {layout}") == 0, layout
        assert same(weights(tmp_path / f"run {layout}"), expected), layout
    capsys.readouterr()
    assert run("import", "--from", tmp_path / "plain", "--out", tmp_path / "x") == 2
    assert "--config_from" in capsys.readouterr().err
    assert run("import", "--from", hf, "--config_from", hf, "--out", tmp_path / "x") == 2
    assert "leave out --config_from" in capsys.readouterr().err
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    assert run("import", "--from", tmp_path / "foreign", "--config_from", hf, "--out", tmp_path / "x") == 2
    assert "nor those of torchtitan's Llama: its tensors are a" in capsys.readouterr().err
    more = titans | {"layers.0.attention.q_norm.weight": torch.ones(8)}
    dcp.save(more, checkpoint_id=tmp_path / "more", no_dist=True)
    assert run("import", "--from", tmp_path / "more", "--config_from", hf, "--out", tmp_path / "x") == 2
    assert "layers.0.attention.q_norm.weight" in capsys.readouterr().err
    assert run("fit", "--init_from", tmp_path / "plain") == 2
    assert "python -m lit_llm import --from" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_what_export_writes_for_dcp_is_imported_with_its_settings(llama, tmp_path, capsys):
    _, _, expected = llama
    out = tmp_path / "dcp"
    assert run("export", "--run", tmp_path / "expected", "--format", "dcp", "--out", out) == 0
    target = {"state_dict": {name: torch.zeros_like(weight) for name, weight in expected.items()}, "global_step": -1}
    dcp.load(target, checkpoint_id=out, no_dist=True)  # torch's own
    assert same(target["state_dict"], expected) and target["global_step"] == 0
    assert run("import", "--from", out, "--out", tmp_path / "again") == 0
    assert same(weights(tmp_path / "again"), expected)
    found, before = (read(tmp_path / name / "checkpoints/last.ckpt")["model_config"] for name in ("again", "expected"))
    assert found == before
    capsys.readouterr()
    assert run("export", "--run", tmp_path / "expected", "--format", "dcp", "--dtype", "float16", "--out", tmp_path / "x") == 2
    assert "leave out --dtype" in capsys.readouterr().err


class Module(pl.LightningModule):
    """A GPT in a LightningModule of someone else, which saves its settings."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.model = config, None

    def configure_model(self):
        self.model = self.model or GPT(self.config)

    def training_step(self, batch, _):
        return self.model(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["model_config"] = asdict(self.config)


@pytest.mark.slow
def test_a_distributed_checkpoint_of_lightnings_own_strategy_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = Module(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=11))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = ModelParallelStrategy(save_distributed_checkpoint=True)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **quiet)
    trainer.fit(module, DataLoader(torch.randint(11, (2, 8))))
    trainer.save_checkpoint(tmp_path / "lightning")
    assert (tmp_path / "lightning/meta.pt").is_file()
    assert run("import", "--from", tmp_path / "lightning", "--out", tmp_path / "run") == 0
    assert same(weights(tmp_path / "run"), {f"model.{name}": weight for name, weight in module.model.state_dict().items()})
