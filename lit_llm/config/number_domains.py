"""The domain of every number that a recipe can set, checked in one place before anything is built. No torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from lit_llm.core.number_domain import LARGEST, Domain, above, at_least, below, whole
from lit_llm.models.config import MODEL_DOMAINS

MAX_WORKERS = 256
MAX_DEVICES = 1024
"""In one machine."""

_SEED = 2**32 - 1
_INT64 = 2**63 - 1
_STEPS = 10**12
_RATE = 10_000
_BATCHES = Domain(1, LARGEST, fraction=True, null=True)
_BATCHES_OR_NONE = Domain(1, LARGEST, fraction=True, null=True, also=(0,))

_OPTIONS: dict[str, Domain] = {
    "seed_everything": whole(0, _SEED),
    "check_tolerance": above(0, 1000),
    "additional_steps": whole(1, _STEPS, null=True),
    "hang_timeout": above(0, 10**7, null=True),
    "shard_tokens": whole(1, 2**31 - 1),
    "workers": whole(1, 4096),
}

_LORA: dict[str, Domain] = {
    "rank": whole(1, 65_536),
    "alpha": above(0, 10**6),
    "dropout": below(0, 1),
}

_LOSS: dict[str, Domain] = {
    "chunk_size": whole(1, _STEPS, null=True),
    "z_loss": at_least(0, 1000),
}

_COMPUTE: dict[str, Domain] = {"activation_checkpointing": whole(1, 10_000)}

_OPTIMIZER: dict[str, Domain] = {
    "lr": at_least(0, _RATE),
    "adamw_lr": at_least(0, _RATE),
    "lr_decay": at_least(0, _RATE),
    "weight_decay": at_least(0, _RATE),
    "betas": below(0, 1),
    "momentum": below(0, 1),
    "dampening": at_least(0, 1),
    "momentum_decay": at_least(0, _RATE),
    "eps": at_least(0, 1),
    "normuon_beta2": Domain(0, 1, below_high=True, null=True),
    "ns_steps": whole(1, 99),
    "ns_coefficients": at_least(-_RATE, _RATE),
    "alpha": at_least(0, 1),
    "lambd": at_least(0, _RATE),
    "t0": at_least(0, _STEPS),
    "rho": at_least(0, 1),
    "initial_accumulator_value": at_least(0, _STEPS),
    "beta2_decay": Domain(-_RATE, 0),
    "d": at_least(1, _RATE),
    "etas": above(0, _RATE),
    "step_sizes": at_least(0, _RATE),
}
"""Of lit_llm's and torch's optimizers."""

_DATA: dict[str, Domain] = {
    "micro_batch_size": whole(1, 10**7, null=True),
    "global_batch_size": whole(1, 10**9),
    "block_size": whole(1, 10**9, null=True),
    "seed": whole(-_INT64, _INT64),
    "num_workers": whole(0, MAX_WORKERS),
    "val_fraction": Domain(0, 1, above_low=True, below_high=True),
    "vocab_size": whole(1, 100_000_000, null=True),
    "bos_id": whole(0, 100_000_000, null=True),
    "eos_id": whole(0, 100_000_000, null=True),
    "tokenizer.vocab_size": whole(1, 100_000_000),
}

_CALLBACKS: dict[str, dict[str, Domain]] = {
    "schedule": {
        "warmup_steps": whole(0, _STEPS),
        "total_steps": whole(1, _STEPS, null=True),
        "decay_steps": whole(1, _STEPS, null=True),
        "final_ratio": at_least(0, 1),
        "decay_fraction": Domain(0, 1, above_low=True),
    },
    "batch_ramp": {"tokens_per_batch": whole(0, LARGEST)},
    "health": {"every_n_steps": whole(1, _STEPS)},
    "histograms": {"every_n_steps": whole(1, _STEPS)},
    "gradient_norm": {"clip": above(0, 10**9, null=True)},
    "gradient_noise": {"every_n_steps": whole(1, _STEPS), "decay": below(0, 1)},
    "ema": {"decay": below(0, 1), "every_n_steps": whole(1, _STEPS), "start_step": whole(0, _STEPS)},
    "validation": {"every_n_steps": whole(1, _STEPS)},
    "throughput": {"peak_tflops": above(0, 10**9, null=True)},
    "plan": {
        "mfu": Domain(0, 1, above_low=True, null=True),
        "tolerance": above(0, 1000),
        "price": Domain(0, 1000, above_low=True, null=True),
    },
    "time_breakdown": {"communication_every_n_steps": whole(1, _STEPS)},
    "profile": {"wait": whole(0, _STEPS), "steps": whole(1, 10_000)},
    "samples": {
        "every_n_steps": whole(1, _STEPS),
        "max_new_tokens": whole(1, 10**9),
        "temperature": Domain(0.001, 1000, also=(0,)),
        "top_k": whole(1, 10**9, null=True),
        "seed": whole(-_INT64, _INT64),
    },
    "tasks": {
        "every_n_steps": whole(1, _STEPS, null=True),
        "limit": whole(1, 10**9, null=True),
        "batch_size": whole(1, 10**6),
    },
    "spike_guard": {
        "window": whole(2, 10**6),
        "sigma": above(0, 10**6),
        "min_steps": whole(2, 10**6),
        "max_consecutive": whole(1, _STEPS),
    },
    "checkpoint": {
        "every_n_steps": whole(1, _STEPS),
        "every_n_minutes": above(0, 10**6, null=True),
        "keep_last": whole(1, 10**6),
        "keep_every_n_steps": whole(1, _STEPS, null=True),
    },
}

_TRAINER: dict[str, Domain] = {
    "devices": Domain(high=MAX_DEVICES, whole=True),  # `devices_problem` checks the rest: it may also be a list, or text
    "num_nodes": whole(1, 1_000_000),
    "max_steps": whole(1, _STEPS, also=(-1,)),
    "min_steps": whole(0, _STEPS, null=True),
    "max_epochs": whole(1, 10**9, null=True, also=(-1,)),
    "min_epochs": whole(0, 10**9, null=True),
    "fast_dev_run": whole(0, 10**6),
    "limit_train_batches": _BATCHES,
    "limit_val_batches": _BATCHES_OR_NONE,
    "limit_test_batches": _BATCHES_OR_NONE,
    "limit_predict_batches": _BATCHES_OR_NONE,
    "overfit_batches": Domain(1, LARGEST, fraction=True, also=(0,)),
    "val_check_interval": _BATCHES,
    "check_val_every_n_epoch": whole(1, 10**9, null=True),
    "num_sanity_val_steps": whole(0, _STEPS, null=True, also=(-1,)),
    "log_every_n_steps": whole(1, _STEPS, null=True),
    "accumulate_grad_batches": whole(1, 10**9),
    "gradient_clip_val": at_least(0, 10**9, null=True),
    "reload_dataloaders_every_n_epochs": whole(0, 10**9),
    "max_time": at_least(0, 10**9),
    "strategy.replicate": whole(1, 1_000_000),
    "strategy.shard": whole(1, 1_000_000),
    "strategy.context": whole(1, 1_000_000),
    "strategy.tensor_parallel": whole(1, 1_000_000),
    "strategy.pipeline": whole(1, 1_000_000),
    "strategy.stages_per_rank": whole(1, 10_000),
    "strategy.layers_first": whole(1, 1_000_000),
    "strategy.layers_last": whole(1, 1_000_000),
    "strategy.prefetch": whole(0, 10_000),
    "strategy.timeout_seconds": above(0, 10**7),
}

DOMAINS: dict[str, Domain] = {
    **_OPTIONS,
    **{
        f"{group}.{name}": domain
        for group, table in {
            "model": MODEL_DOMAINS,
            "lora": _LORA,
            "loss": _LOSS,
            "compute": _COMPUTE,
            "optimizer": _OPTIMIZER,
            "data": _DATA,
            "trainer": _TRAINER,
            **_CALLBACKS,
        }.items()
        for name, domain in table.items()
    },
}
"""Dotted key, as its flag is written → domain. A list has the domain of its elements, a dict that of its values."""

FIT_FLAGS: dict[str, Domain] = {"dry_run_rank": whole(0, 10_000_000, null=True)}
"""Of the flags that `fit` has beside its recipe."""

FIND_LR_FLAGS: dict[str, Domain] = {
    "seeds": whole(1, 100),
    "sweep_steps": whole(20, 10**6),
    "probe_steps": whole(5, _STEPS, null=True),
}
"""Of `find-lr`, in addition to those of `fit`."""

FIND_BATCH_FLAGS: dict[str, Domain] = {
    "seeds": whole(1, 100),
    "noise_steps": whole(4, _STEPS, null=True),
}
"""Of `find-batch`, in addition to those of `fit`."""

PLAN_FLAGS: dict[str, Domain] = {
    "devices": whole(1, 10_000_000, null=True),
    "mfu": Domain(0, 1, above_low=True, null=True),
    "price": above(0, 10**9, null=True),
    "mtbf_hours": above(0, 10**9, null=True),
    "save_gbps": above(0, 10**9),
    "serve_tokens": above(0, 10**24, null=True),
    "slowest_rank": at_least(1, 10**6),
    "max_memory": above(0, 10**9, null=True),
    "deadline": above(0, 10**9, null=True),
}
"""Of the flags that `plan` has in addition to those of `fit`."""

GENERATE_FLAGS: dict[str, Domain] = {
    "max_new_tokens": whole(1, 10**9),
    "temperature": Domain(0.001, 1000, also=(0,)),
    "top_k": whole(0, 10**9),
    "top_p": Domain(0, 1, above_low=True, null=True),
    "seed": whole(-_INT64, _INT64),
}
"""Of `generate`."""

ANY_NUMBER = Domain()
"""For numbers of classes that are not lit_llm's, torch's or Lightning's."""


