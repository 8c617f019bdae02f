"""The rule of `doctor` about settings with unusual values."""

from __future__ import annotations

import math

from lit_llm.reporting.doctor.finding import ROUGH, SLOW, warning
from lit_llm.reporting.doctor.observed import Observed

USUAL: dict[str, tuple[float, float]] = {
    "model.dropout": (0.0, 0.5),  # Srivastava et al. 2014
    "lora.dropout": (0.0, 0.5),
    "model.init_std": (1e-3, 0.1),  # GPT-2: 0.02; 1 / sqrt(width) of 128 to 10^6
    "model.moe.balance": (0.0, 0.2),  # 0.01 in Fedus et al. 2021, 0.001 in DeepSeek-V2
    "model.moe.sequence_balance": (0.0, 0.1),  # 1e-4 in DeepSeek-V3
    "model.moe.z_loss": (0.0, 0.1),  # 0.001 in Zoph et al. 2022
    "model.moe.scale": (0.2, 20.0),  # DeepSeek-V3: 2.5
    "model.logit_scale": (0.05, 8.0),  # MiniCPM: 0.11
    "model.attention_scale": (0.001, 1.0),  # 1 / width of a head to 1 of normed queries and keys
    "model.embedding_scale": (0.1, 200.0),  # Gemma: the root of the width
    "model.residual_scale": (0.05, 4.0),  # MiniCPM: 1.4 / sqrt(layers)
    "model.norm_eps": (1e-8, 1e-3),
    "model.window": (16, math.inf),  # Beltagy et al. 2020: 32 and more; gpt-oss: 128
    "model.rope_theta": (1e3, 1e11),  # Su et al. 2021: 10^4; LLaMA 3: 5 * 10^5
    "model.logit_softcap": (10.0, math.inf),  # Gemma 2: 30 and 50
    "model.attention_softcap": (10.0, math.inf),
    "loss.z_loss": (0.0, 0.01),  # 1e-4 in Chowdhery et al. 2022
    "loss.ahead_weight": (0.0, 1.0),  # DeepSeek-V3: 0.3
    "optimizer.init_args.weight_decay": (0.0, 0.5),
    "optimizer.init_args.eps": (0.0, 5e-5),  # Kingma and Ba 2015: 1e-8
    "expert_balance.init_args.rate": (0.0, 0.02),  # DeepSeek-V3: 0.001; with a larger rate, biases oscillate
    "gradient_norm.init_args.clip": (0.01, math.inf),
    "objective.init_args.beta": (0.005, 2.0),  # Rafailov et al. 2023: 0.1; SimPO, without a reference, takes 2 to 10
    "objective.init_args.label_smoothing": (0.0, 0.3),
    "spike_guard.init_args.sigma": (2.0, math.inf),
}
"""{setting: (smallest, largest) usual value}: the extremes of published runs, some with a margin."""


@warning.likely(
    "a setting is far outside of what is usual",
    "the setting, or leave it out",
    "config.yaml",
    explains=(*SLOW, *ROUGH, "loss-scale", "preference-leak"),
)
def unusual_setting(run: Observed) -> str | None:
    sentences = []
    for key, (low, high) in USUAL.items():
        value = run.setting(key)
        if run.setting("objective.init_args.loss") == "simpo" and key.endswith("beta"):
            high = 20.0
        if isinstance(value, int | float) and not low <= value <= high:
            sentences.append(f"{key.replace('.init_args', '')} is {value:g} (usual: {low:g} to {high:g})")
    rank, alpha = run.number("lora.rank"), run.number("lora.alpha")
    # Hu et al. 2021: once or twice the rank
    if rank and alpha is not None and not rank / 16 <= alpha <= 8 * rank:
        sentences.append(f"lora.alpha is {alpha:g}, {alpha / rank:g} times the rank")
    decay, kind = run.number("optimizer.init_args.weight_decay"), str(run.setting("optimizer.class_path", ""))
    adds = kind.endswith((".Adam", ".NAdam", ".RAdam", ".Adamax", ".Adagrad", ".RMSprop"))  # Loshchilov and Hutter 2019
    if adds and decay and decay > 1e-3 and not run.setting("optimizer.init_args.decoupled_weight_decay"):
        name = kind.rpartition(".")[2]
        sentences.append(f"{name} adds weight decay {decay:g} to the gradients, where AdamW decays the weights")
    rate, original = run.number("optimizer.init_args.lr"), run.setting("optimizer.init_args.adjust_lr") == "original"
    if kind.endswith("MuonAdamW") and original and rate and rate < 2e-3 and run.from_scratch:  # Jordan 2024: 0.02
        sentences.append(
            f"optimizer.lr is {rate:g}, far too low for the matrices of Muon: a rate for AdamW (--optimizer.lr 0.01)"
        )
    betas = run.setting("optimizer.init_args.betas")
    pair = isinstance(betas, list) and len(betas) == 2 and all(isinstance(each, int | float) for each in betas)
    if pair and betas[0] > betas[1]:  # Kingma and Ba 2015 assume the opposite
        sentences.append(f"optimizer.betas is {betas}: the average of gradients is longer than that of their squares")
    elif pair and betas[1] < 0.8:
        sentences.append(f"optimizer.betas is {betas}: the average of squares is of few steps (usual: 0.95 to 0.999)")
    if run.setting("checkpoint.init_args.mode") == "max" and str(run.setting("checkpoint.init_args.monitor")).endswith("loss"):
        sentences.append("checkpoint.mode is max, which keeps the checkpoint with the highest loss (--checkpoint.mode min)")
    sizes = [run.number(key) for key in ("trainer.limit_val_batches", "data.init_args.global_batch_size", "model.block_size")]
    if type(sizes[0]) is int and sizes[0] in (1, 2) and (tokens := math.prod(size or math.inf for size in sizes)) < 2000:
        sentences.append(
            f"a validation has {tokens:,.0f} tokens (trainer.limit_val_batches {sizes[0]}): its loss is mostly chance"
        )
    width, hidden = run.number("model.n_embd"), run.number("model.mlp_width")
    if width and hidden and hidden < width / 2 and not run.setting("model.moe"):
        sentences.append(
            f"model.mlp_width is {hidden:g}, less than half of the model's width {width:g} (usual: 2.7 to 4 times)"
        )
    return "; ".join(sentences) or None
