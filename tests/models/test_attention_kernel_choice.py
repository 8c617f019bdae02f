"""`compute.attention`: what is refused, and the line that names the choice."""

from unittest import mock

import pytest
import torch

from lit_llm.core.errors import UserError
from lit_llm.distributed.compute_config import ComputeConfig
from lit_llm.distributed.parallelize import parallelize
from lit_llm.models import attention_kernel_choice
from lit_llm.models.attention_kernel_choice import attention_problem, describe, flash_implementation
from lit_llm.models.gpt import GPT, GPTConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**settings):
    return GPTConfig(**{"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 32, **settings})


def hopper(modules=()):
    """A machine with an H100 and some modules installed."""
    return (
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_name", lambda device: "H100"),
        mock.patch.object(attention_kernel_choice, "_exists", lambda name: name in modules),
    )


@pytest.mark.parametrize(
    ("kernel", "model", "told"),
    [
        ("flex", {}, "FlexAttention has no backward pass on cpu: use --compute.attention auto"),
        ("flash3", {}, "needs an NVIDIA GPU of compute capability 9.x, but this device is cpu"),
        ("flash4", {}, "needs an NVIDIA GPU of compute capability 9.x or 10.x, but this device is cpu"),
        ("sdpa", {"window": 8}, "needs plain causal attention, but no layer has it (window 8)"),
        ("sdpa", {"dropout": 0.1}, "needs plain causal attention, but no layer has it (causal, dropout)"),
    ],
)
def test_a_kernel_that_cannot_work_is_refused(kernel, model, told):
    with torch.device("meta"):
        model = GPT(config(**model))
    with pytest.raises(UserError) as error:
        parallelize(model, ComputeConfig(attention=kernel), CPU)
    assert str(error.value).startswith(f"compute.attention is {kernel}, ") and told in str(error.value)


@pytest.mark.parametrize(
    ("modules", "model", "found"),
    [
        ((), {}, None),
        (("flash_attn_interface",), {}, "flash3"),
        (("flash_attn.cute",), {}, "flash4"),
        (("flash_attn_interface",), {"dropout": 0.1}, None),  # it has no dropout
        (("flash_attn_interface",), {"window": 8}, None),  # no layer would use it
        (("flash_attn_interface",), {"layers": {"window": [8, None]}}, "flash3"),
    ],
)
def test_auto_takes_the_flash_attention_that_works_there(modules, model, found):
    capability, name, exists = hopper(modules)
    with capability, name, exists:
        assert flash_implementation(config(**model), "auto", CUDA) == found
        assert flash_implementation(config(**model), "sdpa", CUDA) is None


def test_a_flash_attention_that_is_not_installed_is_refused():
    capability, name, exists = hopper()
    with capability, name, exists:
        told = attention_problem(config(), "flash3", CUDA)
    assert told == (
        "compute.attention is flash3, but its module flash_attn_interface is not installed: use --compute.attention auto"
    )


def test_the_line_names_kernel_and_reason_of_each_kind_of_layer():
    mixed = config(layers={"window": [8, 8, None]})
    assert describe(mixed, "auto", CPU) == (
        "attention: blocks in 2 of 3 layers (window 8): torch's flash kernel for cpu, on one block of positions after another; "
        "sdpa in 1 of 3 layers (causal): torch's kernel for cpu (--compute.attention)"
    )
    capability, name, exists = hopper(("flash_attn_interface",))
    with capability, name, exists:
        assert describe(mixed, "auto", CUDA) == (
            "attention: flex in 2 of 3 layers (window 8): FlexAttention, with a block mask of each batch; "
            "sdpa in 1 of 3 layers (causal): FlashAttention-3 (--compute.attention)"
        )
    dropped = describe(config(dropout=0.1, mask_documents=True, eos_id=1), "auto", CPU)
    assert "(causal, documents, dropout): plain torch, one block of positions after another" in dropped
