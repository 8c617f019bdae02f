"""The GPT: embedding, blocks, last norm and head. Its settings are in `lit_llm.models.config`.

Shape letters: B sequences, T positions in the input, S positions so far, d ``n_embd``, V vocabulary, P vocabulary padded to a
multiple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_llm.core._torch import IGNORED
from lit_llm.core.dtensor import draw_
from lit_llm.core.errors import refuse
from lit_llm.models.attention import Visibility, visibilities
from lit_llm.models.attention_kernel_choice import AttentionKernel
from lit_llm.models.block import AheadInput, Block
from lit_llm.models.cache import KVCache
from lit_llm.models.config import GPTConfig
from lit_llm.models.dropout import Drops, drop, make_drops, new_seed
from lit_llm.models.experts import Experts, StackedLinear
from lit_llm.models.loss import LossConfig, LossSums, VocabularyShards, cross_entropy, logits, with_ahead, with_routers
from lit_llm.models.rotary import PositionsInDocuments, RotaryTable, Rotation, document_numbers, places_in
from lit_llm.models.router import Router, RouterSums
from lit_llm.models.self_attention import Attention
from lit_llm.models.sequence_shard import SequenceShard
from lit_llm.models.short_convolution import ShortConvolution
from lit_llm.models.small_layers import make_norm

__all__ = ["GPT", "GPTConfig", "KVCache"]

LossFunction = Callable[..., LossSums]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class View:
    """Record of the inputs of embedding and blocks for one batch, except activations: ids, positions, rotary angles, masks.

    T includes padding, because ranks that share a sequence (context parallelism), or split it for norms (tensor parallelism),
    need equally many positions. With `shard`, T is the number of this rank's positions, which may not be contiguous.
    """

    input_ids: Tensor
    """(B, T) int64, the token ids at this rank's positions."""
    whole_ids: Tensor
    """(B, length) int64, the token ids of the whole sequence without padding."""
    documents: Tensor | None
    """(B, length + padding) document numbers of the whole sequence. None: each sequence is one document."""
    positions: Tensor
    """int64 position numbers: (1, T), or (B, T) if positions restart in each document."""
    rotations: list[Rotation]
    """Cosine and sine of the rotary angles, for each table in `GPT.rotary`."""
    sees: dict[int | None, Visibility]
    """Attention window → which keys each position sees, for each window that some layer has (None: no window)."""
    drops: Drops | None = None
    """The numbers from which dropout masks are computed. None: nothing is dropped."""
    shard: SequenceShard | None = None
    """How ranks share the sequence. None: this rank has whole sequences."""
    counted: Tensor | None = None
    """(B, T) bool: the positions whose targets count, for the sums of routers. None: no sums are computed."""
    router_sums: list[RouterSums] = field(default_factory=list)
    """The routers' sums, one per block with experts, which `run_blocks` appends."""

    @property
    def length(self) -> int:
        """Number of positions of the whole sequence, without padding."""
        return self.whole_ids.size(1)

    def ahead(self, targets: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return (ids, targets), (B, length) each, which have at position t the token at t + k and the token at t + k + 1.

        The target is -100 if position t + k is beyond the sequence, or in another document than position t.

        Args:
            targets: (B, length), the next token of each position.
        """
        length = self.length
        ids, targets = F.pad(self.whole_ids, (0, k))[:, k:], F.pad(targets, (0, k), value=IGNORED)[:, k:]
        if self.documents is not None:
            here = self.documents[:, :length]
            targets = targets.masked_fill(F.pad(here, (0, k))[:, k:] != here, IGNORED)
        return ids, targets


class GPT(nn.Module):
    """Decoder-only transformer.

    Raises:
        UserError: the configuration is invalid; the message lists every reason.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.vocabulary_shards: VocabularyShards | None = None  # set if the vocabulary is split over ranks
        self.sequence_shard: SequenceShard | None = None  # set if ranks share each sequence in training and validation
        self.attention_kernel: AttentionKernel = "auto"  # `compute.attention`
        self.ahead_weight = LossConfig.ahead_weight  # `loss.ahead_weight`
        self.drops = config.dropout > 0
        """Whether training uses dropout. `apply_lora` sets this to True if adapters have dropout."""
        problems = config.problems()
        if config.vocab_size is None:
            problems.append("model.vocab_size is null, and there is no data to take it from (--model.vocab_size)")
        refuse(problems)
        self.config = config
        device = torch.get_default_device()
        # Build on the meta device, then initialise. The random draws then do not depend on the device, and torch's default
        # initialisation is skipped.
        with torch.device("meta"):
            self._build(config)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    def _build(self, config: GPTConfig) -> None:
        self.embedding = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        # Layers with equal settings share a table of angles.
        self.layers = [config.layer(i) for i in range(config.n_blocks)]
        self.blocks = nn.ModuleList(
            Block(config, experts=layer.experts, ahead=i >= config.n_layer) for i, layer in enumerate(self.layers)
        )
        self.norm = make_norm(config)
        # A tied head is not a module, so that the matrix is one parameter and is counted, sharded and saved once.
        self.head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.rotary = nn.ModuleList()
        self.rotary_of: list[int | None] = []
        """For each block, the index of its table in `rotary`; None for a block without rotary embedding."""
        kinds: list[tuple[float, dict[str, Any] | None]] = []
        for layer in self.layers:
            kind = layer.rope_theta, layer.rope_scaling
            if layer.rope and kind not in kinds:
                kinds.append(kind)
                self.rotary.append(RotaryTable(config.block_size, config.rotated_dims, *kind))
            self.rotary_of.append(kinds.index(kind) if layer.rope else None)

    @torch.no_grad()
    def init_weights(self) -> None:
        """(Re)initialise all parameters and buffers. Required after `to_empty` on a model built on the meta device."""
        config = self.config
        assert config.vocab_size is not None
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | StackedLinear | Router | AheadInput | nn.Embedding):
                std = config.residual_std if name.endswith(".project") else config.hidden_std
                std = config.init_std if isinstance(module, nn.Embedding) else std
                draw_(module.weight, partial(nn.init.normal_, std=std))
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    nn.init.zeros_(bias)
            if isinstance(module, Router):
                module.reset_buffers()
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, Attention) and module.sinks is not None:
                nn.init.zeros_(module.sinks)
            elif isinstance(module, ShortConvolution):
                # A block's input convolutions add values with the variance of their input; those of q, k and v add zero.
                std = 0.0 if ".attention." in name else module.positions**-0.5
                draw_(module.weight, partial(nn.init.normal_, std=std))
            elif isinstance(module, RotaryTable):
                module.fill()
        output = self.embedding if self.head is None else self.head
        draw_(output.weight, partial(nn.init.normal_, std=config.head_std))
        reset_adapters(self)  # last, so that adapters change no other weight

    @property
    def size_ratios(self) -> tuple[float, float] | None:
        """(n_embd / base_width, n_layer / base_depth), by which `optim.optimizer_of` scales learning rates. None: no bases."""
        return self.config.size_ratios

    @property
    def routers(self) -> list[Router]:
        """The routers of the blocks with experts, in the order of the blocks."""
        return [block.mlp.router for block in self.blocks if isinstance(block.mlp, Experts)]

    @property
    def ties_head(self) -> bool:
        """Whether the embedding matrix is also the output matrix."""
        return self.head is None

    @property
    def embeds_twice(self) -> bool:
        """Whether a pipeline's last stage also needs the embedding: as output matrix, or for the tokens of `predict_ahead`."""
        return self.ties_head or self.config.predict_ahead > 0

    @property
    def head_weight(self) -> Tensor:
        """The output matrix (P, d); if tensor-parallel ranks split the vocabulary, this rank's rows of it, (P / ranks, d)."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        *,
        loss: LossFunction = cross_entropy,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return logits, or with targets the sums of the loss. The head runs inside forward, where FSDP gathers its shards.

        Args:
            input_ids: (B, T) int64, T at most block_size (cached positions included).
            targets: (B, T) int64, the id that follows each position; -100 is ignored.
            loss: `lit_llm.models.loss.cross_entropy`, or `chunked_cross_entropy`, with settings bound by `functools.partial`.
            cache: keys and values of the positions before `input_ids`; extended in place.
            documents: (B, T) document numbers, which never decrease along a sequence: attention stays within a document, and
                positions restart in each. None: with `mask_documents`, each end-of-document id opens a document. With a cache,
                (B, S) for all positions so far; None: all positions are one document.
            seed: scalar int64 that determines dropout in training. None: a seed is drawn from the CPU's generator.

        Returns:
            Without targets (B, T, V) fp32 logits; every rank computes the whole sequence. With targets the `LossSums` over all
            counted targets, or with `sequence_shard` over the targets at this rank's positions. In training, this loss
            includes the tokens of `predict_ahead`.
        """
        view = self.view(input_ids, documents, cache, seed, shard=None if targets is None else self.sequence_shard)
        if targets is not None:
            view = self.counting(view, targets)
        x = self.run_blocks(self.embed(view), view, cache)
        result = self.finish(x, view, targets, loss)
        return with_routers(result, view.router_sums) if isinstance(result, LossSums) and view.router_sums else result

    def view(
        self,
        input_ids: Tensor,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        seed: Tensor | None = None,
        *,
        shard: SequenceShard | None = None,
    ) -> View:
        """Make the `View` of a batch: the ids, positions, rotary angles and masks for the blocks. Arguments as in `forward`.

        Args:
            shard: how ranks share the sequence; the view has only this rank's positions. None: the view has all positions.
        """
        config = self.config
        start = 0 if cache is None else cache.length
        length = input_ids.size(1)
        assert start + length <= config.block_size, f"{start + length} positions > block_size {config.block_size}"
        assert documents is None or config.mask_documents or cache is not None
        if documents is None and cache is None and config.mask_documents and config.eos_id is not None:
            documents = document_numbers(input_ids, config.eos_id)
        assert cache is None or self.vocabulary_shards is None, "tensor parallelism splits positions over ranks: no cache"
        whole_ids, padding = input_ids, self._padding(length, shard)
        if padding:  # attention is causal, so it affects no other position
            input_ids = F.pad(input_ids, (0, padding))
            if documents is not None:
                documents = F.pad(documents, (0, padding), value=torch.iinfo(documents.dtype).max)
        end = start + length + padding
        positions = torch.arange(start, end, device=input_ids.device)[None]  # (1, T)
        places = None if documents is None else places_in(documents)
        if padding:  # the tables may have no rows for positions of the padding
            places = places or PositionsInDocuments(positions, torch.full_like(positions, length))
            places = places._replace(positions=places.positions.clamp(max=config.block_size - 1))
        if places is not None and start:
            places = PositionsInDocuments(*(each[:, start:] for each in places))
        positions = positions if places is None else places.positions
        rotations = [table(start, end, places) for table in self.rotary]
        sees = visibilities(config, input_ids, documents, self.attention_kernel, cached=start, shard=shard)
        drops = None
        if self.training and self.drops:
            drops = self._drops(new_seed() if seed is None else seed, input_ids, shard)
        if shard is not None:
            input_ids, positions = shard.take(input_ids), shard.take(positions)
            rotations = [(shard.take(cos, dim=-2), shard.take(sin, dim=-2)) for cos, sin in rotations]
        return View(input_ids, whole_ids, documents, positions, rotations, sees, drops, shard)

    def counting(self, view: View, targets: Tensor) -> View:
        """Return a copy of `view` whose `counted` marks the positions with a counted target, of those that this rank's blocks
        compute. Without experts, return `view`.

        Args:
            targets: (B, T), the next token ids of the whole sequence; -100 does not count.
        """
        if self.config.moe is None:
            return view
        counted = targets != IGNORED
        counted = (
            F.pad(counted, (0, self._padding(view.length, None))) if view.shard is None else self.own_positions(counted, 0)
        )
        if (shards := self.vocabulary_shards) is not None:
            counted = counted.chunk(shards.group.size(), dim=1)[shards.group.rank()]
        return replace(view, counted=counted)

    def _padding(self, length: int, shard: SequenceShard | None) -> int:
        """Number of positions to add to a sequence of `length`, so that all ranks have equally many positions."""
        return -length % ((1 if shard is None else shard.multiple) * self._norm_ranks)

    def own_positions(self, values: Tensor, fill: int) -> Tensor:
        """Take from values of whole sequences, (B, T, …), the values at this rank's positions. Without `sequence_shard`: all.

        Args:
            fill: the value at padding positions, which are added so that all ranks have equally many.
        """
        if (shard := self.sequence_shard) is None:
            return values
        further = (0, 0) * (values.dim() - 2)
        return shard.take(F.pad(values, (*further, 0, self._padding(values.size(1), shard)), value=fill))

    @property
    def _norm_ranks(self) -> int:
        """Number of tensor-parallel ranks, which split the positions for norms (sequence parallelism)."""
        return 1 if self.vocabulary_shards is None else self.vocabulary_shards.group.size()

    def stream_length(self, length: int, *, split: bool) -> int:
        """Number of positions that the residual stream between blocks has on this rank, for a sequence of `length` positions.

        Args:
            split: whether forward gets targets: only then do ranks share the sequence as `sequence_shard` says.
        """
        shard = self.sequence_shard if split else None
        ranks = self._norm_ranks * (1 if shard is None else shard.ranks)
        return (length + self._padding(length, shard)) // ranks

    def _drops(self, seed: Tensor, input_ids: Tensor, shard: SequenceShard | None) -> Drops:
        """Return the `Drops` (dropout numbers) of a micro-batch. `input_ids`: (B, T) ids of the whole sequence on all ranks."""
        config, shards = self.config, self.vocabulary_shards
        shared = 0 if config.moe is None else config.moe.width_of_shared(config.hidden_width)
        heads = config.n_head * config.resolved_head_dim
        inside = (heads,) if config.latent is None else (heads, *config.latent.widths(config.n_head))
        batch, length = input_ids.shape
        drops = make_drops(
            seed,
            layers=config.n_blocks,
            batch=batch,
            positions=torch.arange(length, device=input_ids.device),
            width=max(length, config.n_embd, config.hidden_width, shared, *inside),
        )
        if shard is not None:
            own = shard.take(drops.rows)
            drops = drops._replace(rows=own, stream=own, queries=drops.rows if shard.kind == "heads" else own)
        if shards is None:
            return drops
        return drops._replace(stream=drops.rows.chunk(shards.group.size(), dim=1)[shards.group.rank()])

    def embed(self, view: View) -> Tensor:
        """Return the input of the first block, (B, T, d). Under tensor parallelism, this input and the outputs of all blocks
        are (B, T / ranks, d)."""
        x = self._look_up(view.input_ids)
        if self.positions is not None:
            x = x + self.positions(view.positions)  # (1, T, d) or (B, T, d)
        return x if view.drops is None else drop(x, self.config.dropout, view.drops.of(-1), 0)

    def _look_up(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        return x if self.config.embedding_scale is None else x * self.config.embedding_scale

    def run_blocks(
        self,
        x: Tensor,
        view: View,
        cache: KVCache | None = None,
        layers: range | None = None,
        later: Tensor | None = None,
    ) -> Tensor:
        """Run the blocks with the numbers `layers` (None: all but the blocks of `predict_ahead`): (B, T, d) → (B, T, d).
        `later`: embeddings (B, T, d) of later tokens, for a block of `predict_ahead`."""
        for i in range(self.config.n_layer) if layers is None else layers:
            table = self.rotary_of[i]
            rotation = None if table is None else view.rotations[table]
            x = self.blocks[i](
                x,
                rotation,
                view.sees[self.layers[i].window],
                None if cache is None else cache.layers[i],
                None if view.drops is None else view.drops.of(i),
                *(() if view.counted is None else (view.counted,)),
                **({} if later is None else {"later": later}),
            )
            if isinstance(x, tuple):  # the block has experts
                x, sums = x
                view.router_sums.append(sums)
        return x

    def finish(self, x: Tensor, view: View, targets: Tensor | None, loss: LossFunction) -> Tensor | LossSums:
        """Return logits for the last block's output x (B, T, d), or with targets the sums of the loss.

        In training, these sums include the losses of the further tokens of `predict_ahead`. For the k-th further token, block
        n_layer + k - 1 combines the output of the block before it with the embedding of the token k positions later. Each k
        has its own block; embedding, last norm and head are the model's.
        """
        sums, n_layer = self._head(x, view, targets, loss), self.config.n_layer
        if targets is None or not self.training or not self.config.predict_ahead:
            return sums
        ahead: list[Any] = []
        for i in range(n_layer, self.config.n_blocks):
            ids, further = view.ahead(targets, i - n_layer + 1)
            ids = F.pad(ids, (0, self._padding(view.length, view.shard)))
            later = self._look_up(ids if view.shard is None else view.shard.take(ids))
            if view.drops is not None:
                later = drop(later, self.config.dropout, view.drops.of(-1), 0)
            x = self.run_blocks(x, view, layers=range(i, i + 1), later=later)
            ahead.append(self._head(x, view, further, loss))
        assert isinstance(sums, LossSums)
        return with_ahead(sums, ahead, self.ahead_weight)

    def _head(self, x: Tensor, view: View, targets: Tensor | None, loss: LossFunction) -> Tensor | LossSums:
        """Apply the last norm and the head: (B, T, d) → logits, or the sums of the loss."""
        config, shards = self.config, self.vocabulary_shards
        assert config.vocab_size is not None
        x = self.norm(x)
        if view.shard is not None:
            assert targets is not None
            targets = self.own_positions(targets, IGNORED)  # (B, T), padding is not counted
        elif x.size(1) > view.length:
            x = x[:, : view.length]
        if config.logit_scale != 1.0:
            x = x * config.logit_scale
        if targets is None:
            return logits(x, self.head_weight, vocab_size=config.vocab_size, softcap=config.logit_softcap, shards=shards)
        return loss(x, self.head_weight, targets, vocab_size=config.vocab_size, softcap=config.logit_softcap, shards=shards)

    def num_parameters(self) -> int:
        """Number of parameters. A tied matrix counts once."""
        return sum(p.numel() for p in self.parameters())


def without_ahead(weights: dict[str, T], config: GPTConfig) -> dict[str, T]:
    """Return `weights`, a dict by parameter name, without the entries of the blocks of `predict_ahead`."""
    left_out = tuple(f"blocks.{i}." for i in range(config.n_layer, config.n_blocks))
    return {name: weight for name, weight in weights.items() if not name.startswith(left_out)}


def weights_on_meta(config: GPTConfig) -> dict[str, Tensor]:
    """Return the state_dict of a model with these settings on the meta device: shapes and dtypes without values."""
    with torch.device("meta"):
        return GPT(config).state_dict()


def reset_adapters(model: nn.Module) -> None:
    """Initialise all LoRA adapters of a model. The random draws are the same on any number of ranks."""
    for module in model.modules():
        reset: Any = getattr(module, "reset_adapter", None)  # `lora.Adapted` has it, and imports this file
        if reset is not None:
            reset()
