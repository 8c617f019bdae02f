"""Sampling text from a model, with a key/value cache."""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.core.errors import UserError, refuse
from lit_llm.core.number_domain import Domain, ranges_of, whole
from lit_llm.models.config import GPTConfig
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, KVCache
from lit_llm.models.rotary import RotaryTable
from lit_llm.tokenizers import Tokenizer

_NONE = -1
"""The id that `_chosen` returns if no id can be chosen, because logits are NaN or infinite."""


@dataclass(frozen=True)
class Sampling:
    """Record of the settings for drawing the next token.

    Args:
        temperature: divides the logits; 0 always takes the most likely id. Other values below 0.001 are refused, because the
            logits would overflow.
        top_k: sample from the k most likely ids; None: from all ids.
        top_p: sample from the smallest set of most likely ids whose probability reaches p (Holtzman et al. 2020); None: all.
        seed: seed of the random draws, which are equal on every device.

    Raises:
        UserError: a setting is out of range; the message lists every reason.
    """

    temperature: Annotated[float, Domain(0.001, also=(0,))] = 0.8
    top_k: Annotated[int | None, whole(1)] = 50
    top_p: Annotated[float | None, Domain(0, 1, above_low=True)] = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems = (domain.problem(name, getattr(self, name)) for name, domain in ranges_of(Sampling).items())
        refuse(filter(None, problems))

    def numbered(self, number: int) -> Sampling:
        """Return these settings for text `number` of several texts, with a seed of its own. Text 0 has the seed `self.seed`."""
        drawn = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(drawn, "little", signed=True)) if number else self

    def probabilities(self, logits: Tensor) -> Tensor:
        """(V,) fp32 logits → (V,) probabilities, zero for ids outside top_k or top_p. Needs a temperature above 0."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.numel():
            kept = logits.topk(self.top_k).indices  # exactly k, even with ties
            logits = torch.full_like(logits, -torch.inf).scatter_(0, kept, logits[kept])
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True)
            before = (
                ordered.cumsum(0) - ordered
            )  # (V,): total probability of more likely ids; 0 for the most likely id, so it is always kept
            probabilities = torch.zeros_like(probabilities).scatter_(0, ids, ordered * (before < self.top_p))
            probabilities = probabilities / probabilities.sum()
        return probabilities


class Texts:
    """Texts that a model continues. The texts' keys and values are cached, and reused for texts with the same beginning.

    Shorter texts are padded on the left. The padding is a document of its own, which no text attends to. Tensor-parallel,
    pipelined and custom models have no cache: they compute all positions of each text again, as all models do without
    `use_cache`.
    """

    def __init__(self, model: GPT | CustomModel, *, use_cache: bool = True) -> None:
        self.model = model
        self._has_cache = use_cache and isinstance(model, GPT) and model.vocabulary_shards is None
        # LongRoPE rotates all positions of a longer text in another way: cached keys are then invalid.
        tables = [module for module in model.modules() if isinstance(module, RotaryTable)]
        self._short_contexts = {table.short_context for table in tables if table.short_context is not None}
        self._cache: KVCache | None = None
        self._cached: list[list[int]] = []
        self._padding: list[int] = []
        self._tables: list[int] = []

    def logits(self, texts: list[list[int]], *, room: int = 0) -> Tensor:
        """Return the logits (B, V) of the next id of each of B texts of at most block_size ids. The cache keeps these texts.

        Args:
            room: number of further positions for which the cache allocates memory.
        """
        config, device = self.model.config, next(self.model.parameters()).device
        if not self._has_cache:
            rows = [torch.tensor([text], device=device) for text in texts]  # (1, T) each
            known = ({"documents": torch.zeros_like(ids)} if config.mask_documents else {} for ids in rows)
            return torch.cat([self.model(ids, **more)[:, -1] for ids, more in zip(rows, known, strict=True)])
        tables = [sum(len(text) > short for short in self._short_contexts) for text in texts]
        kept = self._shared(texts) if tables == self._tables else 0
        if kept == 0 or self._cache is None:
            width = max(len(text) for text in texts)
            self._cache, self._tables = KVCache(config, min(config.block_size, width + room)), tables
            self._padding = [width - len(text) for text in texts]
        # If the pass is interrupted, the cache holds the kept positions only.
        self._cache.cut(kept)
        self._cached = [text[: max(kept - padding, 0)] for text, padding in zip(texts, self._padding, strict=True)]
        padded = [[0] * padding + text for text, padding in zip(texts, self._padding, strict=True)]
        ids = torch.tensor([row[kept:] for row in padded], device=device)  # (B, T)
        documents = None
        if any(self._padding):
            places = torch.arange(len(padded[0]), device=device)  # (S,)
            documents = places.ge(torch.tensor(self._padding, device=device)[:, None]).long()  # (B, S): 0 is padding
        logits = self.model(ids, cache=self._cache, documents=documents)
        self._cached = texts
        return logits[:, -1]

    def keep(self, rows: list[int]) -> None:
        """Remove all texts from the cache except the texts with these row numbers."""
        if self._cache is None:
            return
        self._cached = [self._cached[i] for i in rows]
        self._padding, self._tables = [self._padding[i] for i in rows], [self._tables[i] for i in rows]
        self._cache.keep(rows)

    def _shared(self, texts: list[list[int]]) -> int:
        """Return how many of the first cached positions, with padding, can be reused for all these texts. The last position of
        a text never counts, so that the model has a position to compute. 0: nothing in the cache can be used."""
        if len(texts) != len(self._cached):
            return 0
        widths = {padding + len(text) for text, padding in zip(texts, self._padding, strict=True)}
        if len(widths) > 1 or max(widths) > self.model.config.block_size:
            return 0
        same = map(_common, texts, self._cached)
        return min(max(widths) - 1, *(padding + n for padding, n in zip(self._padding, same, strict=True)))


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix of two texts."""
    size = min(len(one), len(other))
    return size if one[:size] == other[:size] else next(i for i in range(size) if one[i] != other[i])


