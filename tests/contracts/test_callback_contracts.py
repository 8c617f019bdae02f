"""What callbacks ask of others by name: lit_llm's own classes offer it, so that a renamed attribute is no silent loss."""

from types import SimpleNamespace
from typing import Protocol

import pytest
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_llm import callbacks
from lit_llm.callbacks import contracts
from lit_llm.checkpoint.io import AsyncFolderCheckpointIO
from lit_llm.data import TokenDataModule
from lit_llm.distributed.mesh_strategy import MeshStrategy
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel

MODULE = {"SaysStepLoss", "SaysWhetherTargetsCount", "ScalesFirstGradient", "HoldsAllLogits", "SaysFlops", "WritesText"}
MODULE |= {"ScoresText", "ContinuesText", "CountsExperts"}
DATA = {"HasMicroBatches", "NumbersSamples", "TellsOfText"}
OTHERS = {
    "SplitsLayers": lambda: MeshStrategy(),
    "ScalesLoss": lambda: MixedPrecision("16-mixed", "cpu", scaler=SimpleNamespace()),
    "SavesInBackground": lambda: AsyncFolderCheckpointIO,
    "KnowsNorm": lambda: callbacks.GradientNorm(),
    "KnowsSkip": lambda: callbacks.SpikeGuard(),
    "AsksToSave": lambda: callbacks.StopOnSignal(),
    "KnowsStableStep": lambda: callbacks.WSD(),
    "KnowsScores": lambda: callbacks.TaskScores(["quiz.jsonl"]),
    "HearsOfInterruption": lambda: callbacks.EMA,
}


def named(protocol):
    return [name for name in (*getattr(protocol, "__annotations__", {}), *vars(protocol)) if not name.startswith("_")]


def test_every_contract_has_somebody_who_meets_it():
    theirs = {name for name, thing in vars(contracts).items() if Protocol in getattr(thing, "__bases__", ())}
    assert theirs == MODULE | DATA | OTHERS.keys()
    module = LanguageModel(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, block_size=4))
    things = dict.fromkeys(MODULE, module) | dict.fromkeys(DATA, TokenDataModule)
    things |= {name: make() for name, make in OTHERS.items()}
    for contract, thing in things.items():
        names = named(getattr(contracts, contract))
        held = vars(thing).keys() | set(dir(thing if isinstance(thing, type) else type(thing)))
        assert names and held.issuperset(names), (contract, set(names) - held)


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
    trainer = SimpleNamespace(datamodule=thing)
    assert (contracts.offered_by_data(trainer, contracts.SaysStepLoss) is not None) is is_offered
    assert contracts.offered_by_data(SimpleNamespace(), contracts.SaysStepLoss) is None
