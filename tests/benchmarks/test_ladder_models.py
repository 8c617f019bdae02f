"""The models of the ladder's techniques: no position sees a later one, and held-out losses leave out padding."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.loss import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import ladder_model

sys.path.pop(0)


def test_every_technique_is_causal_and_its_loss_leaves_out_padding():
    for technique in ladder_model.TECHNIQUES:
        torch.manual_seed(0)
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 20}
        model = GPT(GPTConfig(**{**shape, **technique.settings(16)}))
        model = technique.model(model) if technique.model else model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.double().eval()
        ids, targets = torch.randint(20, (2, 12)), torch.randint(20, (2, 12))
        targets[1, 9:] = -100
        later = ids.clone()
        later[:, 7:] = (later[:, 7:] + 3) % 20
        with torch.no_grad():
            logits, others = model(ids), model(later)
            sums = model(ids, targets, loss=cross_entropy)
        # Not bit for bit: how many rows an expert has changes the rounding.
        torch.testing.assert_close(logits[:, :7], others[:, :7], rtol=1e-12, atol=1e-12, msg=technique.name)
        assert (logits[:, 7] - others[:, 7]).abs().max() > 1e-6, technique.name
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(sums.nll, expected, msg=technique.name)
        assert int(sums.count) == 21, technique.name
