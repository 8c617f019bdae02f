"""Multi-token prediction: loss and gradients against the formulas of DeepSeek-V3 (arXiv 2412.19437, section 2.2)."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lit_llm.core.errors import UserError
from lit_llm.core.mesh_sizes import MeshSizes
from lit_llm.distributed.activation_checkpointing import apply_activation_checkpointing
from lit_llm.distributed.layout_problems import pipeline_problems
from lit_llm.distributed.parallel_layout import mesh_layout
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.models.custom import Architecture
from lit_llm.models.gpt import GPT, GPTConfig, weights_on_meta
from lit_llm.models.loss import LossConfig, chunked_cross_entropy, cross_entropy
from lit_llm.models.upcycling import upcycled
from lit_llm.training.language_model import LanguageModel

SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 9, "vocab_size": 17, "zero_init_projections": False}
PLAIN = {"position": "learned", "qk_norm": False, "mlp": "swiglu", "mlp_width": 20}
EOS = 3


def batch() -> tuple[Tensor, Tensor]:
    """(2, 9) ids and targets; some are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(17, (2, 10), generator=generator)
    tokens[0, 4] = tokens[1, 2] = tokens[1, 7] = EOS
    targets = tokens[:, 1:].clone()
    targets[0, 2] = targets[1, 5] = -100
    return tokens[:, :-1], targets


