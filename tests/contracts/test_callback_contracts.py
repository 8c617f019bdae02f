"""What callbacks ask of others by name: lit_llm's own classes offer it, so that a renamed attribute is no silent loss."""

import ast
from types import SimpleNamespace

import pytest
from lightning.pytorch.plugins.precision import MixedPrecision
from private_names import ROOT

from lit_llm import callbacks
from lit_llm.callbacks import contracts
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO
from lit_llm.data import Mixture, TokenDataModule
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel

MODULE = {"step_loss", "step_count", "every_target_counts", "first_gradient_scale", "holds_all_logits", "flops_per_token"}
MODULE |= {"generate_text", "tokenizer", "context_length", "greedy_ids", "expert_counts", "expert_biases"}
DATA = {"micro_batch_tokens", "step_samples", "vocab_size", "train_tokens"}
OTHERS = {
    "source_names": lambda: Mixture,
    "pipeline_mesh": lambda: MeshStrategy(),
    "repeated_parameters": lambda: MeshStrategy(),
    "scaler": lambda: MixedPrecision("16-mixed", "cpu", scaler=SimpleNamespace()),
    "finished": lambda: AsyncFolderCheckpointIO,
    "latest_norm": lambda: callbacks.GradientNorm(),
    "latest_skip": lambda: callbacks.SpikeGuard(),
    "save_now": lambda: callbacks.StopOnSignal(),
    "stable_until": lambda: callbacks.WSD(),
    "on_validation_interrupted": lambda: callbacks.EMA,
}


def test_every_contract_has_somebody_who_meets_it():
    assert contracts.ASKED.keys() == MODULE | DATA | OTHERS.keys()
    module = LanguageModel(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, block_size=4))
    things = dict.fromkeys(MODULE, module) | dict.fromkeys(DATA, TokenDataModule)
    things |= {name: make() for name, make in OTHERS.items()}
    for name, thing in things.items():
        assert name in vars(thing).keys() | set(dir(thing if isinstance(thing, type) else type(thing))), (name, thing)


def test_callbacks_ask_for_nothing_else():
    asked = set()
    for file in (ROOT / "callbacks").glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "offered":
                asked |= {name.value for name in call.args[1:] if isinstance(name, ast.Constant)}
    assert asked and contracts.ASKED.keys() >= asked


@pytest.mark.parametrize(
    ("thing", "is_offered"),
    [
        (SimpleNamespace(step_loss=1.0, step_count=0), True),
        (SimpleNamespace(step_loss=1.0), False),
        (SimpleNamespace(step_loss=1.0, step_count=None), False),
        (None, False),
    ],
)
def test_a_contract_is_met_whole_or_not_at_all(thing, is_offered):
    assert (contracts.offered(thing, "step_loss", "step_count") is thing) is (is_offered or thing is None)
