"""Signals of a run's health, against values computed independently, on a model of another project."""

import copy
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from foreign import Foreign, fit
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_llm.callbacks import GradientNorm, HealthSignals
from lit_llm.callbacks._lightning import write_row
from lit_llm.callbacks.health import OF_LAYERS, row_number
from lit_llm.callbacks.health_layers import SAMPLED, UpdateSample, find_blocks, layers_of
from lit_llm.callbacks.health_readings import Readings
from lit_llm.callbacks.health_setup import setup_facts

V, T, B, D, RATE = 13, 8, 8, 6, 0.5
DOCS = Path(__file__).parents[2] / "docs/reference/health.md"


LEAKS = {  # by the places of a query and of a key
    "all": lambda q, k: k >= 0,
    "the last token": lambda q, k: (k == T - 1) & (q >= 0),
    "the token two places on": lambda q, k: k == q + 2,
    "within the first quarter": lambda q, k: (q < T // 4) & (k < T // 4),
    "the next token, at every third place": lambda q, k: (q % 3 == 0) & (k == q + 1),
}


class Mixer(nn.Module):
    """Causal attention of one head, which reports its queries and keys. With `leaks`, positions see some later ones."""

    def __init__(self, leaks):
        super().__init__()
        self.project = nn.Linear(D, 3 * D)
        self.leaks, self.score_probe = leaks, None

    def forward(self, x):
        q, k, v = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        if self.score_probe is not None:
            self.score_probe(q, k)
        places = torch.arange(x.size(1))
        seen = places[:, None] >= places
        if self.leaks:
            seen = seen | LEAKS[self.leaks](places[:, None], places)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]


class Layer(nn.Module):
    def __init__(self, leaks):
        super().__init__()
        self.attention, self.mlp = Mixer(leaks), nn.Sequential(nn.Linear(D, 10), nn.ReLU(), nn.Linear(10, D))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.drop(self.mlp(x))


class Small(LightningModule):
    """A language model without anything of lit_llm."""

    def __init__(self, batches, leaks="", dead=4):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.ModuleDict({"wte": nn.Embedding(V, D), "h": nn.ModuleList(Layer(leaks) for _ in range(2))})
        self.net["head"] = nn.Linear(D, V)
        with torch.no_grad():
            self.net["h"][1].mlp[0].bias[:dead] = -1e4
        self.batches, self.losses = batches, []
        self.start = copy.deepcopy(self.net).double()

    def logits(self, net, ids):
        x = net["wte"](ids)
        for layer in net["h"]:
            x = layer(x)
        return net["head"](x)

    def forward(self, ids):
        return self.logits(self.net, ids)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


def batches(count=3):
    drawn = torch.randint(V - 2, (count, B, T + 1), generator=torch.Generator().manual_seed(0))
    drawn[1, 2:5] = drawn[0, :3]  # 3 of the second batch's rows repeat rows of the first
    found = [{"input_ids": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()} for rows in drawn]
    found[0]["targets"][0, :4] = -100
    return found


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    module = Small(batches())
    _, _, rows = fit([HealthSignals(2), GradientNorm(0.01)], tmp_path_factory.mktemp("run"), module=module, steps=3)
    return module, {step: {tag: v for tag, v in row.items() if tag.startswith("health/")} for step, row in rows.items()}


def test_rows_come_at_the_first_and_every_nth_step(healthy):
    assert [step for step, row in healthy[1].items() if row] == [1, 2]


