"""Signals that tell causes apart, against values computed otherwise, and on modules with the fault that they show."""

import math
from collections import Counter

import pytest
import torch
from foreign import fit
from test_health import Small, V, batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_llm.callbacks import HealthSignals
from lit_llm.callbacks.health_batch import check_targets
from lit_llm.callbacks.health_counts import PRIOR, CountedText
from lit_llm.callbacks.health_layers import add_rounded, float32_of
from lit_llm.callbacks.health_readings import Readings
from lit_llm.callbacks.health_setup import _are_fresh, _kinds, _root_mean_square


def rows_of(module, tmp_path, steps=3, **trainer):
    return fit([HealthSignals(1)], tmp_path, module=module, steps=steps, **trainer)[2]


@pytest.mark.parametrize("vocabulary", [5, 3000])  # pairs of the second share slots
def test_counts_predict_as_tables_of_python_do(vocabulary):
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, (4, 10), generator=draw) for _ in range(3)]
    counted = CountedText(vocabulary, torch.device("cpu"))
    targets, pairs, inputs = Counter(), Counter(), Counter()
    for text in texts[:2]:
        a, b = text[:, :-1].clone(), text[:, 1:].clone()
        b[0, :3] = -100
        counted.add(a, b)
        kept = [(int(x), int(y)) for x, y in zip(a.flatten(), b.flatten(), strict=True) if y != -100]
        targets.update(y for _, y in kept)
        inputs.update(x for x, _ in kept)
        pairs.update(kept)
    single, double = [], []
    for x, y in zip(texts[2][:, :-1].flatten().tolist(), texts[2][:, 1:].flatten().tolist(), strict=True):
        unigram = (targets[y] + 1) / (targets.total() + vocabulary)
        single.append(-math.log(unigram))
        double.append(-math.log((pairs[x, y] + PRIOR * unigram) / (inputs[x] + PRIOR)))
    readings = Readings(torch.device("cpu"))
    counted.judge(texts[2][:, :-1], texts[2][:, 1:], readings)
    counted.add_to(readings, unknown=2, opening=1)
    expected = {"unigram_loss": single, "bigram_loss": double, "commonest_target": [max(targets.values()) / targets.total()]}
    expected["counted_pairs"] = [targets.total()]
    expected["unknown_tokens"] = [inputs[2] / inputs.total()]
    expected["unlearned_inputs"] = [sum(n for x, n in inputs.items() if not targets[x] and x != 1) / inputs.total()]
    assert readings.read() == pytest.approx({f"health/{k}": sum(v) / len(v) for k, v in expected.items()}, rel=1e-5)


class Plain(Small):
    """Without dropout, all targets counted."""

    def __init__(self, count=6, **kwargs):
        super().__init__([batch | {"targets": batch["targets"].clamp(min=0)} for batch in batches(count)], **kwargs)
        for layer in self.net["h"]:
            layer.drop.p = 0.0


def test_weights_that_change_behind_the_step_are_counted(tmp_path):
    class Pruned(Plain):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            with torch.no_grad():
                self.net["h"][0].mlp[0].weight.mul_(0.5)

    module = Pruned()
    row = rows_of(module, tmp_path)[2]
    changed = module.net["h"][0].mlp[0].weight.numel() / sum(p.numel() for p in module.parameters())
    assert row["health/changed_after_step"] == pytest.approx(changed, rel=0.01)
    assert rows_of(Plain(), tmp_path / "plain")[2]["health/changed_after_step"] == 0


@pytest.mark.parametrize("maximize", [False, True])
def test_an_update_by_the_gradient_has_a_cosine_of_one(tmp_path, maximize):
    module = Plain()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-3, maximize=maximize)
    row = rows_of(module, tmp_path)[2]
    cosines = [value for tag, value in row.items() if tag.startswith("health/descent/")]
    assert len(cosines) == 6 and cosines == pytest.approx([-1.0 if maximize else 1.0] * 6, abs=1e-3)


