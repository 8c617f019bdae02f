"""A run on several documents in a row against each document computed alone."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning import Trainer, seed_everything

from lit_llm.data import TokenShards
from lit_llm.ingest.shards import ShardWriter
from lit_llm.models.gpt import GPT, GPTConfig, KVCache
from lit_llm.training.language_model import LanguageModel

T, V = 24, 37


def fit(folder, **settings):
    """One step on every block, without a change, and a validation."""
    data = TokenShards(
        **{split: str(folder / f"{split}_*.bin") for split in ("train", "val")},
        **{"vocab_size": V, "block_size": T, "packing": "best_fit", **settings},
    )
    data.setup("fit")
    data.global_batch_size = len(data.blocks("train"))
    data.micro_batch_size = 1  # rows have unequal numbers of targets
    model = GPTConfig(2, 2, n_embd=16, block_size=T, zero_init_projections=False, mask_documents=True, position="learned")
    module = LanguageModel(model, partial(torch.optim.SGD, lr=0.0))
    trainer = Trainer(max_steps=1, log_every_n_steps=1, val_check_interval=data.global_batch_size, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                      num_sanity_val_steps=0)  # fmt: skip
    trainer.fit(module, datamodule=data)
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


def write(folder, split, texts, *, opened=False):
    with ShardWriter(folder, split, vocab_size=V, shard_tokens=50) as writer:
        for text in texts:
            writer.write(np.array([0, *text] if opened else [*text, 0]))
            writer.end_document()


@pytest.mark.parametrize("opened", [False, True], ids=["ends with an id", "begins with an id"])
def test_losses_are_those_of_every_document_alone(tmp_path, opened):
    seed_everything(0)
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, V, size).tolist() for size in rng.integers(1, T - 1, 40)]
    for split, some in (("train", texts), ("val", texts[3:5])):
        write(tmp_path, split, some, opened=opened)
    module, metrics = fit(tmp_path, **({"bos_id": 0} if opened else {"eos_id": 0}))
    model = module.model
    assert isinstance(model, GPT)

    def alone(texts, ids_of):
        with torch.no_grad():
            pairs = [(torch.tensor(ids_of(i, text))) for i, text in enumerate(texts)]
            sums = [F.cross_entropy(model(ids[None, :-1], documents=torch.zeros(1, len(ids) - 1))[0], ids[1:], reduction="sum")
                    for ids in pairs]  # fmt: skip
        return float(sum(sums)) / sum(len(ids) - 1 for ids in pairs)

    # The first document of a stream has no end before it.
    whole = alone(texts, lambda i, text: [0, *text] if opened else ([0] * (i > 0) + [*text, 0]))
    assert metrics["train/loss"] == pytest.approx(whole, rel=1e-5)
    if not opened:  # validation reads two documents, of 6 and 7 ids and an end, as one block
        held_out = alone(texts[3:5], lambda i, text: [0] * (i > 0) + [*text, 0])
        assert metrics["val/loss"] == pytest.approx(held_out, rel=1e-5)


@pytest.mark.parametrize("known", ["best_fit", "concatenate", "by their ids"])
def test_a_prompt_is_computed_as_that_document_was_in_training(tmp_path, known):
    """Generation has a cache, in which there are no document numbers."""
    seed_everything(1)
    rng = np.random.default_rng(1)
    texts = [rng.permutation(np.arange(1, V))[: rng.integers(3, T // 3)].tolist() for _ in range(12)]
    for split in ("train", "val"):
        write(tmp_path, split, texts)
    if known == "by their ids":
        for file in tmp_path.glob("*.docs"):
            file.unlink()
    module, _ = fit(tmp_path, eos_id=0, packing="best_fit" if known == "best_fit" else "concatenate")
    model = module.model.eval()
    blocks, found = module.trainer.datamodule.blocks("train"), 0
    batch = blocks[np.arange(len(blocks))]
    assert ("documents" in batch) == (known != "by their ids")
    rows = model(batch["input_ids"], **({"documents": batch["documents"]} if "documents" in batch else {}))
    for ids, logits in zip(batch["input_ids"].tolist(), rows, strict=True):
        for text in texts:
            prompt = [*module.prompt_start, *text]
            at = next((at for at in range(T) if ids[at : at + len(prompt)] == prompt), None)
            if at is not None:
                alone = model(torch.tensor([prompt]), cache=KVCache(model.config))[0]
                torch.testing.assert_close(logits[at : at + len(prompt)], alone, rtol=1e-5, atol=1e-5)
                found += at > 0
    assert found >= 4 and module.prompt_start == [0]