def number_problems(config: Namespace, given: set[str]) -> dict[str, str]:
    """A sentence for each number outside its domain, by dotted key.

    Args:
        config: a parsed recipe.
        given: keys that a recipe or a flag sets. Defaults of foreign classes, such as infinity, are not checked.
    """
    found: dict[str, str] = {}
    for key, owner, value in _numbers(config, "", ""):
        domain = DOMAINS.get(key) if _is_known(owner) else None
        if domain is None and key not in given:
            continue
        if key not in found and (problem := (domain or ANY_NUMBER).problem(key, value)):
            found[key] = problem
    return found


def flag_problems(domains: dict[str, Domain], values: object) -> list[str]:
    """A sentence for each of a command's own flags whose number is outside its domain.

    Args:
        values: has an attribute for each flag.
    """
    found = (domain.problem(name, getattr(values, name)) for name, domain in domains.items())
    return [problem for problem in found if problem is not None]


def _is_known(class_path: str) -> bool:
    return not class_path or "." not in class_path or class_path.split(".")[0] in ("lit_llm", "torch", "lightning")


def _numbers(value: Any, key: str, owner: str) -> Iterator[tuple[str, str, Any]]:
    """Key, class path of the innermost class, and value of every number."""
    if isinstance(value, Namespace | dict):
        items = dict(vars(value)) if isinstance(value, Namespace) else value
        class_path = items.get("class_path")
        if isinstance(class_path, str):
            for name in ("init_args", "dict_kwargs"):
                yield from _numbers(items.get(name), key, class_path)
            return
        # All numbers of a dict such as model.rope_scaling have one domain. A dict of Trainer's val_check_interval is a time.
        same = key in DOMAINS and not DOMAINS[key].fraction
        for name, each in items.items():
            yield from _numbers(each, key if same else f"{key}.{name}".lstrip("."), owner)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, key, owner)
    elif key == "trainer.devices" and isinstance(value, str) and value.isdecimal():
        yield key, owner, int(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, owner, value