def test_the_first_gradient_is_a_part_of_the_step(tmp_path):
    module = Plain()
    row = rows_of(module, tmp_path, steps=1, accumulate_grad_batches=2)[1]
    gradients = []
    for batch in module.batches[:2]:
        net = Plain().net.double()
        logits = module.logits(net, batch["input_ids"]).flatten(0, 1)
        nn.functional.cross_entropy(logits, batch["targets"].flatten()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    first, second = gradients
    assert row["health/first_gradient_share"] == pytest.approx(((first + second) @ first / (first @ first)).item(), rel=1e-4)
    assert row["health/micro_batches"] == 2 and row["health/leftover_gradient"] == 0


def test_micro_batches_that_are_lost_or_alike_show(tmp_path):
    class Clears(Plain):
        def backward(self, loss):
            self.zero_grad()
            super().backward(loss)

    class Repeats(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(self.batches[0], batch_idx)

    shares = [
        rows_of(kind(), tmp_path / kind.__name__, steps=1, accumulate_grad_batches=2)[1]["health/first_gradient_share"]
        for kind in (Clears, Repeats)
    ]
    assert shares[0] < 0.95 and shares[1] == pytest.approx(2, abs=1e-5)


def test_gradients_that_are_not_cleared_show(tmp_path):
    class Keeps(Plain):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

    assert rows_of(Keeps(), tmp_path)[2]["health/leftover_gradient"] > 0


@pytest.mark.parametrize("trains", [False, True])
def test_two_evaluations_of_a_validation_batch_differ_if_dropout_is_on(tmp_path, trains):
    losses = []

    class Validated(Small):
        def val_dataloader(self):
            return DataLoader([{name: each[:, :4] for name, each in batch.items()} for batch in self.batches], batch_size=None)

        def validation_step(self, batch, batch_idx):
            self.train(trains)
            ids, targets = (batch[name][: len(batch["targets"]) // 4] for name in ("input_ids", "targets"))  # that are probed
            losses.append(F.cross_entropy(self(ids).flatten(0, 1), targets.flatten()).item())

    row = rows_of(Validated(batches()), tmp_path, num_sanity_val_steps=0, limit_val_batches=1, val_check_interval=1)[2]
    assert (row["health/validation_noise"] > 0.01) == trains and row["health/validation_length"] == 0.5
    assert row["health/validation_ignored_targets"] == 4 / 32  # the first four of the first sequence
    assert trains or row["health/validation_noise"] < 1e-5
    assert trains or row["health/validation_batch_loss"] == pytest.approx(losses[1], rel=1e-5)


def test_matrices_of_blocks_are_fresh_until_training_has_changed_their_sizes():
    draw = torch.Generator().manual_seed(0)
    blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(32, 64), "b": nn.Linear(64, 32)}) for _ in range(4))
    with torch.no_grad():
        for block in blocks:
            block["a"].weight.copy_(torch.randn(64, 32, generator=draw) * 0.02)
            block["b"].weight.zero_()
    kinds = _kinds({name: each for name, each in blocks.named_modules() if isinstance(each, nn.Linear)})

    def fresh():
        return [_are_fresh(kind, {each: _root_mean_square(each) for each in kind}) for kind in kinds]

    assert sorted(map(len, kinds)) == [4, 4] and fresh() == [True, True]
    with torch.no_grad():
        blocks[2]["a"].weight.mul_(1.2)
    assert fresh() == [False, True]


def test_columns_that_all_sequences_share_are_counted():
    ids = torch.arange(32).view(4, 8)
    ids[:, 2:4] = 5
    for rows, share in ((4, 0.25), (3, None)):  # of three sequences it may be chance
        readings = Readings(torch.device("cpu"))
        check_targets(ids[:rows], ids[:rows] + 1, readings)
        assert readings.read().get("health/equal_columns") == share


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, False), (torch.float16, True), (torch.bfloat16, True)])
def test_numbers_of_narrow_types_are_seen_in_float32(dtype, rounded):
    drawn = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    readings = Readings(torch.device("cpu"))
    numbers = float32_of([drawn, torch.tensor([0.0, math.nan, math.inf] * 999), drawn.half()])
    add_rounded(readings, "weights", numbers)
    assert (readings.read()["health/rounded/weights"] > 0.99) == rounded


def test_opening_targets_and_answer_ends_are_counted():
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
    targets = torch.tensor([[-100, 9, 0, -100, -100, 9, 0, -100], [5, 9, 1, -100, 3, 2, 9, 0]])  # the last one is cut
    readings = Readings(torch.device("cpu"))
    check_targets(ids, targets, readings)
    values = readings.read()
    assert values["health/opening_targets"] == 0.5
    assert values["health/answer_ends"] == pytest.approx(2 / 3)  # 0 and 0 and 1


