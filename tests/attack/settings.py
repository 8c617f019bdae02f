"""What each setting may be, written by hand from the documentation: the attack's own opinion of right and wrong.

Values on the edge of a rule that the documentation leaves open are not listed, neither as right nor as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["whole", "real", "flag", "choice", "text", "list"]
INF, NAN = float("inf"), float("nan")

WRONG_TYPES: dict[Kind, list[Any]] = {
    "whole": ["abc", "", "1.5", 1.5, [], [1, 2], {"a": 1}, "4 5", "0x", "ten", NAN, INF, -INF],
    "real": ["abc", "", [], [0.1, 0.2], {"a": 1}, "1,5", "0.1.2", "1e", NAN, INF, -INF],
    "flag": ["maybe", "", 2, 3.5, [], [True], {"a": 1}, "yes please", -1],
    "choice": ["nope", "", 3.5, [], {"a": 1}, ["a", "b"]],
    "text": [{"a": 1}, [[]]],
    "list": ["abc", "", 3.5, {"a": 1}, [[]], ["x", None]],
}
"""Values that are wrong for every setting of a kind."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: dotted, as the flag is called.
        ok, bad: values that are right, and wrong, beside those of the kind.
        null: whether null is right; None: not tested.
        needs: flags that choose the class which has the setting.
    """

    key: str
    kind: Kind
    ok: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    null: bool | None = False
    needs: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[Any]:
        return [*WRONG_TYPES[self.kind], *self.bad]


def _whole(key: str, ok: list[Any], bad: list[Any], **more: Any) -> Setting:
    return Setting(key, "whole", tuple(ok), tuple(bad), **more)


def _real(key: str, ok: list[Any], bad: list[Any], **more: Any) -> Setting:
    return Setting(key, "real", tuple(ok), tuple(bad), **more)


def _flag(key: str, **more: Any) -> Setting:
    return Setting(key, "flag", (True, False), **more)


def _choice(key: str, *ok: str, **more: Any) -> Setting:
    return Setting(key, "choice", ok, **more)


HUGE = 10**12
_ADAMW = ("--optimizer=AdamW",)
_LION = ("--optimizer=Lion",)
_WSD = ("--schedule=WSD",)
_LINEAR = ("--schedule=Linear",)
_SAMPLES = ("--samples=TextSamples", "--samples.prompts=[a]", "--samples.every_n_steps=2", "--samples.max_new_tokens=2")
_MIXTURE = ("--data=Mixture", "--data.sources={web: {train: nope.bin}}", "--data.phases=[{weights: {web: 1}}]")
_PROFILE = ("--profile=Profile", "--profile.wait=1", "--profile.steps=1")

SETTINGS: tuple[Setting, ...] = (
    _whole("model.n_layer", [1, 2], [0, -1, 10**9, HUGE]),
    _whole("model.n_head", [1, 2, 4], [0, -2, 3, HUGE]),
    _whole("model.n_kv_head", [1, 2], [0, -1, 3], null=True),
    _whole("model.n_embd", [8, 32], [0, -16, 15, HUGE]),
    _whole("model.head_dim", [4, 8], [0, -4, HUGE], null=True),
    _whole("model.block_size", [8, 12], [0, -1, HUGE]),
    _whole("model.vocab_size", [300, 512], [0, -1, 100, HUGE], null=True),
    _whole("model.mlp_width", [8, 24], [0, -1, HUGE], null=True),
    _whole("model.window", [4, 8], [0, -1], null=True),
    _whole("model.pad_vocab_to", [1, 32], [0, -1, HUGE]),
    _whole("model.eos_id", [0, 7], [-1, 10**6, HUGE], null=True),
    _real("model.norm_eps", [1e-6, 1e-5], [-1e-5]),
    _real("model.rope_theta", [1000, 5e5], [0, -1]),
    _real("model.dropout", [0, 0.1], [-0.1, 1.5]),
    _real("model.logit_softcap", [30, 5.5], [0, -1], null=True),
    _real("model.init_std", [0.01, 0.1], [-0.1, 1e30]),
    _whole("model.base_width", [8, 64], [0, -1, HUGE], null=True),
    _whole("model.base_depth", [1, 4], [0, -1, HUGE], null=True),
    _real("model.partial_rotary_factor", [0.5, 1], [0, -1, 1.5]),
    _real("model.attention_scale", [0.1], [0, -1], null=True),
    _real("model.attention_softcap", [50, 5.5], [0, -1], null=True),
    _real("model.embedding_scale", [4, 0.5], [0, -1], null=True),
    _real("model.residual_scale", [0.2, 1], [0, -1]),
    _real("model.logit_scale", [0.1, 1], [0, -1]),
    Setting("model.layers", "text", ("{window: [4]}", "{rope: [false]}"), ("{windows: [4]}", "{window: [0]}", "3"), null=True),
    _choice("model.norm_position", "pre", "post", "sandwich"),
    _choice("model.qk_norm_width", "head", "projection"),
    _flag("model.attention_sinks"),
    _flag("model.exclusive_attention"),
    _whole("model.qkv_convolution", [2, 4], [0, 1, -1, HUGE], null=True),
    _whole("model.input_convolution", [2, 4], [0, 1, -1, HUGE], null=True),
    _whole("model.predict_ahead", [0, 1, 2], [-1, HUGE]),
    _flag("model.mlp_bias", null=True),
    _flag("model.norm_bias", null=True),
    _flag("model.attention_output_bias", null=True),
    _choice("model.mlp", "gelu", "relu2", "swiglu", "geglu", "clamped_swiglu"),
    _choice("model.norm", "layernorm", "rmsnorm"),
    _choice("model.position", "learned", "rope"),
    _flag("model.bias"),
    _flag("model.qkv_bias", null=True),
    _flag("model.tie_embeddings"),
    _flag("model.qk_norm"),
    _flag("model.zero_init_projections", null=True),
    _whole("lora.rank", [], [0, -1, HUGE]),  # right values need the weights of a run: tests/training/test_lora_run.py
    _real("lora.alpha", [], [0, -1, 1e30]),
    _real("lora.dropout", [], [-0.1, 1, 1.5]),
    Setting("lora.targets", "list", (), ([], ["quary"], ["head"], ["embedding"], [3]), null=None),
    _whole("loss.chunk_size", [16, 32], [0, -1], null=True),
    _real("loss.z_loss", [0, 1e-4], [-1]),
    _real("loss.ahead_weight", [0, 0.1], [-1]),
    _choice("compute.matmul_precision", "highest", "high", "medium"),
    _choice("compute.attention", "auto", "blocks"),
    _real("optimizer.lr", [0.01, 0], [-1, 1e30]),
    _real("optimizer.adamw_lr", [0.01], [-1, 1e30]),
    _real("optimizer.weight_decay", [0, 0.1], [-1]),
    _real("optimizer.momentum", [0.9, 0.5], [-0.1, 1.5]),
    _whole("optimizer.ns_steps", [3, 5], [-1, 10**9]),
    _real("optimizer.eps", [1e-8], [-1e-8]),
    Setting("optimizer.betas", "list", ([0.9, 0.95], [0.8, 0.99]), ([1.5, 0.9], [0.9], [0.9, -0.1], [0.9, NAN], [1, 2, 3])),
    _flag("optimizer.nesterov"),
    _choice("optimizer.adjust_lr", "original", "match_rms_adamw"),
    _real("optimizer.lr", [0.01], [-1], needs=_ADAMW),
    _real("optimizer.weight_decay", [0, 0.1], [-1], needs=_ADAMW),
    _real("optimizer.eps", [1e-8], [-1], needs=_ADAMW),
    Setting("optimizer.betas", "list", ([0.9, 0.95],), ([1.5, 0.9], [0.9], [0.9, -0.1]), needs=_ADAMW),
    _flag("optimizer.amsgrad", needs=_ADAMW),
    _real("optimizer.lr", [0.01], [-1], needs=_LION),
    _real("optimizer.weight_decay", [0, 0.1], [-1], needs=_LION),
    Setting("optimizer.betas", "list", ([0.9, 0.95],), ([1.5, 0.9], [0.9], [0.9, -0.1]), needs=_LION),
    _whole("data.micro_batch_size", [1, 2, 4], [0, -1, 3, HUGE], null=True),
    _whole("data.global_batch_size", [2, 4, 8], [0, -4, 3, HUGE]),
    _whole("data.block_size", [16], [0, -1, HUGE], null=True),
    _whole("data.num_workers", [0, 1], [-1, 100_000, HUGE]),
    _real("data.val_fraction", [0.1, 0.3], [-0.1, 1.5]),
    Setting("data.paths", "list", (["text.txt"],), ([], [""], "", "nope.txt", ["text.txt", "text.txt"], 3, [3], "no/*.txt")),
    _choice("data.format", "text", "auto", null=None),
    _choice("data.packing", "best_fit", "concatenate"),
    Setting("data.text_key", "text", ("body",), (), null=None),
    _flag("data.drop_near_duplicates", null=None),
    Setting("data.tokenizer", "choice", ("Bytes",), (7, "Byte", "WSD", "torch.nn.Linear"), null=None),
    # Right values need shards: tests/data/test_mixture.py
    Setting("data.phases", "list", (), ([], [3], [{"weights": {}}], [{"weights": {"web": 3}}]), null=None, needs=_MIXTURE),
    Setting("data.sources", "text", (), ("web", 3, {"web": 3}, {"web": {}}, {"": {"path": "x"}}), null=None, needs=_MIXTURE),
    _real("data.sources.web.max_epochs", [], [0, -1], null=None, needs=_MIXTURE),
    Setting("data.cache_dir", "text", ("my cache", "deep/er/cache"), ("text.txt", "text.txt/below"), null=True),
    _whole("schedule.warmup_steps", [0, 1], [-1, 99, HUGE]),
    _real("schedule.final_ratio", [0, 0.5], [-0.1]),
    _whole("schedule.total_steps", [4, 8], [-1, 0], null=True),
    _whole("schedule.warmup_steps", [0, 1], [-1, 99], needs=_WSD),
    _whole("schedule.decay_steps", [1], [-1, 99], null=True, needs=_WSD),
    _real("schedule.decay_fraction", [0.5], [-0.1, 1.5], needs=_WSD),
    _choice("schedule.shape", "linear", "one_minus_sqrt", needs=_WSD),
    _whole("schedule.total_steps", [4], [-1], null=True, needs=_LINEAR),
    _real("gradient_norm.clip", [0.5, 10], [-1], null=True),
    _real("ema.decay", [0, 0.5, 0.999], [-0.1, 1, 1.5], needs=("--ema=EMA",)),
    _whole("ema.every_n_steps", [1, 5], [0, -1], needs=("--ema=EMA",)),
    _whole("ema.start_step", [0, 3], [-1], needs=("--ema=EMA",)),
    _flag("ema.warmup", needs=("--ema=EMA",)),
    _flag("ema.validate", needs=("--ema=EMA",)),
    _whole("validation.every_n_steps", [1, 5], [0, -1]),
    _real("throughput.peak_tflops", [1, 989.5], [0, -1], null=True),
    _real("plan.mfu", [0.4], [0, -1, 1.5], null=True),
    _real("plan.tolerance", [0.5], [-1]),
    _whole("spike_guard.window", [64, 128], [0, -1, HUGE]),
    _real("spike_guard.sigma", [4, 6.5], [0, -1]),
    _whole("spike_guard.min_steps", [8, 16], [-1]),
    _whole("spike_guard.max_consecutive", [3], [0, -1]),
    _whole("checkpoint.every_n_steps", [1, 5], [0, -1]),
    _whole("checkpoint.keep_last", [1, 3], [0, -1]),
    _real("checkpoint.every_n_minutes", [1, 0.5], [0, -1], null=True),
    _whole("checkpoint.keep_every_n_steps", [2], [0, -1], null=True),
    _choice("checkpoint.mode", "min", "max"),
    Setting("checkpoint.monitor", "text", ("val/loss", "val/perplexity"), ("nope", ""), null=True),
    _whole("samples.every_n_steps", [1, 2], [0, -1], needs=_SAMPLES),
    _whole("samples.max_new_tokens", [1, 3], [0, -1], needs=_SAMPLES),
    _real("samples.temperature", [0.5, 1], [-1], needs=_SAMPLES),
    _whole("samples.top_k", [1, 5], [0, -1], null=True, needs=_SAMPLES),
    Setting("samples.prompts", "list", (["a", "b"],), ([3],), needs=_SAMPLES),
    _whole("profile.wait", [1], [-1], needs=_PROFILE),
    _whole("profile.steps", [1], [0, -1], needs=_PROFILE),
    _whole("health.every_n_steps", [1, 2], [0, -1]),
    _whole("histograms.every_n_steps", [1, 2], [0, -1], needs=("--histograms=Histograms",)),
    Setting(
        "histograms.parameters", "text", ("weight", "blocks"), ("(", "nope"), null=True, needs=("--histograms=Histograms",)
    ),
    _whole("time_breakdown.communication_every_n_steps", [2], [0, -1], needs=("--time_breakdown=TimeBreakdown",)),
    _whole("gradient_noise.every_n_steps", [1, 2], [0, -1], needs=("--gradient_noise=GradientNoise",)),
    _real("gradient_noise.decay", [0, 0.9], [-0.1, 1], needs=("--gradient_noise=GradientNoise",)),
    _whole("trainer.max_steps", [1, 3], [-5, HUGE**3]),
    _whole("trainer.log_every_n_steps", [1, 2], [0, -1], null=True),
    _real("trainer.limit_train_batches", [], [0, -1, 1.5], null=True),
    _real("trainer.limit_val_batches", [1, 0.5], [-1, 1.5], null=True),
    _whole("trainer.accumulate_grad_batches", [1, 2], [0, -1, 3]),
    _whole("trainer.devices", [1], [0, -3, 100_000], null=None),
    _whole("trainer.num_nodes", [1], [0, -1]),
    _choice("trainer.precision", "32-true", "bf16-mixed", null=None),
    _choice("trainer.strategy", "auto"),
    _choice("trainer.accelerator", "cpu", "auto"),
    _flag("trainer.detect_anomaly"),
    _choice("trainer.profiler", "simple", null=True),
    Setting("trainer.max_time", "text", ("00:01:00:00",), ("x", "1 hour", -1), null=True),
    _whole("seed_everything", [0, 1, True, 2**31], [-1, 2**64]),
    _real("check_tolerance", [0.5], [-1]),
    Setting("async_checkpoints", "flag", (True, False, "auto")),
    _real("hang_timeout", [60, 0.5], [0, -1], null=True),
    _flag("accept_changes"),
    Setting(
        "run_dir",
        "text",
        ("runs/a", "runs/with space", "runs/ünïcode"),
        ("text.txt", "text.txt/below", "", "x" * 300),
        null=None,
    ),
    Setting("log_dir", "text", ("runs/logs", "runs/logs/below"), ("text.txt", "text.txt/below", "", "x" * 300), null=True),
    Setting("resume", "text", ("auto", "never"), ("", "nope.ckpt", "AUTO"), null=None),
    Setting("init_from", "text", (), ("nope", "text.txt"), null=True),
    Setting("check_against", "text", (), ("nope.csv", "text.txt"), null=True),
)