def test_norms_are_those_of_float64_before_clipping(healthy):
    """One micro-batch and SGD: the first update is the clipped gradient times the rate. Dropout is off in this check."""
    module = Small(batches())
    for each in (module.net, module.start):
        for layer in each["h"]:
            layer.drop.p = 0.0
    _, _, rows = fit([HealthSignals(2), GradientNorm(0.01)], Path(), module=module, steps=1)
    net, batch = module.start, batches()[0]
    F.cross_entropy(module.logits(net, batch["input_ids"]).flatten(0, 1), batch["targets"].flatten()).backward()
    layers = {"wte": net["wte"], "h.0.attention": net["h"][0].attention, "h.0.mlp": net["h"][0].mlp, "head": net["head"]}
    total = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    for name, layer in layers.items():
        weight = torch.stack([p.norm() for p in layer.parameters()]).norm().item()
        grad = torch.stack([p.grad.norm() for p in layer.parameters()]).norm().item()
        update = grad * RATE * 0.01 / (total.item() + 1e-6)
        found = {kind: rows[1][f"health/{kind}/{name}"] for kind in ("weight_norm", "gradient_norm", "update_norm")}
        assert found["weight_norm"] == pytest.approx(weight, rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(grad, rel=1e-4)
        assert found["update_norm"] == pytest.approx(update, rel=1e-2)
        assert rows[1][f"health/update_ratio/{name}"] == pytest.approx(found["update_norm"] / weight, rel=1e-5)


def test_the_probe_measures_what_float64_computes(healthy):
    module, rows = healthy
    row, batch = rows[1], batches()[0]
    net = module.start.eval()
    count = B // 4  # both passes together: half of the micro-batch
    ids = batch["input_ids"][:count]
    with torch.no_grad():
        outputs = [net["wte"](ids)]
        for layer in net["h"]:
            outputs.append(layer(outputs[-1]))
        z = net["head"](outputs[-1])
        q, k, _ = net["h"][0].attention.project(outputs[0])[0].chunk(3, dim=-1)
    scores = (q @ k.T / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    assert row["health/attention_logit_max/h.0"] == pytest.approx(scores.max().item(), rel=1e-4)
    assert row["health/activation_rms/h.1"] == pytest.approx(outputs[2].square().mean().sqrt().item(), rel=1e-4)
    assert row["health/activation_max/h.1"] == pytest.approx(outputs[2].abs().max().item(), rel=1e-4)
    assert row["health/logit_rms"] == pytest.approx(z.square().mean().sqrt().item(), rel=1e-4)
    assert row["health/logit_max"] == pytest.approx(z.abs().max().item(), rel=1e-4)
    p = z.softmax(-1)
    assert row["health/output_entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)
    assert row["health/dead_units/h.1"] >= 0.4 > row["health/dead_units/h.0"]


@pytest.mark.parametrize("leaks", ["", *LEAKS])
def test_a_model_that_sees_the_future_leaks(tmp_path, leaks):
    _, _, rows = fit([HealthSignals(1)], tmp_path, module=Small(batches(12), leaks=leaks), steps=12)
    changes = [row["health/future_leak"] for row in rows.values() if "health/future_leak" in row]
    assert len(changes) == 6 and (max(changes) > 1e-3 if leaks else max(changes) == 0)


def test_noise_in_evaluation_is_no_leak(tmp_path):
    class Noisy(Small):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits + torch.rand_like(logits)

    _, _, rows = fit([HealthSignals(1)], tmp_path, module=Noisy(batches()), steps=1)
    assert rows[1]["health/future_leak"] == 0


@pytest.mark.parametrize(("every", "most"), [(1, 0), (10, 10), (100, 20), (1000, 20)])
def test_early_steps_have_rows_that_are_spread_geometrically(every, most):
    steps = [step for step in range(1, 3 * every + 1) if row_number(step, every)]
    assert [row_number(step, every) for step in steps] == list(range(1, len(steps) + 1))
    early = [step for step in steps if step < every]
    assert most * 0.7 <= len(early) <= most and steps[len(early) :] == [every, 2 * every, 3 * every]
    assert all(later <= max(step + 1, 1.5 * step) for step, later in itertools.pairwise(steps[: len(early) + 1]))


def test_batches_are_counted_exactly(healthy):
    _, rows = healthy
    drawn = batches()
    for step, known in ((1, drawn[:1]), (2, drawn[:2])):
        ids, targets = drawn[step - 1]["input_ids"], drawn[step - 1]["targets"]
        pairs = [(i, t) for i, t in zip(ids.flatten(), targets.flatten(), strict=True) if t >= 0]
        seen = {i for batch in known for i in batch["input_ids"][batch["targets"] >= 0].tolist()}
        assert rows[step]["health/ignored_targets"] == pytest.approx((targets < 0).float().mean().item())
        assert rows[step]["health/copied_targets"] == pytest.approx(sum(int(i == t) for i, t in pairs) / len(pairs))
        assert rows[step]["health/shifted_targets"] == 1.0
        assert rows[step]["health/untouched_embeddings"] == pytest.approx(1 - len(seen) / V)
        assert rows[step]["health/largest_id"] == max(seen)
    assert rows[1]["health/repeated_samples"] == 0.0
    assert rows[2]["health/repeated_samples"] == pytest.approx(3 / B)


def test_training_is_the_same_to_the_last_bit(tmp_path):
    """Dropout draws from the generator, and one module is in eval mode."""
    runs = []
    for callbacks in ([], [HealthSignals(1)]):
        module = Small(batches())
        module.net["h"][0].mlp.eval()
        torch.manual_seed(7)
        fit(callbacks, tmp_path, module=module, steps=3)
        runs.append((module.losses, torch.cat([p.detach().flatten() for p in module.parameters()])))
        assert not module.net["h"][0].mlp.training and module.net["h"][1].mlp.training
        assert not any(m._forward_hooks or getattr(m, "score_probe", None) for m in module.modules())
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])


def test_what_a_model_does_not_offer_is_left_out(tmp_path):
    """Batches are tensors, and `forward` is Lightning's."""
    _, _, rows = fit([HealthSignals()], tmp_path, module=Foreign(steps=1), steps=1)
    signals = [tag.split("/")[1:] for tag in rows[1] if tag.count("/") == 2]
    assert {kind for kind, _ in signals} == {"weight_norm", "gradient_norm", "update_norm", "update_ratio"}
    assert {layer for _, layer in signals} == {"embed", "head"}
    assert not any(tag.startswith("health/") and tag.count("/") == 1 for tag in rows[1])


def test_a_forward_with_other_arguments_turns_the_probe_off(tmp_path):
    class Batched(Small):
        def forward(self, batch):
            return super().forward(batch["input_ids"])

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch).flatten(0, 1), batch["targets"].flatten())

    _, _, rows = fit([HealthSignals(1)], tmp_path, module=Batched(batches()), steps=3)
    assert "health/shifted_targets" in rows[3] and "health/weight_norm/head" in rows[3]
    assert not any("logit" in tag or "activation" in tag for tag in rows[3])