def test_a_model_of_single_tokens_uses_no_context(tmp_path):
    module, blind = Plain(), Plain()
    for layer in blind.net["h"]:
        layer.attention.project.requires_grad_(False).weight.zero_()
        layer.attention.project.bias.data.zero_()
    used, none = (rows_of(each, tmp_path / str(i))[2] for i, each in enumerate((module, blind)))
    assert used["health/context_use"] > 0 and used["health/context_lost"] == 0
    assert none["health/context_use"] == 0 and none["health/context_lost"] == 1


def test_norms_and_residuals_are_measured(tmp_path):
    class Normed(Plain):
        def __init__(self):
            super().__init__()
            self.net["h"][1].mlp.insert(0, nn.LayerNorm(self.net["wte"].embedding_dim, eps=0.5))
            self.start = None

    module = Normed()
    row = rows_of(module, tmp_path, steps=1)[1]
    net = Normed().net
    with torch.no_grad():
        x = net["h"][0](net["wte"](module.batches[0]["input_ids"][:2]))
        y = net["h"][1](x)
        inner = x + net["h"][1].attention(x)
    assert row["health/norm_epsilon"] == pytest.approx(
        0.5 / inner.var(-1, correction=0).mean().item(), rel=0.3
    )  # other ids, too
    cosine = nn.functional.cosine_similarity(x, y, dim=-1).mean().item()
    assert row["health/residual/h.1"] == pytest.approx(cosine, abs=0.1)


@pytest.mark.parametrize("added", [True, False])
def test_a_residual_may_be_added_outside_of_the_block(tmp_path, added):
    class Turning(Plain):
        """Blocks that turn their input by 90°. With the input, that is 45°."""

        def __init__(self):
            super().__init__()
            width = self.net["wte"].embedding_dim
            self.net["h"] = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(3))
            turn = torch.block_diag(*[torch.tensor([[0.0, -1.0], [1.0, 0.0]])] * (width // 2))
            for block in self.net["h"]:
                block[0].weight.data.copy_(turn)
            self.start = None

        def forward(self, input_ids):
            x = self.net["wte"](input_ids)
            for block in self.net["h"]:
                x = x + block(x) if added else block(x)
            return self.net["head"](x)

    row = rows_of(Turning(), tmp_path, steps=1)[1]
    expected = math.cos(math.pi / 4) if added else 0
    assert [row[f"health/residual/h.{i}"] for i in (1, 2)] == pytest.approx([expected] * 2, abs=1e-3)


def test_gradients_that_vanish_and_weights_that_are_rounded_show(tmp_path):
    class Coarse(Plain):
        def on_before_optimizer_step(self, optimizer):
            pass

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            with torch.no_grad():
                for p in self.net.parameters():
                    p.copy_(p.bfloat16())

        def on_after_backward(self):
            for p in self.net["h"].parameters():
                p.grad[: len(p) // 2] = 0

    fine, coarse = rows_of(Plain(), tmp_path / "fine")[2], rows_of(Coarse(), tmp_path / "coarse")[2]
    assert coarse["health/rounded/weights"] == 1 and fine["health/rounded/weights"] < 0.01
    assert coarse["health/zero_gradients"] > 0.45 > 0.3 > fine["health/zero_gradients"]


def test_consecutive_sequences_and_state_show(tmp_path):
    text = torch.randint(V, (8 * 8 + 1,), generator=torch.Generator().manual_seed(1))
    module = Plain()
    module.batches[0] = {"input_ids": text[:-1].view(8, 8), "targets": text[1:].view(8, 8)}
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    rows = rows_of(module, tmp_path)
    assert rows[1]["health/consecutive_sequences"] == 1 and rows[2]["health/consecutive_sequences"] < 0.5
    assert [rows[step]["health/stateless"] > 0.5 for step in (1, 2, 3)] == [True, False, False]


def test_units_that_begin_alike_show(tmp_path):
    module = Plain()
    nn.init.constant_(module.net["h"][0].mlp[0].weight, 0.1)
    assert rows_of(module, tmp_path, steps=1)[1]["setup/alike_units"] == pytest.approx(1 / 14)  # of `net` and of `start`
