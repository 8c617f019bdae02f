"""Sampling against distributions worked out by hand, and the cache against no cache."""

import pytest
import torch
from models.test_gpt import naive

from lit_llm.models.generation import Sampling, generate, prompt_ids
from lit_llm.models.gpt import GPT, GPTConfig
from lit_llm.tokenizers import Bytes


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(2, 2, n_embd=16, block_size=12, vocab_size=31, zero_init_projections=False, init_std=0.5)).eval()


LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def test_temperature_sharpens_by_its_inverse_power():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1]) ** 2
    torch.testing.assert_close(Sampling(temperature=0.5, top_k=None).probabilities(LOGITS), p / p.sum())


def test_top_k_keeps_exactly_k():
    torch.testing.assert_close(Sampling(1.0, 2).probabilities(LOGITS), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    ties = Sampling(1.0, 2).probabilities(torch.zeros(5))
    assert (ties > 0).sum() == 2


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    for p, kept in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.91, 4), (1.0, 4)):
        assert int((Sampling(1.0, None, p).probabilities(LOGITS) > 0).sum()) == kept, p


def test_samples_follow_the_distribution():
    generator = torch.Generator().manual_seed(1)
    p = Sampling(1.0, None, 0.95).probabilities(LOGITS)
    draws = torch.multinomial(p, 40_000, replacement=True, generator=generator).bincount(minlength=4) / 40_000
    torch.testing.assert_close(draws, torch.tensor([0.4, 0.3, 0.2, 0.1]), atol=0.01, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_does_not_change_the_text_even_beyond_the_block(model, temperature):
    options = {"max_new_tokens": 40, "sampling": Sampling(temperature, None, None, 3)}
    cached = list(generate(model, [1, 2, 3], **options))
    assert len(cached) == 40  # three times block_size: the context was cut several times
    assert cached == list(generate(model, [1, 2, 3], use_cache=False, **options))


def test_the_cache_keeps_what_convolutions_need_of_earlier_positions():
    torch.manual_seed(2)
    size = {"n_embd": 16, "block_size": 16, "vocab_size": 31, "zero_init_projections": False, "init_std": 0.5}
    model = GPT(GPTConfig(2, 2, **size, qkv_convolution=3, input_convolution=5, exclusive_attention=True)).eval()
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    options = {"max_new_tokens": 40, "sampling": Sampling(1.0, None, None, 3)}
    cached = list(generate(model, [1, 2, 3], **options))
    assert len(cached) == 40  # the context was cut several times
    assert cached == list(generate(model, [1, 2, 3], use_cache=False, **options))


@pytest.mark.parametrize("original", [3, 8])  # the prompt is longer than LongRoPE's original context, or becomes so
def test_a_prompt_and_its_continuation_are_one_document_with_and_without_a_cache(original):
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [5.0] * 4}
    scaling["original_max_position_embeddings"] = original
    torch.manual_seed(1)
    size = {"n_embd": 16, "block_size": 16, "vocab_size": 31, "zero_init_projections": False, "init_std": 0.5}
    model = GPT(GPTConfig(2, 2, **size, mask_documents=True, eos_id=5, rope_scaling=scaling)).eval()
    prompt = [1, 2, 3, 5, 4]
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 10, "sampling": Sampling(temperature, None, None, 3)}
        cached = list(generate(model, prompt, **options))
        assert len(cached) == 10 and cached == list(generate(model, prompt, use_cache=False, **options))
    ids = prompt
    for token in generate(model, prompt, max_new_tokens=10, sampling=Sampling(0.0)):
        logits = naive(model, torch.tensor([ids]), torch.zeros(1, len(ids)))[0, -1]
        assert token == int(logits.argmax())
        ids = [*ids, token]


def test_greedy_takes_the_most_likely_id(model):
    ids = [4, 5]
    for token in generate(model, ids, max_new_tokens=5, sampling=Sampling(0.0)):
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids = [*ids, token]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_of_nan_gives_no_text_and_a_warning(model, temperature):
    model.head.weight.data.fill_(torch.nan)
    with pytest.warns(UserWarning, match="logits are NaN or infinite"):
        assert list(generate(model, [1], max_new_tokens=3, sampling=Sampling(temperature))) == []


def test_ids_that_the_tokenizer_lacks_are_never_taken(model):
    with torch.no_grad():
        model.head.weight[20:] *= 100  # by far the most likely ones, of either sign
    for temperature in (0.0, 1.0):
        ids = list(generate(model, [4], max_new_tokens=12, sampling=Sampling(temperature, None), vocab_size=20))
        assert len(ids) == 12 and max(ids) < 20
    assert max(generate(model, [4], max_new_tokens=12, sampling=Sampling(0.0))) >= 20


def test_the_seed_determines_the_text_and_the_global_generator_is_unchanged(model):
    state = torch.get_rng_state()
    a, b = (list(generate(model, [1], max_new_tokens=8, sampling=Sampling(1.0, seed=5))) for _ in range(2))
    c = list(generate(model, [1], max_new_tokens=8, sampling=Sampling(1.0, seed=6)))
    assert a == b != c
    assert torch.equal(state, torch.get_rng_state())


def test_generation_stops_at_the_stop_id_and_leaves_the_mode_as_it_was(model):
    model.train()
    greedy = list(generate(model, [1], max_new_tokens=8, sampling=Sampling(0.0)))
    stop = greedy[3]
    stopped = list(generate(model, [1], max_new_tokens=8, sampling=Sampling(0.0), stop_id=stop))
    assert stopped == greedy[: greedy.index(stop)]
    assert model.training


def test_an_empty_prompt_begins_after_a_document_end():
    assert prompt_ids(Bytes(), "") == [256]
    assert prompt_ids(Bytes(), "ab") == [97, 98]


def test_a_prompt_starts_with_bos_if_documents_do():
    class WithStart(Bytes):
        bos_id = 1

    assert prompt_ids(WithStart(), "ab") == [1, 97, 98]
    assert prompt_ids(WithStart(), "") == [1]
    assert prompt_ids(WithStart(), "ab", prefix=[2, 3]) == [2, 3, 97, 98]


def test_all_mistakes_are_named():
    with pytest.raises(ValueError) as caught:
        Sampling(-1.0, 0, 1.5)
    assert [flag in str(caught.value) for flag in ("--temperature", "--top_k", "--top_p")] == [True] * 3