def test_every_tag_is_on_the_page(healthy):
    logged = set()
    for tag in healthy[1][1] | healthy[1][2]:
        tag = re.sub(r"(_norm|_ratio)/.+", r"\1/LAYER", tag)
        logged.add(re.sub(r"/h\.\d$", "/BLOCK", tag))
    described = set(re.findall(r"^\| `(health/[^`]+)` \|", DOCS.read_text(), re.M))
    elsewhere = {  # longer sequences, ranks, norms, validation, answers
        "rank_difference", "shared_samples", "backward_loss_ratio", "repeated_spans", "answer_ends", "unknown_tokens",
    }  # fmt: skip
    elsewhere |= {tag.removeprefix("health/") for tag in described if tag.startswith("health/validation_")}
    assert logged | {f"health/{name}" for name in elsewhere} == described
    assert set(OF_LAYERS) == {tag.rpartition("/")[0] for tag in described if tag.endswith(("/LAYER", "/BLOCK"))}


def test_a_padded_embedding_is_not_the_vocabulary():
    trainer = SimpleNamespace(optimizers=[], world_size=1, global_step=1, datamodule=SimpleNamespace(vocab_size=257))
    assert setup_facts(trainer, torch.nn.Linear(1, 1), rows=320)["setup/vocab_size"] == 257
    trainer.datamodule = None
    assert setup_facts(trainer, torch.nn.Linear(1, 1), rows=320)["setup/vocab_size"] == 320


