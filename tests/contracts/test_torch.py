"""What `callbacks/_torch.py` and `lit_llm/_torch.py` promise, tested on the installed torch, name by name."""

from __future__ import annotations

import inspect

import pytest
import torch
import torchmetrics
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from lit_llm import _torch as package
from lit_llm.callbacks import _torch as internals


def test_tree_leaves_finds_tensors_depth_first():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert [id(t) for t in internals.tensors_in({"x": (a, [b, None]), "y": 3, "z": c})] == [id(a), id(b), id(c)]


def test_foreach_mul_multiplies_each_tensor_in_place():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    internals.multiply_(tensors, torch.tensor(0.5))
    assert [t.tolist() for t in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]


def test_the_execution_engine_calls_after_all_gradients_in_order_of_queueing():
    seen = []
    x = torch.ones(1, requires_grad=True)
    loss = (2 * x).sum()

    def began(grad):
        internals.after_gradients(lambda: seen.append(("first", x.grad.item())))
        internals.after_gradients(lambda: seen.append(("second", x.grad.item())))

    loss.register_hook(began)
    loss.backward()
    assert seen == [("first", 2.0), ("second", 2.0)]


def test_profiler_enabled_is_true_while_a_torch_profiler_records_and_its_events_have_times():
    assert not internals.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        assert internals.is_profiling()
        torch.ones(4).sum()
    assert not internals.is_profiling()
    event = next(event for event in internals.profiler_events(recording) if event.name() == "aten::sum")
    assert event.duration_ns() >= 0 and event.start_ns() > 0 and event.start_thread_id() and not event.is_async()


def test_fused_optimizers_say_that_they_unscale_and_do_not_when_told_so():
    for fused in (False, True):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=fused)
        assert internals.unscales_by_itself(optimizer) is fused
        package.take_unscaled_gradients(optimizer)
        assert not internals.unscales_by_itself(optimizer)
    assert '"_step_supports_amp_scaling"' in inspect.getsource(torch.amp.GradScaler.step)


def test_memory_history_takes_these_arguments():
    assert {"enabled", "max_entries"} <= set(inspect.signature(torch.cuda.memory._record_memory_history).parameters)
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("file")


@pytest.fixture
def group():
    """One process that counts as two: collectives do nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_prepares_a_reduction_as_its_forward_pass_does(group):
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    internals.prepare_reduction(ddp)
    source = inspect.getsource(DistributedDataParallel)
    assert "reducer.prepare_for_forward()" in source and "reducer.prepare_for_backward([])" in source


def test_the_local_box_of_a_shard_is_its_shape_and_offset(group):
    mesh = init_device_mesh("cpu", (2,))
    shard = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])  # rank 0 holds the larger chunk
    assert package.local_box(shard) == ((3, 3), (0, 0))


def test_a_flattened_mesh_is_one_dimension_of_all_its_ranks(group):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    flat = package.flatten_mesh(mesh["a", "b"], "both")
    assert flat.ndim == 1 and flat.size() == 2 and flat.mesh_dim_names == ("both",)


def test_foreach_arithmetic_is_that_of_single_tensors():
    a, b = [torch.tensor([1.0, -2.0])], [torch.tensor([3.0, 4.0])]
    assert package.foreach_lerp(a, b, 0.25)[0].tolist() == [1.5, -0.5]
    package.foreach_lerp_(a, b, 0.25)
    package.foreach_mul_(a, 2.0)
    package.foreach_add_(a, b, alpha=-1.0)
    assert a[0].tolist() == [0.0, -5.0]
    package.foreach_sign_(a)
    assert a[0].tolist() == [0.0, -1.0]


def test_attention_on_a_cpu_runs_the_kernels_that_are_named():
    names = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Names():
        q = torch.ones(1, 1, 4, 8, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert {package.CPU_ATTENTION, package.CPU_ATTENTION_BACKWARD} <= names


def test_flop_counter_takes_formulas_by_kernel():
    with FlopCounterMode(display=False, custom_mapping={package.CPU_ATTENTION: lambda *args, **kwargs: 7}) as counter:
        q = torch.ones(1, 1, 4, 8)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counter.get_total_flops() == 7


def test_hybrid_shard_grad_op_is_a_sharding_strategy_of_fsdp1():
    assert package.HYBRID_SHARD_GRAD_OP.name == "_HYBRID_SHARD_ZERO2"


def test_apply_which_models_and_metrics_override_visits_every_tensor():
    for kind in (nn.Module, torchmetrics.Metric):
        assert list(inspect.signature(kind._apply).parameters)[:2] == ["self", "fn"]
    assert "exclude_state" in inspect.signature(torchmetrics.Metric._apply).parameters
    linear = nn.Linear(1, 1)
    linear._apply(lambda tensor: tensor.double())
    assert linear.weight.dtype == linear.bias.dtype == torch.float64
