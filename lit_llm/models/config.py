"""The configuration of a GPT. Its settings express GPT-2, LLaMA, Mistral and others; no code depends on a model's name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from lit_llm.core.number_domain import Domain, above, below, ranges_of, shown, whole
from lit_llm.models.experts_config import MoEConfig
from lit_llm.models.latent_config import LatentConfig
from lit_llm.models.rope_scaling import rope_scaling_problems

RopeScaling: TypeAlias = dict[str, bool | float | str | list[float]]


class LayerSettings(NamedTuple):
    """Record of the settings of one block that `GPTConfig.layers` can set block by block. `GPTConfig` explains the fields."""

    window: int | None
    rope: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    experts: bool


class Mistake(NamedTuple):
    """Record of a reason why a model cannot be built: a sentence `what`, and the command-line flags that mend the mistake."""

    what: str
    flags: str
    """The command-line flags that mend the mistake, for example "--model.n_kv_head"."""

    def __str__(self) -> str:
        return f"{self.what} ({self.flags})"


@dataclass
class GPTConfig:
    """The model's architecture.

    With the defaults, a small model learns more per token than with GPT-2's settings (docs/evidence/measurements.md).
    """

    n_layer: Annotated[int, whole(1, 4096)] = 6
    """Number of blocks."""
    n_head: Annotated[int, whole(1, 100_000)] = 6
    """Number of query heads; must divide n_embd unless head_dim is given."""
    n_kv_head: Annotated[int | None, whole(1, 100_000)] = None
    """Number of key/value heads; must divide n_head. None: n_head (multi-head attention). Fewer: grouped-query attention."""
    n_embd: Annotated[int, whole(1, 1_000_000)] = 384
    """Width of the residual stream."""
    head_dim: Annotated[int | None, whole(1, 65_536)] = None
    """Width of one attention head. None: n_embd / n_head."""
    latent: LatentConfig | None = None
    """Settings of multi-head latent attention (DeepSeek-V2). None: ordinary queries, keys and values."""
    block_size: Annotated[int, whole(1, 1_000_000_000)] = 256
    """Longest context, in tokens."""
    vocab_size: Annotated[int | None, whole(1, 100_000_000)] = None
    """Number of token ids. None: the number of ids of the data's tokenizer."""
    mlp: Literal["gelu", "relu2", "swiglu", "geglu", "clamped_swiglu"] = "relu2"
    """MLP kind; swiglu, geglu and clamped_swiglu (GPT-OSS) have a third matrix, the gate."""
    mlp_width: Annotated[int | None, whole(1, 10_000_000)] = None
    """Hidden width of the MLP. None: 4 * n_embd."""
    moe: MoEConfig | None = None
    """Settings of a mixture of experts in place of the MLP. Each expert is an MLP with the settings mlp and mlp_bias. None: no
    experts."""
    gelu_approximate: Literal["none", "tanh"] | None = None
    """Approximation of gelu and geglu, as in torch. None: tanh in gelu (GPT-2), none in geglu."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Normalisation in the blocks and before the head."""
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    """What a block normalises. pre: the inputs of attention and MLP; post: their outputs (OLMo 2); sandwich: both (Gemma 2)."""
    norm_eps: Annotated[float, above(0, 1)] = 1e-5
    """Epsilon of all norms except the norms of latents in latent attention."""
    norm_unit_offset: bool = False
    """Whether the gain of RMSNorm is 1 + weight (Gemma) instead of weight. Norms of latents always have the gain weight."""
    parallel_residual: bool = False
    """Whether attention and MLP read the same input (GPT-NeoX). False: the MLP reads the residual stream after attention.
    True needs norm_position pre."""
    embedding_scale: Annotated[float | None, above(0, 10**6)] = None
    """Factor by which token embeddings are multiplied. None: 1. Gemma: sqrt(n_embd)."""
    residual_scale: Annotated[float, above(0, 10**6)] = 1.0
    """Factor of attention's and the MLP's outputs before these are added to the residual stream (Granite, MiniCPM)."""
    position: Literal["learned", "rope"] = "rope"
    """Kind of position embedding: learned absolute positions (GPT-2), or rotary (half-split, as in Hugging Face's LLaMA)."""
    rope_theta: Annotated[float, above(0, 10**15)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies to a longer context: a dict with rope_type (llama3, linear, yarn or longrope) and the
    values of this type, named as in transformers. None: no scaling."""
    partial_rotary_factor: Annotated[float, Domain(0, 1, above_low=True)] = 1.0
    """Fraction of each head's dimensions, the first ones, to which the rotary embedding is applied (GPT-NeoX: 0.25)."""
    bias: bool = False
    """Whether every linear layer of the blocks, and every LayerNorm, has a bias."""
    qkv_bias: bool | None = None
    """Whether the projections to queries, keys and values have biases (Qwen2 has only these). None: same as bias."""
    attention_output_bias: bool | None = None
    """Whether the output projection of attention has a bias. None: same as bias."""
    mlp_bias: bool | None = None
    """Whether the linear layers of the MLP have biases. None: same as bias."""
    norm_bias: bool | None = None
    """Whether LayerNorm has a bias. None: same as bias."""
    tie_embeddings: bool = False
    """Whether the token embedding and the output head are one matrix."""
    dropout: Annotated[float, below(0, 1)] = 0.0
    """Dropout probability in training, for embeddings, attention weights, and outputs of attention and MLP."""
    qk_norm: bool = True
    """Whether an RMSNorm with a gain normalises queries and keys, before the rotary embedding."""
    qk_norm_width: Literal["head", "projection"] = "head"
    """head: QK-norm normalises each head. projection: QK-norm normalises all heads of a position together (OLMo 2)."""
    qkv_convolution: Annotated[int | None, whole(2, 1024)] = None
    """Kernel size, in positions, of a causal depthwise convolution whose output is added to queries, keys and values (Canon
    layers: 4). Its weights start as zero. None: no convolution."""
    input_convolution: Annotated[int | None, whole(2, 1024)] = None
    """Kernel size, in positions, of a causal depthwise convolution whose output is added to the normalised inputs of attention
    and MLP (Canon layers: 4). Its weights start random: output and input have equal variance. None: no convolution."""
    exclusive_attention: bool = False
    """Whether to remove from each head's output the component along the position's own value vector, which the residual stream
    contains already (exclusive self-attention, Zhai 2026)."""
    window: Annotated[int | None, whole(1, 1_000_000_000)] = None
    """Sliding window: a position attends to itself and the window - 1 positions before it. None: all earlier positions."""
    layers: dict[str, list[bool | int | float | RopeScaling | None]] | None = None
    """Settings per block: setting → list of values, which repeats over the blocks. Example: {window: [512, 512, null]}. The
    settings are window, rope (false: no rotary embedding), rope_theta, rope_scaling and experts (false: an MLP). A list
    replaces the setting of the same name; experts replaces first_dense and every of moe."""
    attention_scale: Annotated[float | None, above(0, 10**6)] = None
    """Factor by which attention scores are multiplied. None: 1 / sqrt(head_dim)."""
    attention_softcap: Annotated[float | None, above(0, 10**6)] = None
    """Soft cap c of attention scores, which become c * tanh(scores / c) (Gemma 2). None: no soft cap."""
    attention_sinks: bool = False
    """Whether each head learns a further logit (sink) in the softmax of its attention, which has no value (gpt-oss)."""
    logit_scale: Annotated[float, above(0, 10**6)] = 1.0
    """Factor by which logits are multiplied, before the soft cap (Granite: 1 / logits_scaling)."""
    logit_softcap: Annotated[float | None, above(0, 10**6)] = None
    """Soft cap c of logits, which become c * tanh(logits / c). None: no soft cap."""
    pad_vocab_to: Annotated[int, whole(1, 1_000_000)] = 64
    """Embedding and head have vocab_size rows, rounded up to a multiple of this. Padding rows are not in logits and loss."""
    init_std: Annotated[float, above(0, 1000)] = 0.02
    """Standard deviation of the initial weights (GPT-2)."""
    zero_init_projections: bool | None = None
    """True: the output projections of attention and MLP start at zero, so blocks start as the identity. False: their std is
    init_std / sqrt(2 * n_layer) (GPT-2). None: true, unless embeddings are tied (the model would predict its input), or a norm
    follows the projections (the norm would divide zero by zero)."""
    base_width: Annotated[int | None, whole(1, 1_000_000)] = None
    """n_embd for which the optimizer's learning rates and init_std are meant. At other widths, rates and initial weights are
    scaled (muP; docs/transfer.md), so that one rate is best for all widths. None: no scaling with the width."""
    base_depth: Annotated[int | None, whole(1, 4096)] = None
    """n_layer for which the optimizer's learning rates are meant. At other depths, the rates of the output projections of
    attention and MLP are scaled (CompleteP). None: no scaling with the depth."""
    predict_ahead: Annotated[int, whole(0, 64)] = 0
    """Number of further tokens that training predicts at each position: multi-token prediction, with one more block for each
    token (DeepSeek-V3; `loss.ahead_weight`). Validation and generation leave these blocks out. 0: the next token only."""
    mask_documents: bool = False
    """Whether attention stays within a document, and positions restart in each document. The data says where documents begin;
    without this information, each eos_id opens a document. In generation, prompt and continuation are one document."""
    eos_id: Annotated[int | None, whole(0, 100_000_000)] = None
    """End-of-document token id. None: the end-of-document id of the data's tokenizer."""

    def __post_init__(self) -> None:
        if isinstance(self.moe, dict):  # as a checkpoint stores it
            self.moe = MoEConfig(**self.moe)
        if isinstance(self.latent, dict):
            self.latent = LatentConfig(**self.latent)

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        if self.latent is not None:
            return self.latent.head_dim
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a head's values."""
        return self.resolved_head_dim if self.latent is None else self.latent.value_head_dim

    @property
    def hidden_width(self) -> int:
        return 4 * self.n_embd if self.mlp_width is None else self.mlp_width

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix, the gate, as with mlp swiglu, geglu or clamped_swiglu."""
        return self.mlp in ("swiglu", "geglu", "clamped_swiglu")

    @property
    def resolved_gelu_approximate(self) -> str:
        return self.gelu_approximate or ("none" if self.mlp == "geglu" else "tanh")

    @property
    def rotated_dims(self) -> int:
        """Number of dimensions of each head to which the rotary embedding is applied."""
        if self.latent is not None:
            return self.latent.rope_head_dim
        return int(self.resolved_head_dim * self.partial_rotary_factor)

    def has_bias(self, part: Literal["qkv", "attention_output", "mlp", "norm"]) -> bool:
        value: bool | None = getattr(self, f"{part}_bias")
        return self.bias if value is None else value

    @property
    def n_blocks(self) -> int:
        """Number of blocks, including the blocks of `predict_ahead`, which come last."""
        return self.n_layer + self.predict_ahead

    def layer(self, index: int) -> LayerSettings:
        """Return the settings of block `index`. The patterns of `layers` repeat through the blocks of `predict_ahead`, too."""

        def of(name: str, default: Any) -> Any:
            pattern = (self.layers or {}).get(name)
            return pattern[index % len(pattern)] if pattern else default

        rope = of("rope", True) and self.position == "rope"
        return LayerSettings(
            of("window", self.window),
            rope,
            of("rope_theta", self.rope_theta),
            of("rope_scaling", self.rope_scaling),
            self.moe is not None and of("experts", self.moe.is_in(index)),
        )

    @property
    def size_ratios(self) -> tuple[float, float] | None:
        """(n_embd / base_width, n_layer / base_depth); a ratio whose base is None is 1. None: both bases are None."""
        if self.base_width is None and self.base_depth is None:
            return None
        return self.n_embd / (self.base_width or self.n_embd), self.n_layer / (self.base_depth or self.n_layer)

    @property
    def hidden_std(self) -> float:
        """Initial standard deviation of a block's matrices except output projections: init_std, or with `base_width`
        init_std / √(n_embd / base_width)."""
        width, _ = self.size_ratios or (1.0, 1.0)
        return self.init_std / math.sqrt(width)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the output projections of attention and MLP: 0 if they start at zero
        (`zero_init_projections`), else hidden_std / √(2 n_layer), with `base_depth` hidden_std √(base_depth / 2) / n_layer."""
        zero = self.zero_init_projections
        if zero is None:
            zero = not self.tie_embeddings and self.norm_position == "pre"
        _, depth = self.size_ratios or (1.0, 1.0)
        return 0.0 if zero else self.hidden_std / math.sqrt(2 * self.n_layer / depth) / depth

    @property
    def head_std(self) -> float:
        """Initial standard deviation of the output matrix.

        The normalised residual stream has norm √d, so logits have variance d·std², and the first loss is ln V + d·std²/2. Up
        to a width of about 1,000, std is init_std (0.02). In wider models, std is less than init_std, so that the first loss
        is within 2 % of ln V. With base_width, std is the base model's std divided by n_embd / base_width, in the same limit.
        """
        assert self.vocab_size is not None
        width, _ = self.size_ratios or (1.0, 1.0)
        widest = math.sqrt(0.04 * math.log(max(self.vocab_size, 2)) / self.n_embd) / self.logit_scale
        return min(self.init_std / width, widest / math.sqrt(max(width, 1.0)))

    @property
    def padded_vocab_size(self) -> int:
        assert self.vocab_size is not None, "vocab_size is resolved before the model is built"
        return math.ceil(self.vocab_size / self.pad_vocab_to) * self.pad_vocab_to

    def problems(self) -> list[str]:
        """Every reason why this model cannot be built, one sentence each, with the flags that mend the mistake."""
        return [str(mistake) for mistake in self.mistakes()]

    def mistakes(self) -> list[Mistake]:
        """Every reason why this model cannot be built, as `Mistake` records: a sentence, and the flags that mend it."""
        ranges = _range_mistakes(self, "model")
        groups = {"model.moe": self.moe, "model.latent": self.latent}
        of_groups = [each for key, group in groups.items() if group for each in _range_mistakes(group, key).values()]
        if of_groups or any(MODEL_DOMAINS[name].whole or name == "partial_rotary_factor" for name in ranges):
            return [*ranges.values(), *of_groups]  # the rules below divide by these
        layers = dict.fromkeys(self._layer_mistakes())  # once: a pattern may have the same wrong value several times
        if not layers and "rope_theta" not in ranges:
            layers = dict.fromkeys(self._block_mistakes())
        return [*self._combination_mistakes(), *layers, *ranges.values()]

    def _combination_mistakes(self) -> Iterator[Mistake]:
        """Yield the mistakes of settings that do not fit together."""
        if self.moe is not None:
            yield from self._experts_mistakes(self.moe)
        if self.latent is not None:
            yield from (Mistake(*each) for each in self.latent.problems(self))
        elif self.head_dim is None and self.n_embd % self.n_head:
            near = _nearest_divisors(self.n_embd, self.n_head)
            yield Mistake(
                f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; the nearest values that do are {near}",
                "--model.n_head, --model.n_embd or --model.head_dim",
            )
        elif self.position == "rope" and (self.rotated_dims % 2 or not self.rotated_dims):
            factor, head_dim = self.partial_rotary_factor, self.resolved_head_dim
            flags = "--model.head_dim, --model.n_head, --model.n_embd or --model.position learned"
            yield Mistake(
                f"rotary positions need an even head_dim, but it is {head_dim}"
                if factor == 1
                else f"rotary positions need an even number of dimensions, but model.partial_rotary_factor={factor:g} of "
                f"head_dim {head_dim} is {self.rotated_dims}",
                flags if factor == 1 else f"--model.partial_rotary_factor, {flags}",
            )
        if self.n_head % self.kv_heads:
            near = _nearest_divisors(self.n_head, self.kv_heads)
            yield Mistake(
                f"model.n_kv_head={self.kv_heads} does not divide model.n_head={self.n_head}; "
                f"the nearest values that do are {near}",
                "--model.n_kv_head",
            )
        if self.tie_embeddings and self.zero_init_projections:
            yield Mistake(
                "model.zero_init_projections with model.tie_embeddings would make the untrained model predict its own input",
                "--model.zero_init_projections null, or --model.tie_embeddings false",
            )
        if self.zero_init_projections and self.norm_position != "pre":
            yield Mistake(
                f"model.zero_init_projections with model.norm_position {self.norm_position} would divide zero by zero in the "
                "norms after attention and MLP",
                "--model.zero_init_projections null",
            )
        if self.size_ratios is not None and self.tie_embeddings:
            yield Mistake(
                "model.base_width and model.base_depth need an output head of its own, because its rate differs from the "
                "embedding's",
                "--model.tie_embeddings false",
            )
        if self.base_depth is not None and self.norm_position != "pre":
            yield Mistake(
                f"model.base_depth needs model.norm_position pre, but it is {self.norm_position}: a norm after the projections "
                "undoes what the depth changes",
                "--model.norm_position pre or --model.base_depth null",
            )
        if self.base_depth is not None and (self.has_bias("attention_output") or self.has_bias("mlp")):
            yield Mistake(
                "model.base_depth needs projections without biases",
                "--model.attention_output_bias false and --model.mlp_bias false, or --model.base_depth null",
            )
        if self.parallel_residual and self.norm_position != "pre":
            yield Mistake(
                f"model.parallel_residual needs model.norm_position pre, but it is {self.norm_position}",
                "--model.norm_position pre",
            )
        if self.predict_ahead >= self.block_size:
            yield Mistake(
                f"model.predict_ahead is {self.predict_ahead}, but must be below model.block_size={self.block_size}, because "
                "no sequence has a token so far ahead",
                "--model.predict_ahead",
            )
        for name, (needed, is_met) in _NEEDS.items():
            value, default = getattr(self, name), getattr(GPTConfig, name)
            if value not in (default, False) and not is_met(self):
                yield Mistake(
                    f"model.{name} is {shown(value)}, but has no effect without {needed}",
                    f"--model.{name} " + shown(default).strip("'"),
                )
        if self.eos_id is not None and self.vocab_size is not None and self.eos_id >= self.vocab_size:
            yield Mistake(
                f"model.eos_id is {self.eos_id}, but must be below model.vocab_size={self.vocab_size}, "
                "or null to follow the data",
                "--model.eos_id",
            )

    def _experts_mistakes(self, moe: MoEConfig) -> Iterator[Mistake]:
        """Yield the mistakes in the experts' settings, alone and with other settings."""
        yield from (Mistake(*each) for each in moe.problems(None if "experts" in (self.layers or {}) else self.n_layer))
        if self.size_ratios is not None:
            yield Mistake(
                "model.base_width and model.base_depth have no rule for the rates of experts",
                "--model.base_width null --model.base_depth null, or --model.moe null",
            )

    def _layer_mistakes(self) -> Iterator[Mistake]:
        """Yield the mistakes in `rope_scaling` and in `layers`."""
        if self.rope_scaling is not None:
            for problem in rope_scaling_problems(self.rope_scaling, self.rotated_dims, "model.rope_scaling"):
                yield Mistake(problem, "--model.rope_scaling")
        for name, pattern in (self.layers or {}).items():
            where = f"model.layers.{name}"
            if name not in LayerSettings._fields:
                near = difflib.get_close_matches(name, LayerSettings._fields, 1, cutoff=0)[0]
                known = ", ".join(LayerSettings._fields)
                yield Mistake(f"{where} is unknown: use one of {known}; the nearest is {near}", "--model.layers")
                continue
            if not isinstance(pattern, list) or not pattern:
                yield Mistake(f"{where} is {shown(pattern)}, but must be a list with at least one value", "--model.layers")
                continue
            if len(pattern) > self.n_blocks:
                yield Mistake(
                    f"{where} has {len(pattern)} values, but the model has {self.n_blocks} blocks: remove "
                    f"{len(pattern) - self.n_blocks} of them",
                    "--model.layers or --model.n_layer",
                )
            if name == "experts" and self.moe is None:
                yield Mistake(f"{where} needs model.moe, but there are no experts", "--model.moe.experts 8")
            if name not in ("window", "experts") and self.position != "rope":
                yield Mistake(f"{where} needs model.position rope, but it is {self.position}", "--model.position rope")
            for value in pattern:
                for problem in self._pattern_problems(name, value, where):
                    yield Mistake(problem, "--model.layers")

    def _pattern_problems(self, name: str, value: Any, where: str) -> Iterator[str]:
        if name == "rope_scaling":
            if value is not None:
                yield from rope_scaling_problems(value, self.rotated_dims, where)
        elif name in ("rope", "experts"):
            if not isinstance(value, bool):
                yield f"{where} has {shown(value)}, but must have true or false"
        elif problem := MODEL_DOMAINS[name].sentence(where, value):
            yield problem

    def _block_mistakes(self) -> Iterator[Mistake]:
        """Yield the mistakes of blocks whose settings are valid alone, but not together."""
        patterns = self.layers or {}
        for i in range(self.n_blocks):
            window, rope, theta, scaling, _ = self.layer(i)
            if window is not None and window >= self.block_size:
                problem = (
                    f"a window of {window} positions has no effect, because model.block_size is {self.block_size}: use null"
                )
                yield Mistake(problem, "--model.layers" if "window" in patterns else "--model.window")
            if rope and scaling is not None and scaling.get("rope_type") == "yarn" and theta <= 1:
                name = "layers.rope_theta" if "rope_theta" in patterns else "rope_theta"
                problem = f"model.{name} is {theta:g}, but must be above 1 with rope_type yarn"
                yield Mistake(problem, f"--model.{name.split('.')[0]}")

    def flops_per_token(self, length: int | None = None) -> float:
        """Return the training FLOPs per token: 6 * N_matmul, and 12 * H * h * min(T, window) for each block's attention.

        T is `length` (None: block_size), H is n_head, h is head_dim and d is n_embd. Scores that the causal mask hides count.
        With latent attention h is the mean width of a head's keys and values. N_matmul is the number of elements of all
        matrices in matrix products: a tied head counts once, an embedding look-up not at all, and of the experts only the
        experts that compute a token. Each token of `predict_ahead` adds a block, a projection of 2 d² elements and the head
        once more. The forward pass takes a third of the FLOPs.
        Source: Kaplan et al. 2020 (6N) and PaLM, appendix B (attention term).
        """
        length = self.block_size if length is None else length
        spans = sum(min(length, self.layer(i).window or length) for i in range(self.n_blocks))
        gated = 3 if self.gated else 2
        attention = 2 * self.n_embd * self.resolved_head_dim * (self.n_head + self.kv_heads)
        if self.latent is not None:
            attention = self.latent.matrices(self.n_embd, self.n_head)
        n_matmul = self.n_blocks * attention + sum(gated * self.n_embd * width for width in self._active_widths())
        n_matmul += (1 + self.predict_ahead) * self.padded_vocab_size * self.n_embd + self.predict_ahead * 2 * self.n_embd**2
        if self.moe is not None:
            n_matmul += self.experts_layers * self.moe.experts * self.n_embd  # the routers
        return 6.0 * n_matmul + 6.0 * self.n_head * (self.resolved_head_dim + self.value_head_dim) * spans

    @property
    def experts_layers(self) -> int:
        """Number of blocks with experts."""
        return sum(self.layer(i).experts for i in range(self.n_blocks))

    def _active_widths(self) -> Iterator[int]:
        """Yield for each block the hidden width of its MLP, or the total hidden width of the experts that compute a token."""
        for i in range(self.n_blocks):
            if self.moe is not None and self.layer(i).experts:
                yield self.moe.top_k * self.moe.width(self.hidden_width) + self.moe.width_of_shared(self.hidden_width)
            else:
                yield self.hidden_width

    @property
    def idle_parameters(self) -> int:
        """Number of parameters that a token does not use: the parameters of routed experts that do not compute the token."""
        if self.moe is None:
            return 0
        moe, matrices = self.moe, 3 if self.gated else 2
        width = moe.width(self.hidden_width)
        each = matrices * self.n_embd * width
        if self.has_bias("mlp"):
            each += (matrices - 1) * width + self.n_embd
        return self.experts_layers * (moe.experts - moe.top_k) * each


_NEEDS: dict[str, tuple[str, Callable[[GPTConfig], bool]]] = {
    "gelu_approximate": ("model.mlp gelu or geglu", lambda model: model.mlp in ("gelu", "geglu")),
    "norm_unit_offset": ("model.norm rmsnorm", lambda model: model.norm == "rmsnorm"),
    "norm_bias": ("model.norm layernorm", lambda model: model.norm == "layernorm"),
    "qk_norm_width": ("model.qk_norm", lambda model: model.qk_norm),
    **dict.fromkeys(
        ("rope_theta", "rope_scaling", "partial_rotary_factor"),
        ("model.position rope", lambda model: model.position == "rope"),
    ),
}
"""Setting → (other setting without which this setting has no effect, function: does a model have the other setting?)."""


def _range_mistakes(settings: Any, key: str) -> dict[str, Mistake]:
    """Return {field: mistake} for each number of a group of settings that is outside its range. `key`: name of the group."""
    cls: type = type(settings)
    domains = ranges_of(cls)
    sentences = {name: domain.sentence(f"{key}.{name}", getattr(settings, name)) for name, domain in domains.items()}
    return {name: Mistake(sentence, f"--{key}.{name}") for name, sentence in sentences.items() if sentence}


MODEL_DOMAINS = ranges_of(GPTConfig)
"""{field: range} for each numeric field of GPTConfig, also for values in `layers`. Upper bounds exceed any model's sizes."""


def _nearest_divisors(number: int, wanted: int) -> str:
    divisors = [k for k in range(1, number + 1) if number % k == 0]
    return ", ".join(str(k) for k in sorted(sorted(divisors, key=lambda k: abs(k - wanted))[:3]))
