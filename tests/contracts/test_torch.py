"""What `callbacks/_torch.py` and `lit_llm/core/_torch.py` promise, tested on the installed torch, name by name."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_llm.callbacks import _torch as internals
from lit_llm.core import _torch as package


def test_tensors_in_finds_tensors_depth_first():
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
    assert internals.local_box(shard) == (slice(0, 3), slice(0, 3))


def test_the_box_at_a_coordinate_is_that_of_its_rank():
    assert [package.box_at((5, 3), (2,), (rank,), (Shard(0),)) for rank in (0, 1)] == [((3, 3), (0, 0)), ((2, 3), (3, 0))]
    assert package.box_at((4, 6), (2, 3), (1, 2), (Shard(0), Shard(1))) == ((2, 2), (2, 4))
    assert package.box_at((1, 3), (2,), (1,), (Shard(0),))[0] == (0, 3)


def test_a_flattened_mesh_is_one_dimension_of_all_its_ranks(group):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    flat = package.flatten_mesh(mesh["a", "b"], "both")
    assert flat.ndim == 1 and flat.size() == 2 and flat.mesh_dim_names == ("both",)


def test_an_unflattened_mesh_has_the_same_ranks_and_root(group):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    apart = package.unflatten_mesh(mesh, "b", {"c": 2, "d": 1})
    assert apart.mesh_dim_names == ("a", "c", "d") and apart.shape == (1, 2, 1)
    assert apart.mesh.flatten().tolist() == mesh.mesh.flatten().tolist() == [0, 1]
    assert apart["c"].size() == 2 and apart["d"].size() == 1


def test_fsdp2_gathers_chosen_parameters_in_their_own_dtype_in_one_collective(group):
    linear = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    package.gather_in_own_dtype(linear, lambda owners: owners == [linear[0]])
    with CommDebugMode() as seen:
        linear.unshard()
    assert seen.get_total_counts() == 1
    assert [p.dtype for p in package.whole_parameters(linear)] == [torch.bfloat16, torch.float32, torch.float32]
    assert [id(p) for p in package.whole_parameters(linear)] == [id(p) for p in linear.parameters()]


def test_the_group_of_a_collective_is_found_as_an_object_boxed_and_by_name(group):
    own = dist.group.WORLD
    seen = []

    class Seen(package.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name().startswith(("c10d::", "_c10d_functional::all")):
                seen.append(package.group_of(args))
            return func(*args, **(kwargs or {}))

    with Seen():
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
        functional.all_reduce(torch.ones(1), "sum", own).sum()
    assert seen == [own, own]
    assert package.group_of(("sum", own)) is own and package.group_of(("sum", own.group_name)) is own


def test_foreach_arithmetic_is_that_of_single_tensors():
    a, b = [torch.tensor([1.0, -2.0])], [torch.tensor([3.0, 4.0])]
    assert package.foreach_lerp(a, b, 0.25)[0].tolist() == [1.5, -0.5]
    package.lerp_(a, b, 0.25)
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


def test_a_wrapper_has_sizes_and_a_device_and_a_mode_sees_what_is_done_to_it():
    seen = []

    class Wrapper(torch.Tensor):
        __torch_function__ = package.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("the mode comes first")

    class Names(package.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return torch.empty(1)

    x = package.make_wrapper(Wrapper, (2, 10**9), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert x.shape == (2, 10**9) and x.device.type == "cpu" and x.dtype == torch.bfloat16
    with Names():
        x.float()
        torch.log_softmax(x, -1)
        with pytest.raises(RuntimeError):
            x[0, 0].item()
    assert package.CAST in seen and package.LOG_SOFTMAX in seen and package.LOCAL_SCALAR in seen


def test_apply_which_models_override_visits_every_tensor():
    assert list(inspect.signature(nn.Module._apply).parameters)[:2] == ["self", "fn"]
    linear = nn.Linear(1, 1)
    linear._apply(lambda tensor: tensor.double())
    assert linear.weight.dtype == linear.bias.dtype == torch.float64


def test_rows_are_gathered_and_exchanged_by_operators_that_are_counted(group):
    name, rows = torch.distributed.group.WORLD.group_name, torch.arange(12.0).view(4, 3)
    with CommDebugMode() as counted:
        assert package.all_gather_rows(rows, 2, name).shape == (8, 3)
        assert package.exchange_rows(rows, 2, name).shape == (4, 3)
        assert package.send_rows(rows, [1, 3], [2, 5], name).shape == (7, 3)
        assert package.sum_over_ranks(rows, name).shape == (4, 3)
    assert sum(counted.get_comm_counts().values()) == 4


def test_some_parameters_of_a_unit_are_sharded_over_another_mesh(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"]
    experts = init_device_mesh("cpu", (2,), mesh_dim_names=("expert_shard",))
    unit = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(unit, mesh=mesh, shard_placement_fn=package.placement_on(experts, {unit[0].weight: Shard(1)}))
    assert [layer.weight.device_mesh.mesh_dim_names for layer in unit] == [("expert_shard",), ("shard",)]
    assert [layer.weight.placements for layer in unit] == [(Shard(1),), (Shard(0),)]
    other = nn.Linear(4, 4, bias=False)
    fully_shard(other, mesh=experts, shard_placement_fn=package.placement_on(None, {other.weight: Shard(1)}))
    assert other.weight.placements == (Shard(1),)
    package.gather_in_own_dtype(unit, lambda owners: False)  # sees the parameters of both


def test_the_record_of_collectives_counts_and_names_them():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = package.collectives_begun()
        dist.all_reduce(torch.ones(3, 2))
        dist.broadcast(torch.ones(5), 0)
        assert package.collectives_begun() == before + 2
        assert str(package.last_collective()).startswith("gloo:broadcast of [[5]] (")  # a thread notes its end
        assert b"gloo:all_reduce" in package.flight_record()
    finally:
        dist.destroy_process_group()


def test_torch_knows_whether_the_processor_multiplies_in_bf16(monkeypatch):
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    assert package.cpu_has_bf16_units() == any(getattr(torch.cpu, name)() for name in names)
    if sys.platform == "linux" and (flags := re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)):
        assert package.cpu_has_bf16_units() == bool({"amx_bf16", "avx512_bf16"} & set(flags[1].split()))
    for faked in ((True, False), (False, True), (False, False)):
        for name, value in zip(names, faked, strict=True):
            monkeypatch.setattr(torch.cpu, name, lambda value=value: value)
        assert package.cpu_has_bf16_units() == any(faked)


def test_torchs_muon_iterates_with_the_function_that_ours_calls():
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(6, 4))
    matrix.grad = torch.randn(6, 4)
    torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
    direction = package.torch_newton_schulz(matrix.grad.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert direction.dtype == torch.bfloat16
    torch.testing.assert_close(matrix.detach(), -(1.5**0.5) * direction.float())


def test_graphs_and_breaks_of_compilation_are_counted():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1

    before = package.compiled_graphs()
    torch.compile(lambda x: x.cos() + 2, backend="eager")(torch.ones(3))
    one = package.compiled_graphs()
    torch.compile(broken, backend="eager")(torch.ones(3))
    three = package.compiled_graphs()
    assert (one[0] - before[0], one[1] - before[1]) == (1, 0)
    assert (three[0] - one[0], three[1] - one[1]) == (2, 1)
