"""Texts that share a cache against computing each anew and alone, in models of several families."""

import math

import pytest
import torch

from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.generation import Sampling, Texts, generate, generate_all
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.models.latent_config import LatentConfig

SIZE = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 24, "vocab_size": 31, "zero_init_projections": False}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [5.0] * 2}
FAMILIES = {
    "GPT-2": {
        "position": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "qk_norm": False,
        "bias": True,
        "tie_embeddings": True,
    },
    "groups, windows": {"n_kv_head": 2, "window": 5, "mlp": "swiglu"},
    "soft cap, sinks": {"attention_softcap": 2.0, "attention_sinks": True, "window": 7},
    "latents": {"qk_norm": False, "latent": LatentConfig(kv_rank=10, nope_head_dim=6, rope_head_dim=4, value_head_dim=5)},
    "experts": {"moe": MoEConfig(experts=4, top_k=2)},
    "convolutions": {"qkv_convolution": 3, "input_convolution": 5, "exclusive_attention": True},
    "LongRoPE": {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 9}},
    "masked documents": {"mask_documents": True, "eos_id": 5},
}
PROMPTS = [[1, 2, 3, 5, 4, 9, 9, 8], [7], [3, 30, 2, 1], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    made = GPT(GPTConfig(**SIZE | {"init_std": 0.5} | FAMILIES[request.param])).eval()
    for p in made.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return made


def computed(model, monkeypatch):
    """The numbers of positions that the model is given from now on."""
    sizes, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, ids, **more: sizes.append(ids.size(1)) or forward(self, ids, **more))
    return sizes


@torch.no_grad()
def test_a_text_that_is_cut_back_and_goes_on_has_the_logits_of_a_pass_over_all_of_it(model, monkeypatch):
    texts, sizes = Texts(model), computed(model, monkeypatch)
    first = [1, 2, 3, 5, 4, 6, 7, 8]
    rotated_anew = model.config.rope_scaling is not None
    for text, new in (
        (first, 8),
        ([*first, 10, 11, 12], 11 if rotated_anew else 3),  # a longer prompt
        ([*first[:5], 20, 21], 7 if rotated_anew else 2),  # an earlier turn is written in another way
        (first[:3], 1),  # the position before what follows is computed again
        ([*first[:3], 9], 1),
        ([9, 9], 2),
    ):
        known = {"documents": torch.zeros(1, len(text)).long()} if model.config.mask_documents else {}
        expected = model(torch.tensor([text]), **known)
        sizes.clear()
        torch.testing.assert_close(texts.logits([text]), expected[:, -1], rtol=0, atol=2e-5)
        assert sizes == [new]


@torch.no_grad()
def test_a_pass_that_was_interrupted_leaves_nothing_wrong_in_the_cache(model, monkeypatch):
    texts, alone = Texts(model), Texts(model)
    texts.logits([[1, 2, 3, 4]])

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.blocks[1], "forward", interrupt)  # the first block has new positions then, the second has none
        texts.logits([[1, 2, 3, 4, 7, 8]])
    for text in ([1, 2, 3, 4, 7, 9], [1, 2, 9]):
        torch.testing.assert_close(texts.logits([text]), alone.logits([text]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_unequal_length_have_the_texts_that_they_have_alone(model, temperature):
    samplings = [Sampling(temperature, None).numbered(i) for i in range(len(PROMPTS))]
    alone = [
        list(generate(model, prompt, max_new_tokens=16, sampling=sampling, stop_id=4))
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    together: list[list[int]] = [[] for _ in PROMPTS]
    for row, token in generate_all(Texts(model), PROMPTS, max_new_tokens=16, samplings=samplings, stop_id=4):
        together[row].append(token)
    assert together == alone
    assert max(map(len, alone)) == 16  # beyond the block, so that contexts were cut, each at its own place


def test_texts_of_one_seed_have_seeds_of_their_own():
    settings = [Sampling(seed=seed).numbered(number) for seed in (0, 1) for number in range(100)]
    assert settings[0] == Sampling(seed=0) and len({each.seed for each in settings}) == 200
    assert all(-(2**63) <= each.seed < 2**63 and math.isfinite(each.temperature) for each in settings)