def generate(
    model: GPT | CustomModel,
    prompt: list[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_id: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Return an iterator over the ids that continue a prompt. Arguments as in `generate_all`; `sampling` None: `Sampling()`."""
    most, texts, samplings = max_new_tokens, Texts(model, use_cache=use_cache), [sampling or Sampling()]
    ids = generate_all(texts, [prompt], max_new_tokens=most, samplings=samplings, stop_id=stop_id, vocab_size=vocab_size)
    return (token for _, token in ids)


@torch.no_grad()
def generate_all(
    texts: Texts,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    samplings: list[Sampling],
    stop_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Continue several prompts at once. Yields (number of a prompt, its next id), as if each prompt were continued alone.

    A text ends after `max_new_tokens`, or before `stop_id`, or with a warning if logits are NaN or infinite.

    A prompt and its continuation are one document, even if the prompt has an end-of-document id, which may end a turn.

    When a context exceeds `block_size`, its older half is dropped and the cache is rebuilt. So the model computes O(1)
    positions for each new token on average. Without a cache, it computes the whole context for each new token.

    Args:
        texts: the model, and its cache of earlier texts.
        prompts: the ids of each prompt, at least one id each.
        samplings: the sampling settings of each prompt.
        vocab_size: only ids below this number are sampled, because the tokenizer cannot decode other ids, which published
            models may have. None: all ids of the model.
    """
    assert all(prompts), "a prompt has at least one id"
    model = texts.model
    # Separate CPU generators: the same text on every device, and no effect on the random state of a training run.
    generators = [torch.Generator().manual_seed(sampling.seed) for sampling in samplings]
    device, block_size = next(model.parameters()).device, model.config.block_size
    distributed = any(isinstance(p, DTensor) for p in model.parameters())
    was_training = model.training
    model.eval()
    try:
        active, contexts = list(range(len(prompts))), [prompt[-block_size:] for prompt in prompts]
        for number in range(max_new_tokens):
            contexts = [each if len(each) <= block_size else each[-max(block_size // 2, 1) :] for each in contexts]
            with _uncompiled():
                logits = texts.logits(contexts, room=max_new_tokens - number)
            last = logits[:, :vocab_size].float().cpu()  # (B, V)
            tokens = [_chosen(row, samplings[i], generators[i]) for row, i in zip(last, active, strict=True)]
            if distributed:  # rounding may differ between ranks, and different tokens would deadlock
                agreed = torch.tensor(tokens, device=device)
                dist.broadcast(agreed, src=0)
                tokens = agreed.tolist()
            if _NONE in tokens and (not dist.is_initialized() or dist.get_rank() == 0):
                warnings.warn("The text ends here: the model's logits are NaN or infinite.", stacklevel=2)
            going = [place for place, token in enumerate(tokens) if token not in (_NONE, stop_id)]
            yield from ((active[place], tokens[place]) for place in going)
            if not going:
                return
            if len(going) < len(active):
                texts.keep(going)
            active, contexts = [active[i] for i in going], [[*contexts[i], tokens[i]] for i in going]
    finally:
        model.train(was_training)


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Context manager in which compiled blocks run eagerly: a new length would recompile them. Does not import Dynamo."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the next id, sampled or the most likely, for logits (V,); `_NONE` if logits are NaN or infinite."""
    if not math.isfinite(float(logits.max())):  # a model may exclude ids by -inf
        return _NONE
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(sampling.probabilities(logits), 1, generator=generator))


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, prefix: Sequence[int] = ()) -> list[int]:
    """Return the token ids of a prompt that starts a document: first BOS, if the tokenizer has BOS, then the text's ids.

    An empty prompt without BOS becomes the end-of-document id, after which documents start.

    Args:
        prefix: ids to start with instead of BOS, from `SavedRun.prompt_start`. Empty: BOS, if the tokenizer has it.

    Raises:
        UserError: there is no id to start from, or the tokenizer does not know an id of `prefix`.
    """
    if unknown := [i for i in prefix if i >= tokenizer.vocab_size]:
        raise UserError(f"prompts start with the id {unknown[0]}, but the tokenizer has {tokenizer.vocab_size:,} ids")
    start = prefix or ([] if tokenizer.bos_id is None else [tokenizer.bos_id])
    ids = [*start, *(int(i) for i in tokenizer.encode(prompt))]
    if ids:
        return ids
    if tokenizer.eos_id is None:
        raise UserError("The prompt is empty, and the tokenizer has no end-of-document id to start from (--prompt).")
    return [tokenizer.eos_id]


def end_id(tokenizer: Tokenizer, model: GPTConfig) -> int | None:
    """The end-of-document id, which ends a text: the model's `eos_id`, or else the tokenizer's; None if both are None."""
    return tokenizer.eos_id if model.eos_id is None else model.eos_id


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text that each id adds, and one last piece of text. If a token ends inside a character, the character is
    yielded with the token that completes the character, or at the end."""
    known: list[int] = []
    given = ""
    for token in ids:
        known.append(token)
        text = tokenizer.decode(known)
        text = given if text.endswith("\N{REPLACEMENT CHARACTER}") else text
        yield text[len(given) :]
        given = text
    yield tokenizer.decode(known)[len(given) :]
