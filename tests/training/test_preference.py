"""The losses of preferences: against the formulas in float64, finite differences, and trl."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lit_llm.models.config import GPTConfig
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.loss import LossConfig, cross_entropy, token_nll
from lit_llm.training.preference import Preference

KINDS = pytest.mark.parametrize(
    "settings",
    [
        {"loss": "dpo", "beta": 0.3},
        {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.1},
        {"loss": "ipo", "beta": 0.2},
        {"loss": "simpo", "beta": 2.0, "gamma": 0.5},
    ],
    ids=lambda settings: settings["loss"] + "-smooth" * ("label_smoothing" in settings),
)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, of 2 pairs and of 1: (2, 14) with padding, width 5, 11 ids of 16 rows."""
    draw = torch.Generator().manual_seed(seed)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 14, 14], [0, 0, 0, 0, 1, 1, 1] + [14] * 7])
    targets = torch.randint(11, (2, 14), generator=draw)
    targets[:, ::3] = -100  # every document keeps some
    targets[documents == 14] = -100
    return {
        "hidden": torch.randn(2, 14, 5, generator=draw, dtype=torch.float64),
        "weight": torch.randn(16, 5, generator=draw, dtype=torch.float64),
        "targets": targets,
        "documents": documents,
        "reference": torch.randn(2, 4, generator=draw, dtype=torch.float64) - 5,
    }


def sums_of(objective: Preference, given: dict[str, torch.Tensor], chunk_size: int | None = None):
    rest = {name: given[name] for name in ("documents", "reference")}
    head = {"vocab_size": 11, "softcap": 4.0, "shards": None}
    return objective.sums(given["hidden"], given["weight"], given["targets"], slots=4, chunk_size=chunk_size, **rest, **head)