def made(**settings) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SIZE, **settings})).double()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def block(w: dict[str, Tensor], i: int, rows: list[Tensor], seen: list[list[int]]) -> list[Tensor]:
    """One sequence, position by position. `seen`: what each attends to."""
    w = {name.removeprefix(f"blocks.{i}."): value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
    normed = [rms(x, w["attention_norm.weight"]) for x in rows]
    q, k, v = ([w[f"attention.{name}.weight"] @ x for x in normed] for name in ("query", "key", "value"))
    out = []
    for t, x in enumerate(rows):
        heads = []
        for head in (slice(0, 6), slice(6, 12)):
            p = torch.stack([q[t][head] @ k[s][head] / math.sqrt(6) for s in seen[t]]).exp()
            heads.append(sum(a / p.sum() * v[s][head] for a, s in zip(p, seen[t], strict=True)))
        x = x + w["attention.project.weight"] @ torch.cat(heads)
        y = rms(x, w["mlp_norm.weight"])
        out.append(x + w["mlp.project.weight"] @ (silu(w["mlp.gate.weight"] @ y) * (w["mlp.up.weight"] @ y)))
    return out


def formula(model: GPT, ids: Tensor, targets: Tensor, depth: int, weight: float, z_loss: float, documents: bool) -> list:
    """(loss, nats of the next token, nats ahead, number of targets ahead): sums over a batch."""
    w = dict(model.named_parameters())
    head = w.get("head.weight", w["embedding.weight"])[:17]
    loss = nats = ahead = count = 0
    for sequence, following in zip(ids.tolist(), targets.tolist(), strict=True):
        length, number, numbers = len(sequence), 0, []
        for token in sequence:
            number += documents and token == EOS
            numbers.append(number)
        place = [t - numbers.index(numbers[t]) for t in range(length)]
        seen = [[s for s in range(t + 1) if numbers[s] == numbers[t]] for t in range(length)]
        h = [w["embedding.weight"][token] + w["positions.weight"][place[t]] for t, token in enumerate(sequence)]
        for i in range(2):
            h = block(w, i, h, seen)
        for k in range(depth + 1):
            if k:
                # The last positions know no token k ahead. They are no targets, and no other position attends to them.
                later = [w["embedding.weight"][sequence[t + k] if t + k < length else 0] for t in range(length)]
                a = f"blocks.{1 + k}.ahead."
                h = [
                    w[f"{a}weight"] @ torch.cat((rms(x, w[f"{a}hidden_norm.weight"]), rms(e, w[f"{a}embedding_norm.weight"])))
                    for x, e in zip(h, later, strict=True)
                ]
                h = block(w, 1 + k, h, seen)
            for t in range(length - k):
                target = following[t + k]
                if target == -100 or numbers[t] != numbers[t + k]:
                    continue
                z = head @ rms(h[t], w["norm.weight"])
                each = torch.logsumexp(z, 0) - z[target]
                loss += (each + z_loss * torch.logsumexp(z, 0) ** 2) * (weight / depth if k else 1)
                nats, ahead, count = nats + each * (not k), ahead + each * (k > 0), count + (k > 0)
    return [loss, nats, ahead, count]


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True, "zero_init_projections": None}], ids=["own head", "tied"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunks"])
def test_loss_and_gradients_follow_the_formulas(settings, documents, depth, chunked):
    model = made(**PLAIN, **settings, predict_ahead=depth, mask_documents=documents, eos_id=EOS)
    model.ahead_weight, (ids, targets) = 0.7, batch()
    loss = partial(chunked_cross_entropy, chunk_size=5, z_loss=0.1) if chunked else partial(cross_entropy, z_loss=0.1)
    sums = model(ids, targets, loss=loss)
    sums.loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected, nats, ahead, count = formula(model, ids, targets, depth, 0.7, 0.1, documents)
    expected.backward()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert [sums.nll.item(), *sums.means[0].tolist()] == pytest.approx([nats.item(), ahead.item(), count], rel=1e-12)
    assert sums.count == (targets != -100).sum()
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["rope and experts", "windows", "dropout", "convolutions"])
def test_recomputation_changes_no_bit_and_every_parameter_gets_a_gradient(kind):
    more = {
        "rope and experts": {"moe": {"experts": 4, "top_k": 2, "expert_width": 8, "balance": 0.1, "every": 2}},
        "windows": {"layers": {"window": [3, None]}, "norm_position": "sandwich"},
        "dropout": {"dropout": 0.3},
        "convolutions": {"input_convolution": 2},
    }
    found, (ids, targets) = [], batch()
    for mode in ("none", "full"):
        model = made(predict_ahead=2, **{**more[kind], "zero_init_projections": None if kind == "windows" else False})
        apply_activation_checkpointing(model, mode)
        sums = model(ids, targets, seed=torch.tensor(5))
        sums.loss.backward()
        found.append([sums.loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if sums.router is not None:
        assert len(sums.router.counts) == len(model.routers)


def test_validation_and_generation_leave_the_blocks_out():
    model, (ids, targets) = made(predict_ahead=2), batch()
    without = GPT(GPTConfig(**SIZE)).double()
    without.load_state_dict({name: value for name, value in model.state_dict().items() if name in without.state_dict()})
    in_training = model(ids, targets)
    assert torch.equal(model(ids), without(ids)) and in_training.nll == without(ids, targets).nll
    assert in_training.loss > in_training.nll
    validated = model.eval()(ids, targets)
    assert validated.means is None and validated.loss == validated.nll == without(ids, targets).nll


def test_flops_count_a_block_a_projection_and_a_head_for_each_token():
    config = GPTConfig(n_layer=3, n_head=4, n_embd=32, block_size=64, vocab_size=100, predict_ahead=2, window=16)
    blocks, d, padded = 5, 32, 128
    matrices = blocks * (4 * d * d + 2 * d * 4 * d) + 2 * 2 * d * d + 3 * padded * d
    assert config.flops_per_token() == 6 * matrices + 12 * blocks * d * 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"predict_ahead": 9}, ["predict_ahead is 9", "block_size=9", "--model.predict_ahead"]),
        ({"predict_ahead": -1}, ["predict_ahead is -1", "--model.predict_ahead"]),
        ({"predict_ahead": 1.5}, ["predict_ahead is 1.5"]),
    ],
)
def test_one_sentence_for_each_mistake(settings, words):
    (problem,) = GPTConfig(**{**SIZE, **settings}).problems()
    assert all(word in problem for word in words), problem


def test_it_is_refused_where_it_cannot_be():
    with pytest.raises(UserError, match=r"--model.predict_ahead 0"):
        LanguageModel(GPTConfig(predict_ahead=1), architecture=Architecture("custom_models.ConvModel", {}))
    with pytest.raises(UserError, match=r"ahead_weight"):
        LanguageModel(GPTConfig(), loss=LossConfig(ahead_weight=-1.0))
    layout = mesh_layout(MeshSizes(pipeline=2), PipelineLayout(2, "zbv"))
    model = GPTConfig(**{**SIZE, "n_layer": 4}, predict_ahead=1)
    (problem,) = pipeline_problems(layout, model, None, None, "32-true", None)
    assert "predict_ahead" in problem and "--model.predict_ahead 0" in problem


def test_upcycling_gives_every_block_experts():
    config = GPTConfig(**SIZE, predict_ahead=1)
    made, weights = upcycled(config, dict(GPT(config).state_dict()), 2)
    assert weights_on_meta(made).keys() == weights.keys()
