"""Attention against a naive implementation in float64, its memory, and the choice of its kernel."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lit_llm.models import attention_flex
from lit_llm.models.attention import Visibility, attend
from lit_llm.models.attention_blocks import backward_in_blocks, forward_in_blocks
from lit_llm.models.attention_kernel_choice import choose
from lit_llm.models.dropout import drop_weights, hashed, kept, make_drops
from lit_llm.models.self_attention import without_own_value

B, H, WIDTH = 2, 4, 6


def naive(q, k, v, *, window=None, documents=None, softcap=None, sinks=None):
    """Softmax over all S scores and the sink, with a dense mask."""
    length, end = q.size(2), k.size(2)
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(end - length, end)[:, None], torch.arange(end)[None, :]
    hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    if documents is not None:
        hidden = hidden | (documents[:, None, i] != documents[:, None, j])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :end] @ v


def tensors(queries, keys, kv_heads, *, dtype=torch.float64, seed=0, batch=B):
    """Queries, keys and values as projections return them: in memory (B, T, heads, h)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((queries, H), (keys, kv_heads), (keys, kv_heads))
    drawn = (torch.randn(batch, n, heads, WIDTH, dtype=torch.float64, generator=generator) for n, heads in sizes)
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in drawn]


def documents_of(length, seed=1):
    """Two sequences: one of documents of about 50 positions, one of about 3, with documents of one position."""
    ends = torch.rand(B, length, generator=torch.Generator().manual_seed(seed)) < torch.tensor([[0.02], [0.3]])
    return ends.long().cumsum(1)


