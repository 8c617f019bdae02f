"""A plan as plain values for JSON. Units are in the keys."""

from __future__ import annotations

from typing import Any

from lit_llm.plan import compute
from lit_llm.plan.collectives import communicated_bytes
from lit_llm.plan.pipeline_order import bubble
from lit_llm.plan.plan import Plan


def as_dict(plan: Plan) -> dict[str, Any]:
    """All figures of a plan as nested dicts of numbers, strings and None."""
    settings, times, memory = plan.settings, plan.times, plan.memory
    interval = compute.young_interval_seconds(plan.save_seconds, plan.mtbf_seconds)
    known_loss = settings.tokens > 0
    return {
        "parameters": {
            "total": plan.parameters,
            "by_part": plan.parts,
            "trained": plan.trained_parameters,
            "active": plan.active_parameters,
        },
        "notes": list(plan.memory.notes),
        "batch": {
            "global_sequences": settings.global_batch,
            "micro_sequences": settings.sequences,
            "accumulation": settings.accumulation,
            "block_size": settings.sequence_length,
            "tokens_per_step": settings.tokens_per_step,
            "steps": settings.steps,
            "tokens": settings.tokens,
            "ramp": [{"steps_before": first, "global_sequences": size} for first, size in settings.ramp],
        },
        "data": {
            "train_tokens": settings.data.train_tokens,
            "val_tokens": settings.data.val_tokens,
            "origin": settings.data.origin,
            "packed_sequences": settings.data.sequences,
            "epochs": settings.tokens / settings.data.train_tokens
            if settings.data.train_tokens and not settings.data.phases
            else None,
            "phases": [
                {
                    "end_sequence": phase.end,
                    "period": phase.period,
                    "largest_deviation": phase.largest_deviation,
                    "sources": [
                        {
                            "name": source.name,
                            "sequences": source.sequences,
                            "tokens": source.sequences * settings.sequence_length,
                            "epochs_by_its_end": source.epochs,
                            "max_epochs": source.max_epochs,
                        }
                        for source in phase.sources
                    ],
                }
                for phase in settings.data.phases
            ],
        },
        "precision": {
            "name": settings.precision,
            "weight_bytes": settings.sizes[0],
            "compute_bytes": settings.sizes[1],
        },
        "layout": {
            "strategy": settings.layout.strategy,
            "devices": settings.layout.devices,
            "replicate": settings.layout.replicate,
            "shard": settings.layout.shard,
            "context": settings.layout.context,
            "tensor_parallel": settings.layout.tensor_parallel,
            "pipeline": settings.layout.pipeline.ranks,
            "keeps_whole_weights": settings.layout.kept.weights,
            "keeps_whole_gradients": settings.layout.kept.gradients,
            "schedule": settings.layout.pipeline.schedule if settings.layout.pipeline.ranks > 1 else None,
        },
        "optimizer": {
            "name": settings.optimizer.name,
            "state_bytes": int(plan.state_bytes),
        },
        "memory_per_rank": {
            "bytes_by_part": memory.parts,
            "total_bytes": memory.total,
            "reserved_bytes": memory.reserved,
            "moment": memory.moment,
            "activations_known": memory.is_known,
            "capacity_bytes": plan.capacity_bytes,
            "fits": plan.fits,
            "largest_micro_batch": plan.largest_micro_batch,
            "next": [{"switch": flag, "saves_bytes": saved} for flag, saved in plan.next_steps],
        },
        "compute": {
            "convention": compute.convention(settings.model),
            "flops_per_token": plan.flops.total,
            "flops_per_token_matmul": plan.flops.matmul,
            "flops_per_token_attention": plan.flops.attention,
            "flops_per_token_attention_causal": plan.flops.attention_causal,
            "flops_per_step": plan.flops.total * settings.tokens_per_step,
            "flops_per_run": plan.flops.total * settings.tokens,
            "peak_tflops": plan.peak_tflops,
            "mfu": plan.mfu,
            "mfu_origin": plan.mfu_origin,
            "from_run": None if plan.options.measured is None else plan.options.measured.sentence(plan.hardware),
        },
        "time": {
            "step_seconds": times.step,
            "compute_seconds": times.compute,
            "memory_seconds": times.memory,
            "communication_seconds": times.communication,
            "exposed_communication_seconds": times.exposed,
            "data_seconds": times.data,
            "limit": times.limit,
            "tokens_per_second": settings.tokens_per_step / times.step if times.step else None,
            "run_seconds": plan.run_seconds,
            "device_hours": plan.run_seconds * settings.layout.devices / 3600 if plan.run_seconds else None,
            "scaling_efficiency": plan.efficiency,
            "pipeline_bubble": bubble(settings.layout.pipeline, settings.accumulation),
            "usd": plan.usd,
        },
        "communication": {"bytes_per_rank_and_step": communicated_bytes(settings, cuda=plan.hardware.is_gpu)},
        "loss": {
            "chinchilla_multiple": compute.chinchilla_multiple(plan.active_parameters, settings.tokens),
            "chinchilla_fit_nats": compute.chinchilla_loss(plan.active_parameters, settings.tokens) if known_loss else None,
        },
        "checkpoint": {
            "bytes": plan.checkpoint_bytes,
            "copy_bytes_per_machine": plan.copy_bytes,
            "save_seconds": plan.save_seconds,
            "mtbf_hours": plan.mtbf_seconds / 3600,
            "young_interval_seconds": interval,
            "overhead_fraction": compute.overhead_fraction(plan.save_seconds, interval, plan.mtbf_seconds),
            "every_n_steps": settings.save_every,
        },
        "validation": {
            "every_n_steps": settings.validate_every,
            "passes": plan.validations,
            "seconds_each": plan.validation_seconds,
        },
        "schedule": {
            "kind": settings.schedule.kind,
            "phases": [{"name": p.name, "steps": p.steps, "tokens": p.tokens} for p in plan.phases],
        },
    }
