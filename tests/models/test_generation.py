"""Sampling against distributions worked out by hand, and the cache against no cache."""

import pytest
import torch

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


def test_greedy_takes_the_most_likely_id(model):
    ids = [4, 5]
    for token in generate(model, ids, max_new_tokens=5, sampling=Sampling(0.0)):
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids = [*ids, token]


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