def test_facts_about_the_set_up_are_logged_once(tmp_path):
    module = Small(batches())
    module.net["h"][0].requires_grad_(False)
    groups = [
        {"params": [p for p in module.net["h"][1].parameters()]},
        {"params": [module.net["wte"].weight], "weight_decay": 0},
    ]
    module.configure_optimizers = lambda: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    weights = {name: p.detach().double() for name, p in module.net.named_parameters()}
    _, _, rows = fit([HealthSignals(1)], tmp_path, module=module, steps=3)
    gains = [
        w.square().mean().sqrt().item() * w.shape[1] ** 0.5 for name, w in weights.items() if w.ndim == 2 and "wte" not in name
    ]
    assert {tag: value for tag, value in rows[1].items() if tag.startswith("setup/")} == pytest.approx(
        {
            "setup/decayed_vectors": 3,  # the biases of a block: of the projection and of two linears
            "setup/unoptimized": D * V + V + sum(w.numel() for w in weights.values()),  # the head, and `module.start`
            "setup/frozen": sum(w.numel() for name, w in weights.items() if name.startswith("h.0.")),
            "setup/initial_gain": max(gains),
            "setup/alike_units": 0,
            "setup/ranks": 1,
            "setup/weight_decay": 0.1,
            "setup/vocab_size": V,
        }
    )
    assert not any(tag.startswith("setup/") for step in (2, 3) for tag in rows[step])
    assert all(f"| `{tag}` |" in DOCS.read_text() for tag in rows[1] if tag.startswith("setup/"))


@pytest.mark.parametrize(("accumulate", "count"), [(1, 4), (2, 4), (2, 3)])  # the last epoch ends within a step
def test_the_loss_of_the_backward_passes_is_the_logged_one_unless_it_is_added_up(tmp_path, accumulate, count):
    class Logs(Small):
        factor = 1

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            last = self.losses[batch_idx // accumulate * accumulate :]
            self.trainer.callback_metrics["train/loss"] = torch.tensor(sum(last) / len(last))
            return loss * self.factor

    for factor in (1, accumulate):
        module = Logs([dict(batch, targets=batch["targets"].clamp(min=0)) for batch in batches(count)])
        module.factor = factor
        folder = tmp_path / str(factor)
        _, _, rows = fit([HealthSignals(1)], folder, module=module, steps=2, accumulate_grad_batches=accumulate)
        assert [rows[step]["health/backward_loss_ratio"] for step in (1, 2)] == pytest.approx([factor] * 2, rel=1e-5)


def test_a_step_without_a_logged_loss_is_not_compared_with_the_loss_of_an_earlier_step(tmp_path):
    class Logs(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                write_row(self.trainer, {"train/loss": float(loss)}, 1)
            return loss

    rows = fit([HealthSignals(1)], tmp_path, module=Logs(batches(2)), steps=2)[2]
    assert ["health/backward_loss_ratio" in rows[step] for step in (1, 2)] == [True, False]


def test_layers_are_named_without_the_path_to_the_model():
    names = ["model.embedding.weight", "model.blocks.0.mlp.up.weight", "model.blocks.0.norm.weight", "model.blocks.1.scale"]
    tensor = torch.zeros(1)
    assert list(layers_of([(name, tensor) for name in names], "model.blocks")) == [
        *("embedding", "blocks.0.mlp", "blocks.0.norm", "blocks.1")
    ]
    assert list(layers_of([("model.net.lstm.weight", tensor), ("model.net.head.weight", tensor)], "")) == ["lstm", "head"]
    experts = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))}) for _ in range(2))
    assert find_blocks(nn.ModuleDict({"tables": nn.ModuleList([nn.ReLU()] * 9), "blocks": experts}))[0] == "blocks"
    assert find_blocks(nn.Linear(2, 2)) == ("", {})


@pytest.mark.parametrize(("uneven", "tolerance"), [(0, 0.02), (9, 0.12)], ids=["even", "a column in 64 is ten times larger"])
def test_the_update_of_a_large_layer_is_estimated(uneven, tolerance):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40 * SAMPLED // 512, 512))
    sample = UpdateSample({"layer": [weight]})
    update = torch.randn_like(weight) * (1 + uneven * (torch.arange(512) % 64 == 5))
    weight.data += update
    readings = Readings(torch.device("cpu"))
    readings.root_mean("health/update_norm/layer", 0.0, 1.0)
    sample.add_to(readings, "layer", 1)
    assert readings.read()["health/update_norm/layer"] == pytest.approx(update.norm().item(), rel=tolerance)
