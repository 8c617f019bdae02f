"""Sampling text from a model, with a key/value cache."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.core.errors import UserError, refuse
from lit_llm.models.custom import CustomModel
from lit_llm.models.gpt import GPT, KVCache
from lit_llm.models.rotary import RotaryTable
from lit_llm.tokenizers import Tokenizer

_NONE = -1
"""Instead of a token: there is none to choose."""


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token.

    Raises:
        UserError: if a setting is out of range; the message lists every reason.
    """

    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely id."""
    top_k: int | None = 50
    """Keep the k most likely ids; None keeps all."""
    top_p: float | None = None
    """Keep the smallest set of most likely ids whose probability reaches p (Holtzman et al. 2020); None keeps all."""
    seed: int = 0
    """Seed of the draws. The same seed gives the same draws on every device."""

    def __post_init__(self) -> None:
        found = []
        if not (
            self.temperature == 0 or 1e-3 <= self.temperature < math.inf
        ):  # also rejects NaN; smaller values overflow the logits
            found.append(f"temperature is {self.temperature}, but must be 0 (greedy) or at least 0.001 (--temperature)")
        if self.top_k is not None and self.top_k < 1:
            found.append(f"top_k is {self.top_k}, but must be at least 1, or 0 to keep all (--top_k)")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(f"top_p is {self.top_p}, but must be above 0 and at most 1 (--top_p)")
        refuse(found)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(V,) fp32 logits to (V,) probabilities, zero outside the kept ids. Needs a temperature above 0."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.numel():
            kept = logits.topk(self.top_k).indices  # exactly k, even with ties
            logits = torch.full_like(logits, -torch.inf).scatter_(0, kept, logits[kept])
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True)
            before = (
                ordered.cumsum(0) - ordered
            )  # (V,): total probability of more likely ids; 0 for the first, so it is always kept
            probabilities = torch.zeros_like(probabilities).scatter_(0, ids, ordered * (before < self.top_p))
            probabilities = probabilities / probabilities.sum()
        return probabilities


@torch.no_grad()
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
    """Yield sampled ids one by one, up to `max_new_tokens`, or until `stop_id` (which is not yielded).

    Logits that are NaN or infinite end the text with a warning.

    The prompt and its continuation are one document, also if an end-of-document id is in the prompt: it may end a turn.

    When the context exceeds `block_size`, its older half is dropped and the cache is rebuilt. So a token costs O(1) positions
    on average. Without a cache, each token costs a pass over the whole context.

    Args:
        vocab_size: only ids below it are sampled, because the tokenizer cannot decode others. Published models may have more.
            None: all ids of the model.
    """
    assert prompt, "a prompt has at least one id"
    sampling = sampling or Sampling()
    # A separate CPU generator: the same text on every device, and no effect on the random state of a training run.
    generator = torch.Generator().manual_seed(sampling.seed)
    device, block_size = next(model.parameters()).device, model.config.block_size
    # Tensor-parallel, pipelined and custom models have no cache.
    use_cache = use_cache and isinstance(model, GPT) and model.vocabulary_shards is None
    masks = model.config.mask_documents
    distributed = any(isinstance(p, DTensor) for p in model.parameters())
    was_training = model.training
    model.eval()
    try:
        context = fresh = prompt[-block_size:]
        # LongRoPE rotates all positions of a longer text in another way: their keys in the cache are no longer those.
        tables = (module for module in model.modules() if isinstance(module, RotaryTable))
        rotated_anew = {math.floor(table.short_context) + 1 for table in tables if table.short_context is not None}
        capacity = min(block_size, len(context) + max_new_tokens)
        cache = KVCache(model.config, capacity) if use_cache else None
        for _ in range(max_new_tokens):
            if len(context) > block_size:
                context = fresh = context[-max(block_size // 2, 1) :]
                cache = KVCache(model.config, capacity) if use_cache else None
            elif cache is not None and len(context) in rotated_anew:
                fresh, cache = context, KVCache(model.config, capacity)
            ids = torch.tensor([fresh if use_cache else context], device=device)  # (1, T)
            with torch.compiler.set_stance("force_eager"):  # every length would be compiled anew
                if cache is not None:
                    logits = model(ids, cache=cache)
                else:
                    logits = model(ids, documents=torch.zeros_like(ids)) if masks else model(ids)
            assert isinstance(logits, Tensor)
            last = logits[0, -1, :vocab_size].float().cpu()  # (V,)
            if not math.isfinite(float(last.max())):  # a model may exclude ids by -inf
                token = _NONE
            elif sampling.temperature == 0:
                token = int(last.argmax())
            else:
                token = int(torch.multinomial(sampling.probabilities(last), 1, generator=generator))
            if distributed:  # rounding may differ between ranks, and different tokens would deadlock
                agreed = torch.tensor(token, device=device)
                dist.broadcast(agreed, src=0)
                token = int(agreed)
            if token == _NONE:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    warnings.warn("The text ends here: the model's logits are NaN or infinite.", stacklevel=2)
                return
            if token == stop_id:
                return
            yield token
            context, fresh = [*context, token], [token]
    finally:
        model.train(was_training)


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, prefix: Sequence[int] = ()) -> list[int]:
    """Token ids of the prompt, which starts a document: after BOS if the model was trained with it.

    An empty prompt without BOS becomes the end-of-document id, after which documents start.

    Args:
        prefix: ids to start with instead of BOS, such as those of `lit_llm.runs.saved_run`.

    Raises:
        UserError: if there is no id to start from, or the tokenizer does not know one of `prefix`.
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
