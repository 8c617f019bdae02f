"""What callbacks ask of others by name: lit_llm's own classes offer it, so that a renamed attribute is no silent loss."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import pytest
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_llm import callbacks
from lit_llm.callbacks import contracts
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO
from lit_llm.data import Mixture, TokenDataModule
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel

MODULE = {"SaysStepLoss", "ScoresText", "CountsExperts"}
MODULE |= {"every_target_counts", "first_gradient_scale", "holds_all_logits", "flops_per_token", "generate_text", "greedy_ids"}
DATA = {"micro_batch_tokens", "step_samples", "vocab_size", "train_tokens"}
OTHERS = {
    "source_names": lambda: Mixture,
    "SplitsLayers": lambda: MeshStrategy(),
    "scaler": lambda: MixedPrecision("16-mixed", "cpu", scaler=SimpleNamespace()),
    "finished": lambda: AsyncFolderCheckpointIO,
    "latest_norm": lambda: callbacks.GradientNorm(),
    "latest_skip": lambda: callbacks.SpikeGuard(),
    "save_now": lambda: callbacks.StopOnSignal(),
    "stable_until": lambda: callbacks.WSD(),
    "on_validation_interrupted": lambda: callbacks.EMA,
}


def named(contract):
    """The attributes of a protocol; an attribute of the list itself."""
    protocol = getattr(contracts, contract, None)
    if protocol is None:
        return [contract]
    return [name for name in (*getattr(protocol, "__annotations__", {}), *vars(protocol)) if not name.startswith("_")]


def test_every_contract_has_somebody_who_meets_it():
    theirs = {name for name, thing in vars(contracts).items() if Protocol in getattr(thing, "__bases__", ())}
    theirs |= set(re.findall(r"^    (\w+)[:(]", contracts.__doc__, re.MULTILINE))
    assert theirs == MODULE | DATA | OTHERS.keys()
    module = LanguageModel(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, block_size=4))
    things = dict.fromkeys(MODULE, module) | dict.fromkeys(DATA, TokenDataModule)
    things |= {name: make() for name, make in OTHERS.items()}
    for contract, thing in things.items():
        names = named(contract)
        held = vars(thing).keys() | set(dir(thing if isinstance(thing, type) else type(thing)))
        assert names and held.issuperset(names), (contract, set(names) - held)


def test_what_is_read_is_in_the_list():
    files = Path(contracts.__file__).parent.glob("*.py")
    read = {name for file in files for name in re.findall(r"\battribute(?:_of_data)?\([^()]*?\"(\w+)\"", file.read_text())}
    listed = set(re.findall(r"^    (\w+)[:(]", contracts.__doc__, re.MULTILINE))
    assert read == listed - {"greedy_ids"}  # asked for by name when a task generates


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
    assert (contracts.offered(thing, contracts.SaysStepLoss) is thing) is (is_offered or thing is None)


def test_an_attribute_that_is_none_or_of_no_data_module_is_missing():
    trainer = SimpleNamespace(datamodule=SimpleNamespace(vocab_size=0, train_tokens=None))
    found = [contracts.attribute_of_data(trainer, name) for name in ("vocab_size", "train_tokens", "source_names")]
    assert found == [0, None, None] and contracts.attribute_of_data(SimpleNamespace(), "vocab_size") is None
    assert contracts.attribute(SimpleNamespace(save_now=None), "save_now", True) is True
