"""Compare a model with lit_llm's defaults, trained for few steps, with a GPT-2-style model trained for 2,000 steps.

Both models have 4 layers, width 128, context 64 and batch 12, and train on the bytes of the standard library in the same
order. The GPT-2-style model has AdamW at 1e-3 and a cosine schedule. The model with the defaults (`GPTConfig()`, `MuonAdamW`,
`Cosine`) is trained for a quarter and for an eighth of the steps.

    python benchmarks/efficiency.py [--seeds 1] [--threads 1]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from lightning.pytorch import Trainer, seed_everything

from lit_llm.callbacks import Cosine, GradientNorm
from lit_llm.data import PythonStdlib
from lit_llm.models.gpt import GPTConfig
from lit_llm.optim import MuonAdamW
from lit_llm.training.language_model import LanguageModel

SIZE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "tie_embeddings": True, "qk_norm": False}
ADAMW = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)  # nanoGPT's settings at this size
STEPS = 2000


def validation_loss(config: GPTConfig, optimizer: partial | type, *, steps: int, warmup: int, seed: int) -> tuple[float, int]:
    """Train a model. Return (validation loss in nats per byte, number of parameters)."""
    seed_everything(seed)
    data = PythonStdlib(micro_batch_size=12, global_batch_size=12, block_size=64)
    module = LanguageModel(config, optimizer)
    trainer = Trainer(
        max_steps=steps,
        callbacks=[Cosine(warmup_steps=warmup, final_ratio=0.1), GradientNorm()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        log_every_n_steps=100,
    )
    trainer.fit(module, datamodule=data)
    trainer.limit_val_batches = 1.0
    loss = trainer.validate(module, datamodule=data, verbose=False)[0]["val/loss"]
    assert module.model is not None
    return loss, module.model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="more threads are not faster at this size")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("seed  model              parameters  steps  validation loss", flush=True)
    for seed in range(options.seeds):
        for name, config, optimizer, steps, warmup in (
            ("GPT-2, AdamW", GPTConfig(**SIZE, **GPT2), ADAMW, STEPS, 100),  # type: ignore[arg-type]
            ("defaults, 1/4", GPTConfig(**SIZE), MuonAdamW, STEPS // 4, 20),  # type: ignore[arg-type]
            ("defaults, 1/8", GPTConfig(**SIZE), MuonAdamW, STEPS // 8, 20),  # type: ignore[arg-type]
        ):
            loss, parameters = validation_loss(config, optimizer, steps=steps, warmup=warmup, seed=seed)
            print(f"{seed:4d}  {name:17s} {parameters:11,d} {steps:6d}  {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
