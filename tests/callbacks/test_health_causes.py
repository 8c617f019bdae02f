"""Signals that tell causes apart, against values computed otherwise, and on modules with the fault that they show."""

import math
from collections import Counter

import pytest
import torch
from foreign import fit
from test_health import Small, V, batches
from torch import nn
from torch.utils.data import DataLoader

from lit_llm.callbacks import HealthSignals
from lit_llm.callbacks.health_batch import check_targets
from lit_llm.callbacks.health_counts import PRIOR, CountedText
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


@pytest.mark.parametrize("trains", [False, True])
def test_two_evaluations_of_a_validation_batch_differ_if_dropout_is_on(tmp_path, trains):
    class Validated(Small):
        def val_dataloader(self):
            return DataLoader([{name: each[:, :4] for name, each in batch.items()} for batch in self.batches], batch_size=None)

        def validation_step(self, batch, batch_idx):
            self.train(trains)

    row = rows_of(Validated(batches()), tmp_path, num_sanity_val_steps=0, limit_val_batches=1, val_check_interval=1)[2]
    assert (row["health/validation_noise"] > 0.01) == trains and row["health/validation_length"] == 0.5
    assert trains or row["health/validation_noise"] < 1e-5


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


def test_answer_ends_are_counted():
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]])
    targets = torch.tensor([[-100, 9, 0, -100, -100, 9, 0, -100], [5, 9, 1, -100, 3, 2, 9, 0]])  # the last one is cut
    readings = Readings(torch.device("cpu"))
    check_targets(ids, targets, readings)
    assert readings.read()["health/answer_ends"] == pytest.approx(2 / 3)  # 0 and 0 and 1


def test_a_model_of_single_tokens_uses_no_context(tmp_path):
    module, blind = Plain(), Plain()
    for layer in blind.net["h"]:
        layer.attention.project.requires_grad_(False).weight.zero_()
        layer.attention.project.bias.data.zero_()
    used, none = (rows_of(each, tmp_path / str(i))[2] for i, each in enumerate((module, blind)))
    assert used["health/context_use"] > 0 and none["health/context_use"] == 0


def test_gradients_that_vanish_show(tmp_path):
    class Vanishing(Plain):
        def on_after_backward(self):
            for p in self.net["h"].parameters():
                p.grad[: len(p) // 2] = 0

    healthy, vanishing = rows_of(Plain(), tmp_path / "all")[2], rows_of(Vanishing(), tmp_path / "half")[2]
    assert vanishing["health/zero_gradients"] > 0.45 > 0.3 > healthy["health/zero_gradients"]


def test_consecutive_sequences_show(tmp_path):
    text = torch.randint(V, (8 * 8 + 1,), generator=torch.Generator().manual_seed(1))
    module = Plain()
    module.batches[0] = {"input_ids": text[:-1].view(8, 8), "targets": text[1:].view(8, 8)}
    rows = rows_of(module, tmp_path)
    assert rows[1]["health/consecutive_sequences"] == 1 and rows[2]["health/consecutive_sequences"] < 0.5


def test_units_that_begin_alike_show(tmp_path):
    module = Plain()
    nn.init.constant_(module.net["h"][0].mlp[0].weight, 0.1)
    assert rows_of(module, tmp_path, steps=1)[1]["setup/alike_units"] == pytest.approx(1 / 14)  # of `net` and of `start`