def document_sums(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(2, 4): log-probabilities by plain log_softmax, and numbers of targets."""
    z = 4 * torch.tanh(given["hidden"] @ given["weight"][:11].T / 4)
    logp = torch.stack([torch.zeros(4, dtype=torch.float64)] * 2)
    tokens = torch.zeros(2, 4)
    table = [[z.new_zeros(()) for _ in range(4)] for _ in range(2)]
    for row in range(2):
        for t in range(14):
            document, target = int(given["documents"][row, t]), int(given["targets"][row, t])
            if document < 4 and target >= 0:
                table[row][document] = table[row][document] + F.log_softmax(z[row, t], dim=-1)[target]
                tokens[row, document] += 1
    logp = torch.stack([torch.stack(row) for row in table])
    return logp, tokens


def formula(settings: dict, logp: np.ndarray, tokens: np.ndarray, reference: np.ndarray) -> float:
    """The sum over pairs, as the papers write it."""
    total, beta = 0.0, settings["beta"]
    for row, pair in ((0, 0), (0, 1), (1, 0)):
        w, l = (row, 2 * pair), (row, 2 * pair + 1)  # noqa: E741 - the papers' letters
        ratio = (logp[w] - reference[w]) - (logp[l] - reference[l])
        if settings["loss"] == "dpo":
            e = settings.get("label_smoothing", 0.0)
            total += (1 - e) * math.log1p(math.exp(-beta * ratio)) + e * math.log1p(math.exp(beta * ratio))
        elif settings["loss"] == "ipo":
            h = (logp[w] - reference[w]) / tokens[w] - (logp[l] - reference[l]) / tokens[l]
            total += (h - 1 / (2 * beta)) ** 2
        else:
            h = beta * (logp[w] / tokens[w] - logp[l] / tokens[l]) - settings["gamma"]
            total += math.log1p(math.exp(-h))
    return total


@KINDS
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_loss_and_gradients_follow_the_formulas(settings, chunk_size):
    given, objective = batch(), Preference(**settings)
    for name in ("hidden", "weight"):
        given[name].requires_grad_()
    if settings["loss"] == "simpo":
        given["reference"] = None
    sums = sums_of(objective, given, chunk_size)
    (2.5 * sums.loss).backward()  # the recomputed gradient is scaled by what comes from above
    found = [given[name].grad.clone() for name in ("hidden", "weight")]
    logp, tokens = document_sums(given)
    reference = batch()["reference"]
    expected = formula(settings, logp.detach().numpy(), tokens.numpy(), reference.numpy())
    assert sums.loss.item() == pytest.approx(expected, rel=1e-12) and sums.nll == sums.loss and sums.count == 3
    torch.testing.assert_close(sums.documents, torch.where(tokens > 0, logp, 0).detach(), rtol=1e-12, atol=1e-12)
    for name, gradient in zip(("hidden", "weight"), found, strict=True):  # finite differences of the formula
        flat = given[name].detach().view(-1)
        for place in range(0, flat.numel(), 7):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    flat[place] += step
                    values.append(formula(settings, *(t.detach().numpy() for t in document_sums(given)), reference.numpy()))
                    flat[place] -= step
            assert gradient.view(-1)[place].item() == pytest.approx(2.5 * (values[0] - values[1]) / 2e-5, rel=1e-6, abs=1e-8)


def test_the_metrics_are_means_over_pairs():
    given, objective = batch(), Preference(beta=0.3)
    sums = sums_of(objective, given)
    logp, tokens = document_sums(given)
    ratio = (logp - given["reference"]) * (tokens > 0)
    chosen, rejected = ratio[[0, 0, 1], [0, 2, 0]], ratio[[0, 0, 1], [1, 3, 1]]
    expected = {
        "reward_chosen": 0.3 * chosen.mean(),
        "reward_rejected": 0.3 * rejected.mean(),
        "margin": 0.3 * (chosen - rejected).mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "logp_chosen": logp[[0, 0, 1], [0, 2, 0]].mean(),
        "logp_rejected": logp[[0, 0, 1], [1, 3, 1]].mean(),
        "kl": -ratio.sum() / tokens.sum(),
    }
    names = objective.means(GPTConfig())
    found = {name: (a / b).item() for name, (a, b) in zip(names, sums.means, strict=True)}
    assert found == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-12)
    given["reference"] = sums.documents
    again = sums_of(objective, given)
    assert (again.loss / again.count).item() == pytest.approx(math.log(2), rel=1e-12)
    assert dict(zip(names, (again.means[:, 0] / again.means[:, 1]).tolist(), strict=True))["accuracy"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nll_of_tokens_is_that_of_cross_entropy_with_its_gradients(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 7, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    targets = torch.randint(30, (3, 7)).masked_fill(torch.rand(3, 7) < 0.3, -100)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        each = token_nll(hidden, weight, targets, vocab_size=30, chunk_size=4)
        each.sum().backward()
        found = [hidden.grad, weight.grad]
        hidden.grad = weight.grad = None
        sums = cross_entropy(hidden, weight, targets, vocab_size=30)
        sums.loss.backward()
    close = partial(torch.testing.assert_close, **({"rtol": 0.02, "atol": 0.02} if dtype != torch.float32 else {}))
    close(each.sum(), sums.loss)
    assert torch.equal(each == 0, targets == -100) and each.dtype == torch.float32
    for ours, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        close(ours, theirs)


@KINDS
def test_trl_has_the_same_losses_and_gradients(settings):
    """The loss functions of trl, called with log-probabilities of a float64 model."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    given = batch(3)
    logp, tokens = document_sums(given)
    logp = logp.detach().requires_grad_()
    pairs = [(0, 0), (0, 1), (1, 0)]
    objective = Preference(**settings)
    reference = None if settings["loss"] == "simpo" else given["reference"]
    ours = objective.of_documents(logp, tokens, reference)
    (ours.loss / ours.count).backward()
    theirs = logp.detach().clone().requires_grad_()
    if settings["loss"] == "simpo":
        cpo = pytest.importorskip("trl.experimental.cpo").CPOTrainer
        scores = [torch.stack([theirs[row, 2 * pair + i] / tokens[row, 2 * pair + i] for row, pair in pairs]) for i in (0, 1)]
        fake = SimpleNamespace(
            **{"loss_type": "simpo", "beta": settings["beta"], "simpo_gamma": settings["gamma"], "label_smoothing": 0.0},
            **{"alpha": 0.0, "accelerator": SimpleNamespace(device="cpu")},
        )
        loss = cpo.cpo_loss(fake, *scores)[0].mean()
    else:
        # Of one pair, trl's aot with label smoothing is conservative DPO.
        kind = {"dpo": "aot" if "label_smoothing" in settings else "sigmoid", "ipo": "ipo"}[settings["loss"]]
        losses = [_loss_of_trl(trainer, kind, settings, theirs, tokens, reference, *pair) for pair in pairs]
        loss = torch.stack(losses).mean()
    loss.backward()
    assert abs((ours.loss / ours.count - loss).item()) <= 1e-10
    assert (logp.grad - theirs.grad).abs().max() <= 1e-10


def _loss_of_trl(trainer, kind, settings, logp, tokens, reference, row, pair):
    """trl's loss of one pair: a batch of two sequences, whose log-probabilities are spread over their tokens."""
    length = int(tokens.max())
    chosen, rejected = 2 * pair, 2 * pair + 1
    mask = torch.zeros(2, length + 1, dtype=torch.long)
    each = []
    for i, document in enumerate((chosen, rejected)):
        n = int(tokens[row, document])
        mask[i, 1 : n + 1] = 1
        each.append(F.pad((logp[row, document] / n).expand(n), (0, length - n)))
    values = torch.stack(each)
    nothing = torch.zeros_like(values)
    outputs = SimpleNamespace(log_probs=values, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    gather = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)
    fake = SimpleNamespace(
        **{"model": SimpleNamespace(training=True), "accelerator": gather, "ld_alpha": None, "precompute_ref_logps": True},
        **{"aux_loss_enabled": False, "f_divergence_type": "reverse_kl", "loss_types": [kind], "loss_weights": [1.0]},
        **{"beta": settings["beta"], "label_smoothing": settings.get("label_smoothing", 0.0), "use_weighting": False},
        **{"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1},
    )
    inputs = {
        **{"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask},
        **{"ref_chosen_logps": reference[row, chosen][None], "ref_rejected_logps": reference[row, rejected][None]},
    }
    return trainer._compute_loss(fake, lambda **_: outputs, inputs, False)


def test_what_has_no_meaning_is_refused():
    parts = {"model": GPTConfig(mask_documents=True), "loss": LossConfig()}
    assert Preference().problems(parts) == []
    wrong = {
        "--objective.beta": Preference(beta=0.0),
        "--objective.loss": Preference(loss="kto"),  # type: ignore[arg-type]
        "--objective.label_smoothing": Preference(loss="ipo", label_smoothing=0.1),
        "--objective.gamma": Preference(gamma=0.3),
    }
    for flag, objective in wrong.items():
        found = objective.problems(parts)
        assert len(found) == 1 and flag.removeprefix("--") in found[0]
    refused = {
        "--model.mask_documents true": {"model": GPTConfig()},
        "--model.predict_ahead 0": {"model": GPTConfig(mask_documents=True, predict_ahead=1)},
        "--loss.z_loss 0": {"loss": LossConfig(z_loss=0.1)},
        "--model.moe.balance 0": {"model": GPTConfig(mask_documents=True, moe=MoEConfig(experts=4, top_k=2, balance=0.1))},
    }
    for flag, part in refused.items():
        assert [flag in problem for problem in Preference().problems(parts | part)] == [True]
