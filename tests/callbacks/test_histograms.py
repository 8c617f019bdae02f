"""Histograms of weights and gradients, against numpy.histogram of the tensors. Several ranks: test_histogram_ranks.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from foreign import Foreign, fit
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_llm.callbacks import GradientNorm, Histograms
from lit_llm.callbacks.errors import UserError
from lit_llm.callbacks.histograms import count_values
from lit_llm.distributed.mesh_strategy import loss_scaling


class Seen(Callback):
    """What the optimizer has before clipping, by tag and step."""

    def __init__(self):
        self.values = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, p in pl_module.named_parameters():
            for tag, tensor in (("weights", p), ("gradients", p.grad)):
                if tensor is not None:
                    self.values[f"{tag}/{name}", trainer.global_step + 1] = tensor.detach().double().numpy().copy()


class Half(Foreign):
    """The bias of the head is frozen. `broken`: the gradients are NaN, and infinite in a row of the embedding."""

    def __init__(self, broken=False):
        super().__init__()
        self.head.bias.requires_grad_(False)
        if broken:
            self.head.weight.register_hook(lambda grad: torch.full_like(grad, torch.nan))
            self.embed.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(2), torch.inf))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def read(folder):
    """(counts, right edges, smallest) by tag and step, as TensorBoard's reader has them."""
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload()
    found = {}
    for tag in events.Tags()["histograms"]:
        for event in events.Histograms(tag):
            value = event.histogram_value
            found[tag, event.step] = list(value.bucket), list(value.bucket_limit), value.min
            assert value.num == sum(value.bucket)
    return found


def test_the_event_file_has_the_counts_of_numpy_before_clipping_and_training_is_the_same(tmp_path):
    seen, board = Seen(), TensorBoardLogger(tmp_path, name="", version="")
    callbacks = [seen, Histograms(every_n_steps=3), GradientNorm(0.01)]
    module = fit(callbacks, tmp_path, module=Half(), steps=6, logger=board, accumulate_grad_batches=2)[1]
    found = read(tmp_path)
    names = ("embed.weight", "head.weight")
    tags = [f"{kind}/{name}" for kind in ("weights", "gradients") for name in names]
    assert set(found) == {(tag, step) for tag in tags for step in (1, 3, 6)}
    for key, (counts, limits, smallest) in found.items():
        expected, edges = np.histogram(seen.values[key], 64)
        assert counts == expected.tolist() and [smallest, *limits] == pytest.approx(edges.tolist(), rel=1e-12, abs=1e-15)
    without = fit([GradientNorm(0.01)], tmp_path, module=Half(), steps=6, accumulate_grad_batches=2)[1]
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), without.parameters(), strict=True))


def test_values_that_are_not_finite_are_counted_apart(tmp_path):
    board = TensorBoardLogger(tmp_path, name="", version="")
    fit([Histograms(parameters="weight")], tmp_path, module=Half(broken=True), steps=1, logger=board)
    found = read(tmp_path)
    assert {tag for tag, _ in found} == {"weights/embed.weight", "weights/head.weight", "gradients/embed.weight"}
    assert sum(found["gradients/embed.weight", 1][0]) == 11 * 8 - 8
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert {tag: n for tag, n in scalars.items() if "nonfinite" in tag} == {
        "nonfinite/gradients/embed.weight": 8.0,
        "nonfinite/gradients/head.weight": 88.0,
    }


def test_counts_of_any_tensor_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr("lit_llm.callbacks.histograms._CHUNK", 1000)  # several chunks
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(123, 45, generator=generator)
    tensors = {
        "normal": normal,
        "transposed": normal.t(),
        "bf16": normal.bfloat16(),
        "float64": normal.double() * 1e-300,
        "huge": normal.sign() * torch.finfo(torch.float32).max,
        "outlier": torch.cat([normal.flatten(), torch.tensor([1e6])]),
        "whole numbers": torch.arange(128.0),  # values on edges
        "constant": torch.ones(7),
        "scalar": torch.tensor(3.0),
        "some": torch.where(normal > 1, torch.inf, torch.where(normal < -1, torch.nan, normal)),
    }
    others = {"all": torch.full((9,), torch.nan), "empty": torch.empty(0), "absent": None}
    edges, counts = count_values([*tensors.values(), *others.values()], torch.device("cpu"))
    for i, (name, tensor) in enumerate(tensors.items()):
        values = tensor.double().numpy()
        finite = values[np.isfinite(values)]
        expected, limits = np.histogram(finite, 64)
        assert counts[i, :64].tolist() == expected.tolist(), name
        assert edges[i].tolist() == pytest.approx(limits.tolist(), rel=1e-12), name
        assert counts[i, 64] == values.size - finite.size, name
    assert counts[-3:, :64].sum() == 0 and counts[-3:, 64].tolist() == [9, 0, 0]


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: Histograms(parameters="("), {}, r"Histograms\(parameters\)"),
        (lambda: Histograms(parameters="nothing"), {}, r"Histograms\(parameters\)"),
    ],
)
def test_what_it_cannot_log_is_refused(tmp_path, make, options, said):
    with pytest.raises(UserError, match=said):
        fit([make()], tmp_path, steps=1, logger=TensorBoardLogger(tmp_path), **options)


def test_gradients_that_are_not_those_of_the_parameters_are_refused(tmp_path):
    class Fused(Foreign):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    with pytest.raises(UserError, match="bf16-mixed"):
        board = TensorBoardLogger(tmp_path)
        fit([Histograms()], tmp_path, module=Fused(), steps=1, logger=board, plugins=[loss_scaling("cpu")])
    trainer = SimpleNamespace(strategy=FSDPStrategy(), optimizers=[None], loggers=[board])
    with pytest.raises(UserError, match="FSDPStrategy"):
        Histograms().on_fit_start(trainer, Foreign())


def test_a_run_whose_loggers_have_no_histograms_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"the loggers are: Rows\. .*remove Histograms"):
        rows = fit([Histograms()], tmp_path, steps=1)[2]
    assert not any(name.startswith(("weights/", "gradients/", "nonfinite/")) for row in rows.values() for name in row)