@pytest.mark.parametrize("masked", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 150])
def test_outputs_and_gradients_equal_a_naive_implementation(window, masked):
    shapes = [(150, 150), (1, 1), (1, 90), (70, 150)]
    for (queries, keys), kv_heads, softcap, sink in itertools.product(shapes, (4, 2), (None, 2.0), (False, True)):
        q, k, v = tensors(queries, keys, kv_heads)
        sinks = torch.linspace(-1, 2, H, dtype=torch.float64).requires_grad_() if sink else None
        documents = documents_of(keys) if masked else None
        inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
        ours = attend(q, k, v, see=Visibility(window, documents), softcap=softcap, sinks=sinks)
        theirs = naive(q, k, v, window=window, documents=documents, softcap=softcap, sinks=sinks)
        weight = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view(theirs.shape)
        found, expected = (torch.autograd.grad(y, inputs, weight) for y in (ours, theirs))
        for a, b in zip((ours, *found), (theirs, *expected), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)  # float64; sums of 150 terms of size 1


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bf16_is_as_exact_as_its_inputs(softcap):
    see = Visibility(40, documents_of(200))
    q, k, v = tensors(200, 200, 2, dtype=torch.bfloat16)
    ours = attend(q, k, v, see=see, softcap=softcap)
    theirs = naive(*(x.double() for x in (q, k, v)), window=40, documents=see.documents, softcap=softcap)
    assert ours.dtype == torch.bfloat16
    # bf16 has 8 bits: a weighted mean of values up to 4 is rounded by at most 4 * 2^-8, weights and values likewise.
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3 * 4 * 2**-8)
    found, expected = (torch.autograd.grad(y.sum(), [q, k, v]) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


# -- dropout of weights ------------------------------------------------------------------------------------------------


def drops_of(q, k, rate, seed=0):
    """The dropout of weights of the last of the positions of k."""
    positions = torch.arange(k.size(2) - q.size(2), k.size(2))
    drops = make_drops(torch.tensor(seed), layers=1, batch=q.size(0), positions=positions, width=k.size(2))
    return drop_weights(drops.of(0), rate, q.size(1), k.size(2))


def made(q, k, rate=None, **settings):
    """Settings with the dropout of a rate."""
    return settings if rate is None else {**settings, "drops": drops_of(q, k, rate)}


def dropped(inputs, seed, **settings):
    drops = drops_of(*inputs[:2], 0.4, seed)
    return attend(*inputs[:3], drops=drops, sinks=inputs[3] if len(inputs) > 3 else None, **settings)


@pytest.mark.parametrize("kind", ["causal", "everything"])
def test_the_backward_pass_of_dropout_has_the_weights_of_the_forward_pass(kind):
    """Finite differences of the function with a fixed seed: another draw in the backward pass would be far off."""
    q, k, v = (x.detach().requires_grad_() for x in tensors(70, 70, 2))
    if kind == "causal":
        inputs, settings = (q, k, v), {"see": Visibility()}
    else:
        inputs = q, k, v, torch.linspace(-1, 2, H, dtype=torch.float64).requires_grad_()
        settings = {"see": Visibility(20, documents_of(70)), "softcap": 2.0}
    assert torch.autograd.gradcheck(lambda *x: dropped(x, 3, **settings), inputs, fast_mode=True)


@pytest.mark.parametrize(
    "settings", [{}, {"window": 20}, {"documents": documents_of(70)}], ids=["causal", "window", "documents"]
)
def test_blocks_drop_the_weights_that_the_hash_names(settings):
    """Against the naive weights times the mask of all T x T places, and its gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors(70, 70, 2))
    drops = drops_of(q, k, 0.3)
    mask = kept(hashed(drops.rows[:, None], drops.heads[:, None]), drops.columns, 0.3) / (1 - 0.3)
    weights = naive(q, k, torch.eye(70, dtype=torch.float64).expand(B, 2, 70, 70), **settings)
    expected = (weights * mask.double()) @ v.repeat_interleave(2, dim=1)
    y = attend(q, k, v, see=Visibility(**settings), drops=drops)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-7)  # 1 / (1 - 0.3) was rounded to fp32
    found, theirs = (torch.autograd.grad(x.square().sum(), [q, k, v]) for x in (y, expected))
    for a, b in zip(found, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- memory ------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns, inside our operators too."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("lit_llm::"):
            with self:
                return (backward_in_blocks if "backward" in name else forward_in_blocks)(*args)
        result = func(*args, **(kwargs or {}))
        made = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return result


@pytest.mark.parametrize(
    "settings",
    [
        {"see": Visibility()},
        {"see": Visibility(64)},
        {"see": Visibility(None, (torch.arange(4096) // 600)[None])},
        {"see": Visibility(64, (torch.arange(4096) // 600)[None])},
        {"see": Visibility(64), "softcap": 2.0},
        {"see": Visibility(64), "sinks": torch.zeros(H)},
        {"see": Visibility(64), "rate": 0.1},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_no_tensor_has_as_many_elements_as_the_scores_of_one_head(settings):
    length = 4096
    q, k, v = tensors(length, length, 2, dtype=torch.float32, batch=1)
    with Largest() as largest:
        attend(q, k, v, **made(q, k, **settings)).sum().backward()
    assert length * H * WIDTH <= largest.elements < length * length / 16


# -- the choice --------------------------------------------------------------------------------------------------------

NONE = {"hides": False, "caps": False, "sinks": False, "drops": False}


@pytest.mark.parametrize(
    ("kernel", "device", "on", "expected"),
    [
        ("auto", "cpu", (), "sdpa"),
        ("auto", "cpu", ("hides",), "blocks"),
        ("auto", "cpu", ("drops",), "blocks"),  # SDPA would keep all weights
        ("blocks", "cpu", (), "blocks"),
        ("auto", "mps", ("caps",), "blocks"),
        ("auto", "cuda", (), "sdpa"),
        ("auto", "cuda", ("drops",), "blocks"),
        ("auto", "cuda", ("hides",), "flex"),
        ("auto", "cuda", ("sinks",), "flex"),
        ("auto", "cuda", ("hides", "drops"), "blocks"),
        ("flash3", "cuda", (), "sdpa"),
        ("flash3", "cuda", ("hides",), "flex"),
        ("flex", "cuda", (), "flex"),
        ("blocks", "cuda", ("hides",), "blocks"),
    ],
)
def test_the_kernel_follows_from_the_device_and_what_attention_needs(kernel, device, on, expected):
    assert choose(kernel, device, **{**NONE, **dict.fromkeys(on, True)}) == expected


def test_plain_causal_attention_is_torchs_own():
    q, k, v = tensors(50, 50, 4)
    assert torch.equal(attend(q, k, v, see=Visibility()), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    blocks = attend(q, k, v, see=Visibility(kernel="blocks"))
    torch.testing.assert_close(blocks, naive(q, k, v), rtol=0, atol=1e-10)


# -- FlexAttention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (256, 256), (300, 300), (200, 500), (128, 384), (1, 300)])
def test_the_block_mask_is_the_one_that_torch_finds_from_every_pair_of_positions(queries, keys):
    for window, masked in itertools.product((None, 1, 130), (False, True)):
        documents = documents_of(keys) if masked else None
        ours = attention_flex.make_block_mask(window, documents, queries, keys, torch.device("cpu"))
        batch = B if masked else None
        theirs = create_block_mask(ours.mask_mod, batch, None, queries, keys, device="cpu", BLOCK_SIZE=attention_flex.BLOCK)
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("window", "masked", "softcap", "sink"),
    [
        (70, True, 2.0, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product((None, 70), (0, 1), (None, 2.0), (0, 1))),
    ],
)
def test_flex_attention_means_the_same(window, masked, softcap, sink, monkeypatch):
    """In float64 on the CPU, where FlexAttention has a forward pass."""
    monkeypatch.setattr(attention_flex, "_kernel", lambda: flex_attention)
    documents = documents_of(300) if masked else None
    sinks = torch.linspace(-1, 2, H, dtype=torch.float64) if sink else None
    for queries in (300, 170):
        q, k, v = (x.detach() for x in tensors(queries, 300, 2))
        mask = attention_flex.make_block_mask(window, documents, queries, 300, q.device)
        ours = attention_flex.attend_flex(q, k, v, mask, scale=WIDTH**-0.5, softcap=softcap, sinks=sinks)
        theirs = naive(q, k, v, window=window, documents=documents, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # FlexAttention keeps its scores in fp32


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["auto", "flex", "blocks"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("queries", [1000, 300])
def test_kernels_of_cuda_equal_a_naive_implementation(kernel, window, masked, queries):
    sizes = ((H, queries), (2, 1000), (2, 1000))
    drawn = (torch.randn(B, heads, n, 64, dtype=torch.float64) for heads, n in sizes)
    q, k, v = (x.cuda().requires_grad_() for x in drawn)
    documents = documents_of(1000) if masked else None
    on_device = None if documents is None else documents.cuda()
    mask = attention_flex.make_block_mask(window, on_device, queries, 1000, q.device)
    narrow = [x.detach().to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    ours = attend(*narrow, see=Visibility(window, on_device, kernel, mask))
    theirs = naive(*(x.cpu() for x in (q, k, v)), window=window, documents=documents)
    torch.testing.assert_close(ours.double().cpu(), theirs, rtol=0, atol=3 * 4 * 2**-8)
    found, expected = torch.autograd.grad(ours.sum(), narrow), torch.autograd.grad(theirs.sum(), [q, k, v])
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])  # squares of the last overflow in fp16, those of the first vanish
def test_nothing_of_the_own_value_is_left(dtype, bound, size):
    generator = torch.Generator().manual_seed(4)
    v = (size * torch.randn(2, 2, 5, 16, generator=generator)).to(dtype)
    y = (size * torch.randn(2, 4, 5, 16, generator=generator)).to(dtype).requires_grad_()
    found = without_own_value(y, v)
    assert found.dtype == dtype
    wide, of_heads = y.detach().double(), v.double().repeat_interleave(2, dim=1)
    part = (wide * of_heads).sum(-1, keepdim=True) / (of_heads * of_heads).sum(-1, keepdim=True)
    torch.testing.assert_close(found.double() / size, (wide - part * of_heads) / size, rtol=bound, atol=bound)
    found.sum().backward()
    assert y.grad.isfinite().all()
