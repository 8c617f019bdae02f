"""How many graphs a compiled run makes: each takes seconds to minutes on a GPU."""

import re
from functools import partial

import pytest
import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lit_llm.callbacks import BatchRamp
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.models.generation import generate
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel

LENGTH, MICRO_BATCH = 16, 4


class Rows(LightningDataModule):
    micro_batch_tokens = MICRO_BATCH * LENGTH
    every_target_counts = True
    vocab_size = 32

    def _loader(self, rows):
        ids = torch.randint(0, 32, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": row[:-1], "targets": row[1:]} for row in ids], batch_size=MICRO_BATCH)

    def train_dataloader(self):
        return self._loader(MICRO_BATCH * 7)

    def val_dataloader(self):
        return self._loader(MICRO_BATCH * 2 + 3)


class Generates(Callback):
    def on_validation_end(self, trainer, pl_module):
        self.text = list(generate(pl_module.model, [1, 2, 3], max_new_tokens=LENGTH + 4))  # beyond the context


@pytest.fixture
def graphs(monkeypatch):
    """The compiled graphs; a break within a block is an error. The backend runs a graph as it is: no compiler is needed."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    monkeypatch.setattr("lit_llm.distributed.block_kernels.no_compiler", lambda device: None)
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("model", "mode", "kinds"),
    [
        (
            {
                **{"window": 4, "mask_documents": True, "eos_id": 3, "dropout": 0.1, "n_kv_head": 1, "qkv_convolution": 3},
                **{"input_convolution": 4, "exclusive_attention": True},
            },
            *("none", 1),
        ),
        pytest.param(
            {"layers": {"window": [4, None]}, "attention_sinks": True, "attention_softcap": 5.0},
            *("none", 2),
            marks=pytest.mark.slow,
        ),
        pytest.param({"window": 4}, "cheap", 1, marks=pytest.mark.slow),
        pytest.param({"layers": {"rope": [True, False]}}, "full", 2, marks=pytest.mark.slow),
    ],
    ids=["window, documents, dropout, convolution", "two kinds of layers", "cheap", "full"],
)
def test_a_kind_of_layer_is_compiled_once_for_training_and_once_for_validation(model, mode, kinds, graphs, capsys):
    """In a run with a batch ramp, validations with a smaller last batch, and generation."""
    config = GPTConfig(**{"n_layer": 4, "n_head": 2, "n_embd": 16, "block_size": LENGTH, "vocab_size": 32, **model})
    compute = ComputeConfig(compile=True, activation_checkpointing=mode)
    module = LanguageModel(config, partial(torch.optim.SGD, lr=0.1), compute=compute)
    generates, tokens = Generates(), Rows.micro_batch_tokens
    trainer = Trainer(
        max_steps=4,
        val_check_interval=2,
        callbacks=[generates, BatchRamp([[0, tokens], [tokens, 2 * tokens]])],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Rows())
    assert trainer.global_step == 4 and len(generates.text) == LENGTH + 4
    assert len(graphs) == 2 * kinds
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compile: ")]
    assert len(said) == 1 and re.fullmatch(r"compile: \d+\.\d s for the first micro-batch \(--compute.compile\)", said[0])
