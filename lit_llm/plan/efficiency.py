"""Seconds of computation of a GPU in a step, with speeds fitted to the runs of `published.yaml`.

    t = matrix FLOPs · (1 + narrow / width) / (peak · matmul) + causal attention FLOPs / (peak · attention)
        + bytes written · passes / memory bandwidth + the optimizer's bytes / memory bandwidth

`python benchmarks/published_speed.py --fit` fits the constants and prints predicted against published for each run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_llm.plan import muon
from lit_llm.plan.compute import flops_per_token
from lit_llm.plan.custom_config import CustomConfig
from lit_llm.plan.hardware import Hardware
from lit_llm.plan.micro_batch import one_micro_batch
from lit_llm.plan.optimizer import matrix_shapes, state_bytes
from lit_llm.plan.parameters import weights_of
from lit_llm.plan.rank_traffic import fullest_stage
from lit_llm.plan.settings import BYTES, RunSettings
from lit_llm.plan.weights import Weight, stored_bytes

UNFITTED_MFU = 0.4
"""MFU of what no run of the file covers: processors, and GPUs of unknown memory bandwidth."""
LAUNCHES_PER_BLOCK = 150
"""Kernels of a block, forward and backward, when it is not compiled; a third of them when it is. An assumption."""
LAUNCH_SECONDS = 5e-6
"""Time in which a processor starts a kernel. An assumption."""


@dataclass(frozen=True)
class Constants:
    """Fitted. Fractions are of the dense peak.

    Attributes:
        matmul, matmul_ampere: of matrix products of infinite width, and the same before Hopper.
        narrow: width at which they are half as fast.
        attention, attention_ampere: of FlashAttention 2, and the same before Hopper, which FlashAttention 3 reaches on Hopper.
        eager, compiled: passes over memory for each byte that an operation of eager PyTorch writes.
        float8: the factor of these passes that casts to float8 add.
        exposed: the least share of FSDP's and DDP's communication that does not overlap with computation.
        waiting: the share of other communication that computation waits for.
    """

    matmul: float = 0.713
    matmul_ampere: float = 0.863
    narrow: float = 422.0
    attention: float = 0.214
    attention_ampere: float = 0.382
    eager: float = 2.58
    compiled: float = 0.483
    float8: float = 2.24
    exposed: float = 0.566
    waiting: float = 0.301


FITTED = Constants()


@dataclass(frozen=True)
class Work:
    """What one rank does in an optimizer step, in seconds at the full speed of its hardware.

    Attributes:
        matmul, head: matrix products of the blocks and of the head. `narrowness` and `head_narrowness`: the mean of 1 / width.
        attention: with the causal mask.
        memory: writing once what operations of eager PyTorch write.
        optimizer: reading and writing weights and state, and Muon's products.
        launches: starting kernels.
    """

    matmul: float
    narrowness: float
    head: float
    head_narrowness: float
    attention: float
    memory: float
    optimizer: float
    launches: float
    is_ampere: bool
    is_flash3: bool
    is_compiled: bool
    is_float8: bool

    def seconds(self, constants: Constants = FITTED) -> float:
        """The time they take."""
        matmul = constants.matmul_ampere if self.is_ampere else constants.matmul
        attention = constants.attention_ampere if self.is_ampere or self.is_flash3 else constants.attention
        passes = constants.compiled if self.is_compiled else constants.eager
        if self.is_float8:
            passes *= constants.float8
        products = self.matmul * (1 + constants.narrow * self.narrowness) + self.head * (
            1 + constants.narrow * self.head_narrowness
        )
        kernels = products / matmul + self.attention / attention + self.memory * passes
        return max(kernels, self.launches) + self.optimizer


def work_of(settings: RunSettings, hardware: Hardware) -> Work | None:
    """The work of a rank; with a pipeline, of the mean rank. None: a peak or the memory bandwidth is unknown, or no GPU."""
    peak = hardware.peak_for(settings.precision, settings.matmul_precision)
    if peak is None or hardware.memory_gbps is None or not hardware.is_gpu:
        return None
    layout, model, peak_flops, bandwidth = settings.layout, settings.model, peak * 1e12, hardware.memory_gbps * 1e9
    float8 = hardware.peak_tflops["fp8"] if settings.float8 else None
    made = one_micro_batch(settings, cuda=True)
    micro_batches = settings.accumulation / layout.pipeline.ranks
    tokens = settings.sequences * settings.sequence_length / layout.context
    flops = flops_per_token(model, settings.lora, settings.length)
    causal = flops.attention_causal / flops.attention if flops.attention else 1.0

    head, body = _matrices(weights_of(model, settings.lora, layout.tensor_parallel))
    head_flops = min(6.0 * tokens * sum(math.prod(shape) for shape in head), made.matmul_flops)
    weight_bytes, _ = BYTES[settings.precision]
    local = fullest_stage(settings, layout.tensor_parallel)
    updated = 5 * stored_bytes(local, weight_bytes, trainable=True) / layout.divisor("optimizer")
    updated += 2 * state_bytes(settings.optimizer, local, weight_bytes) / layout.divisor("optimizer")
    iterations = 0.0
    if settings.optimizer.is_muon:
        owners = math.prod(layout.owners[0]) * layout.owners[1]
        iterations = muon.flops(matrix_shapes(weights_of(model, settings.lora))) / owners / layout.pipeline.ranks
    is_compiled = settings.compile and not isinstance(model, CustomConfig)
    kernels = made.kernels or model.n_layer * LAUNCHES_PER_BLOCK / (3 if is_compiled else 1)
    return Work(
        (made.matmul_flops - head_flops) * micro_batches / ((float8 or peak) * 1e12),
        _narrowness(body),
        head_flops * micro_batches / peak_flops,
        _narrowness(head),
        made.attention_flops * causal * micro_batches / peak_flops,
        made.written * micro_batches / bandwidth,
        updated / bandwidth + iterations / peak_flops,
        kernels * micro_batches * LAUNCH_SECONDS,
        hardware.compute_capability is not None and hardware.compute_capability < 9,
        settings.attention in ("flash3", "flash4"),
        is_compiled,
        float8 is not None,
    )


def _matrices(weights: tuple[Weight, ...]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of the head's and of all other matrices. A tied embedding is the head."""
    shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    tied = not any(weight.part == "output head" for weight in weights)
    for weight in weights:
        is_head = weight.part == "output head" or (tied and weight.part == "token embedding")
        if weight.total and len(weight.shape) > 1 and (is_head or "embedding" not in weight.part):
            shapes[is_head] += [weight.shape] * weight.copies
    return shapes[True], shapes[False]


def _narrowness(shapes: list[tuple[int, ...]]) -> float:
    """The mean of 1 / width over the elements of matrices, whose width is their shorter side."""
    elements = sum(math.prod(shape) for shape in shapes)
    return sum(math.prod(shape) / min(shape[-2:]) for shape in shapes) / elements if elements else 0.0
