"""The planner against published numbers and numbers worked out by hand."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from planned_steps import peak_of, step_of

from lit_llm.callbacks.learning_rate_schedules import wsd
from lit_llm.core.schedule_phases import phases
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.pipeline_layers import PipelineLayout
from lit_llm.distributed.pipeline_order import bubble
from lit_llm.models.config import GPTConfig
from lit_llm.models.latent_config import LatentConfig
from lit_llm.optim import MuonAdamW, TorchMuon
from lit_llm.plan import (
    Layout,
    Optimizer,
    Options,
    Plan,
    PlannedRun,
    compute,
    find,
    make_plan,
    total_parameters,
)
from lit_llm.plan.budget import budget
from lit_llm.plan.built_model import build_gpt
from lit_llm.plan.collectives import (
    Collective,
    Exchange,
    collectives_of_rank,
    exchange_of,
)
from lit_llm.plan.micro_batch import micro_batch
from lit_llm.plan.optimizer import state_bytes
from lit_llm.plan.weights import weights_of
from lit_llm.reporting.plan_text import sparkline

LINKS = replace(find("h100-sxm"), node_gbps=100.0, network_gbps=10.0, devices_per_node=8)
# GPT-2 XL as textbooks count it: no biases, rotary positions, tied head, vocabulary not padded.
GPT2_XL = GPTConfig(
    n_layer=48,
    n_head=25,
    n_embd=1600,
    block_size=1024,
    vocab_size=50257,
    mlp="gelu",
    tie_embeddings=True,
    qk_norm=False,
    pad_vocab_to=1,
)

LLAMA2_70B = GPTConfig(
    n_layer=80,
    n_head=64,
    n_embd=8192,
    block_size=4096,
    vocab_size=32000,
    n_kv_head=8,
    mlp="swiglu",
    mlp_width=28672,
    qk_norm=False,
)


def test_fp32_adamw_takes_16_bytes_a_parameter_24_88_gb():
    state = state_bytes(Optimizer("AdamW"), weights_of(GPT2_XL), 4)
    assert state == 8 * 1_555_126_400
    assert (4 + 4) * 1_555_126_400 + state == pytest.approx(24.88e9, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {"amsgrad": True, "fused": True}),
        ("Adam", {"amsgrad": True}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        *((name, {}) for name in ("NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "Rprop")),
    ],
)
def test_state_is_that_of_a_step_of_torchs_optimizer(kind, options):
    model = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=64)
    built = build_gpt(model, None).to_empty(device="cpu")
    optimizer = getattr(torch.optim, kind)(built.parameters(), lr=0.1, **options)
    for parameter in built.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    measured = sum(tensor.nbytes for tensor in tensors if tensor.ndim)  # without counts of steps
    planned = Optimizer.of(optimizer)
    assert planned.is_known and state_bytes(planned, weights_of(model), 4) == measured


@pytest.mark.parametrize("kind", [MuonAdamW, TorchMuon])
def test_muon_keeps_4_bytes_for_matrices_and_8_for_the_rest(kind):
    matrices = 12 * 48 * 1600**2
    optimizer = Optimizer.of(kind([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "name": "matrix"}]))
    assert state_bytes(optimizer, weights_of(GPT2_XL), 4) == 4 * matrices + 8 * (1_555_126_400 - matrices)
    assert optimizer.newton_schulz_bytes(cuda=False) == (2 if kind is TorchMuon else 4)


def test_adafactor_keeps_a_number_a_row_and_one_a_column():
    d, f, layers, vocabulary = 1600, 6400, 48, 50257
    per_block = 4 * (d + d) + 2 * (d + f)
    assert state_bytes(Optimizer("Adafactor"), weights_of(GPT2_XL), 4) == 4 * (
        layers * per_block + vocabulary + d + (2 * layers + 1) * d
    )


def test_llama2_70b_has_its_published_number_of_parameters():
    assert total_parameters(LLAMA2_70B) == 68_976_648_192


def test_a_bf16_block_with_fused_attention_keeps_32_bytes_per_value():
    # Korthikanti et al. 2022, section 4.1, without dropout masks and T² attention weights, in bytes per value of the stream:
    # norm inputs 2 + 2, input of q, k, v 2, q and k 4, v 2, input of the projection 2, of the MLP 2, of GELU 8, its output 8.
    # In fp32 in addition: the logsumexp of each head, and the mean and deviation of two norms.
    gpt2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "bias": True, "qk_norm": False}
    six, five = (
        micro_batch(
            step_of(
                GPTConfig(n_layer=layers, n_head=8, n_embd=512, block_size=128, vocab_size=1000, **gpt2),
                4,
                precision="bf16-true",
            )
        ).peaks
        for layers in (6, 5)
    )
    tokens = 4 * 128
    assert six["loss head"]["activations"] - five["loss head"]["activations"] == tokens * (32 * 512 + 4 * 8 + 4 * 2 * 2)


@pytest.mark.parametrize(
    ("shards", "weights", "gradients", "state"),
    [("nothing", 4, 4, 8), ("optimizer", 4, 4, 1), ("gradients", 4, 0.5, 1), ("parameters", 0.5, 0.5, 1)],
)
def test_zero_divides_16_bytes_per_parameter_over_8_ranks(shards, weights, gradients, state):
    # Rajbhandari et al. 2020, figure 1. For 70e9 parameters: 1,120 GB per rank, and 140 GB with everything sharded.
    strategy = {"optimizer": "zero1", "gradients": "zero2", "parameters": "mesh"}.get(shards)
    layout = Layout(replicate=8) if strategy is None else Layout(strategy, shard=8)
    parts = peak_of(LLAMA2_70B, sequences=1, optimizer=Optimizer("AdamW", fused=True), layout=layout).parts
    found = {name: parts[name] / 68_976_648_192 for name in ("weights", "gradients", "optimizer state")}
    assert found == pytest.approx({"weights": weights, "gradients": gradients, "optimizer state": state})


def test_one_a100_needs_108_9_hours_for_gpt2_xl():
    flops = 6 * 1_555_126_400 * 400_000 * 1024
    run = PlannedRun(GPT2_XL, Optimizer("AdamW", fused=True), max_steps=1, global_batch_size=400_000, micro_batch_size=1)
    plan = make_plan(run, find("a100-80gb"), Options(mfu=0.5))  # its attention adds to the 6 N D of the matrices
    seconds = plan.run_seconds * flops / (plan.flops.total * plan.settings.tokens)
    assert seconds == pytest.approx(391_988, rel=1e-5)
    assert seconds / 3600 == pytest.approx(108.9, rel=1e-3) and seconds / 86400 == pytest.approx(4.54, rel=1e-3)
    assert compute.cost_usd(seconds, 1, (2.0, 4.0)) == pytest.approx((218, 435.5), abs=0.5)


def test_flops_are_6n_and_12_l_d_t_and_causal_attention_is_half_of_it():
    flops = compute.flops_per_token(GPT2_XL)
    assert flops.matmul == 6 * (12 * 48 * 1600**2 + 50257 * 1600)
    assert flops.attention == 12 * 48 * 1600 * 1024
    assert flops.attention_causal == pytest.approx(flops.attention / 2, rel=1e-3)
    assert flops.attention_causal / flops.attention == 1025 / 2048  # a position also attends to itself


def test_chinchilla():
    # Published evaluations of the fit: Chinchilla 1.936 and Gopher 1.993 nats per token.
    assert compute.chinchilla_loss(70e9, 1.4e12) == pytest.approx(1.936, abs=1e-3)
    assert compute.chinchilla_loss(280e9, 300e9) == pytest.approx(1.993, abs=1e-3)


def test_a_budget_of_chinchillas_flops_gives_chinchilla():
    found = budget(Options(flops=6 * 70e9 * 1.4e12), None, 1)
    names, sizes, tokens, losses = zip(*(each.values() for each in found["models"]), strict=True)
    assert names == ("optimal", "half", "twice")
    assert sizes == pytest.approx((70e9, 35e9, 140e9)) and tokens == pytest.approx((1.4e12, 2.8e12, 0.7e12))
    # E + A / N^α + B / D^β by hand: 406.4 / 35e9^0.34 = 0.10567, 410.7 / 2.8e12^0.28 = 0.13438, …
    assert losses == pytest.approx((1.9366, 1.9301, 1.9541), abs=1e-4)
    assert "seconds" not in found and budget(Options(), find("h200"), 8) is None and budget(Options(days=1), None, 8) is None


def test_days_of_devices_are_flops_hours_money_and_energy():
    found = budget(Options(mfu=0.5, days=10, scaling_efficiency=0.8), find("h100-sxm"), 64)
    assert found["flops"] == pytest.approx(64 * 864_000 * 0.4 * 989e12)
    assert (found["seconds"], found["device_hours"]) == pytest.approx((864_000, 15_360))
    assert found["usd"] == pytest.approx((15_360 * 2.0, 15_360 * 5.0))  # the table's range
    assert found["mwh"] == pytest.approx(15_360 * 700 / 1e6)
    best = found["models"][0]
    assert best["tokens"] == pytest.approx(20 * best["parameters"])
    assert 6 * best["parameters"] * best["tokens"] == pytest.approx(found["flops"])
    assert budget(Options(days=1), find("cpu"), 8) is None  # no dense peak


def test_a_ring_sends_twice_the_tensor_but_for_one_part():
    # four ranks, 1 GB, 100 GB/s, 10 us: 1.5 GB sent, and six messages
    reduced = Collective("", "all_reduce", 1e9, ranks=4)
    assert reduced.sent(1) == 1.5e9 and reduced.sent(3) == 1.5e9 and reduced._replace(each=True).sent(3) == 4.5e9
    assert reduced.seconds(LINKS) == pytest.approx(0.015 + 6e-5)
    assert reduced._replace(kind="all_gather").seconds(LINKS) == pytest.approx(0.0075 + 3e-5)


def test_replicas_of_a_sharded_model_add_their_gradients_in_fp32_whatever_the_weights_have():
    layout = Layout("hsdp", replicate=2, shard=2)
    settings = PlannedRun(GPT2_XL, Optimizer("AdamW"), 1, 4, 1, "bf16-true", layout=layout)
    (reduced,) = [each for each in collectives_of_rank(settings, 0, cuda=True) if each.kind == "all_reduce"]
    assert (reduced.size, reduced.ranks, reduced.stride) == (4 * 1_555_126_400 / 2, 2, 2)
    seconds = exchange_of(settings, find("a100-80gb")).total  # and FSDP2's: weights twice in each micro-batch, gradients once
    gathers = sum(each.seconds(find("a100-80gb")) for each in collectives_of_rank(settings, 0, cuda=True))
    assert seconds == pytest.approx(gathers) and reduced.seconds(find("a100-80gb")) > 4 * 1_555_126_400 / 2 / 300e9


def test_an_all_reduce_over_two_levels_is_a_ring_within_nodes_and_one_between():
    # 1 GB, 8 devices per node. Within a node 2·7/8 GB at 100 GB/s and 14 messages of 10 us: 17.5 + 0.14 ms.
    # Between 4 nodes 2·3/4 of 1/8 GB at 10 GB/s and 6 messages: 18.75 + 0.06 ms.
    assert Collective("", "all_reduce", 1e9, 8).seconds(LINKS) == pytest.approx(0.01764)
    assert Collective("", "all_reduce", 1e9, 32).seconds(LINKS) == pytest.approx(0.01764 + 0.01881)
    assert Collective("", "all_gather", 1e9, 32).seconds(LINKS) == pytest.approx((0.01764 + 0.01881) / 2)
    # Neighbours that are a node apart use the network alone: 2·3/4 GB at 10 GB/s and 6 messages.
    assert Collective("", "all_reduce", 1e9, 4, stride=8).seconds(LINKS) == pytest.approx(0.15006)


def test_a_stage_waits_while_the_pipeline_fills_and_drains():
    assert bubble(PipelineLayout(4, "gpipe"), 12) == bubble(PipelineLayout(4), 12) == 3 / 15
    assert bubble(PipelineLayout(1), 8) == 0
    assert bubble(PipelineLayout(4, "interleaved1f1b", 3), 8) == 3 / (3 * 8 + 3)
    assert bubble(PipelineLayout(4, "zbv"), 8) < bubble(PipelineLayout(4, "dualpipev"), 8) < 3 / 11


def test_communication_overlaps():
    # Twice 3 s behind 2 s of computation are 1 s late each, and behind 4 s a quarter of them is. Half of 5 s is waited for, and
    # 7 s after computation are waited for in full.
    exchange = Exchange(waiting=5, behind=((3, 2, 1.0), (7, 1, 0.0)))
    assert exchange.total == 18
    assert exchange.exposed(2, least=0.25, waiting=0.5) == 2.5 + 2 * 1 + 7
    assert exchange.exposed(4, least=0.25, waiting=0.5) == 2.5 + 2 * 0.75 + 7


@pytest.mark.parametrize(
    ("wait", "write"),
    [(20, 0), (2, 500), (2, 1900), (2, 2400)],  # in the foreground, in the background, and beyond the next save
)
def test_failures_lose_as_much_time_as_a_simulation_of_them(wait, write):
    """100,000 failures at random times. Work after the last checkpoint that is whole is done again."""
    interval, mtbf = 2000.0, 400_000.0
    up = torch.empty(100_000, dtype=torch.float64).exponential_(1 / mtbf, generator=torch.Generator().manual_seed(0))
    period = max(interval, write) + wait
    whole = ((up - write) / period).floor().clamp(min=0)  # checkpoint j is copied until j · period
    simulated = (up.sum() / (interval * whole.sum()) - 1).item()
    saves = SimpleNamespace(wait_seconds=wait, mtbf_seconds=mtbf, save_seconds=write, copy_bytes=write > 0)
    assert Plan.lost(saves, interval) == pytest.approx(simulated, rel=0.03)


def test_a_checkpoint_of_70b_is_written_by_64_machines():
    """12 bytes per parameter at 0.65 GB/s each, 50,000 device-hours between failures of 512 devices."""
    layout = Layout("mesh", shard=512)
    settings = PlannedRun(LLAMA2_70B, Optimizer("AdamW", fused=True), 10, 512, 1, "bf16-mixed", layout=layout)
    size, mtbf = 12 * 68_976_648_192, 50_000 / 512 * 3600

    def figures(options: Options | None = None, **saves) -> tuple[float, float, float]:
        plan = make_plan(replace(settings, **saves), find("h100-sxm"), options)
        return plan.save_seconds, plan.best_interval_seconds, plan.lost_fraction

    written, together = size / 64 / 0.65e9, size / 0.65e9
    young = (2 * written * mtbf) ** 0.5
    assert figures(async_checkpoints=False) == pytest.approx((written, young, 2 * written / young))
    assert (round(young / 60), round(2 * written / young, 3)) == (62, 0.011)
    copy = size / 512 / 54e9  # over each device's bus
    young = (2 * copy * mtbf) ** 0.5
    assert figures() == pytest.approx((written, young, copy / young + (young / 2 + written) / mtbf))
    rank_0 = (2 * together * mtbf) ** 0.5
    assert figures(async_checkpoints=False, sharded_checkpoints=False) == pytest.approx(
        (together, rank_0, 2 * together / rank_0)
    )
    shared = size / 1e9  # the write takes longer than Young's interval for a copy
    assert figures(Options(storage_gbps=1.0)) == pytest.approx((shared, shared, copy / shared + 1.5 * shared / mtbf))


@pytest.mark.parametrize(
    ("mesh", "writers"),
    [
        ({"replicate": 2, "shard": 32}, (32, 8, 4)),  # the first replica, on 4 of 8 machines
        ({"replicate": 4, "shard": 4, "pipeline": PipelineLayout(4)}, (16, 4, 4)),  # ranks 0 to 3 of every 16
        ({"replicate": 8}, (1, 1, 1)),  # nothing is split: rank 0
    ],
)
def test_the_first_replica_writes_a_checkpoint(mesh, writers):
    layout = Layout("mesh", **mesh)
    settings = PlannedRun(GPT2_XL, Optimizer("AdamW", fused=True), 10, 192, 1, layout=layout)
    plan = make_plan(settings, find("a100-80gb"), Options(save_gbps=2.0))
    assert plan.writers == writers
    assert plan.save_seconds == pytest.approx(12 * plan.parameters * writers[1] / writers[0] / 2e9)


# -- offload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "kept"), [(8, False), (16, False), (8, True), (1, False)])
def test_offload_costs_copies_and_an_update_in_host_memory(devices, kept):
    """Weights in 4 bytes come from host memory for every gather; gradients go there and are added to earlier ones."""
    kept_whole, n, blocks = KeptWhole(weights=kept, gradients=kept), total_parameters(GPT2_XL), 48 * 12 * 1600**2
    layout = Layout("mesh", shard=devices, cpu_offload=True, kept=kept_whole)
    settings = PlannedRun(GPT2_XL, Optimizer("AdamW", fused=True), 10, 3 * devices, 1, "bf16-mixed", layout=layout)
    host = {"copy_gbps": 20.0, "memory_gbps": 100.0, "memory_gb": 30.0}
    plan, unpriced = (make_plan(settings, replace(LINKS, host=h)) for h in (host, dict.fromkeys(host)))
    times = 1 if kept else 3
    copied = 4 * (times * (n if kept else n + blocks) + times * n) / devices
    sent = [each for each in collectives_of_rank(plan.settings, 0, cuda=True) if each.kind == "copy"]
    assert sum(each.sent(3) for each in sent) == pytest.approx(copied, rel=2e-3)  # norms of the blocks
    assert sum(each.seconds(plan.hardware) * (1 if kept else 3) for each in sent) == pytest.approx(copied / 20e9, rel=2e-3)
    on_machine = min(8, devices) / devices * n
    clipping_and_update = on_machine * (5 * 4 + 2 * 8)
    assert plan.times.host == pytest.approx((clipping_and_update + (0 if kept else 2) * 12 * on_machine) / 100e9, rel=1e-3)
    assert plan.times.step == pytest.approx(plan.times.compute + plan.times.exposed + plan.times.host)
    assert plan.host_bytes == pytest.approx(16 * on_machine, rel=1e-3)
    assert unpriced.times.host == 0 and unpriced.times.communication is None
    assert not {"weights", "optimizer state"} & set(plan.memory.parts)
    assert plan.memory.parts.get("gradients", 0) < 0.1 * 4 * n / devices, "they are in host memory"


def test_offload_is_advised_with_its_price_and_not_beyond_host_memory():
    layout = Layout("mesh", shard=8)
    settings = PlannedRun(GPT2_XL, Optimizer("AdamW", fused=True), 10, 16, 1, "bf16-mixed", layout=layout)

    def plan_of(gb: float, **changes):
        host = {"copy_gbps": 20.0, "memory_gbps": 100.0, "memory_gb": gb}
        return make_plan(replace(settings, **changes), replace(LINKS, host=host))

    changed = {"layout": replace(layout, cpu_offload=True)}
    offloaded, advised = plan_of(30.0, **changed), plan_of(30.0).next_steps
    advice = {step.flag: step for step in advised}["--trainer.strategy.cpu_offload true"]
    assert (advice.host_bytes, advice.step_seconds) == (offloaded.host_bytes, offloaded.times.step)
    assert offloaded.fits is True and plan_of(24.0, **changed).fits is False
    assert not offloaded.copy_bytes and plan_of(70.0, **changed).copy_bytes  # copies get half of what is free


def test_flops_of_latent_attention_by_its_matrices():
    """DeepSeek-V3's widths: scores over 128 + 64 dimensions, values of 128; all positions (arXiv 2412.19437, section 4.2)."""
    d, layers, heads, n, r, v, c, e, hidden, length, rows = 512, 3, 4, 128, 64, 96, 160, 192, 1000, 256, 320
    for rank in (e, None):
        of_queries = d * heads * (n + r) if rank is None else e * (d + heads * (n + r))
        attention = of_queries + d * (c + r) + c * heads * (n + v) + heads * v * d
        matrices = layers * (attention + 3 * d * hidden) + rows * d
        latent = {"kv_rank": c, "query_rank": rank, "nope_head_dim": n, "rope_head_dim": r, "value_head_dim": v}
        sizes = {"n_layer": layers, "n_embd": d, "n_head": heads, "mlp_width": hidden, "block_size": length, "vocab_size": rows}
        model = GPTConfig(**sizes, mlp="swiglu", qk_norm=False, latent=LatentConfig(**latent))
        found = compute.flops_per_token(model)
        assert (found.matmul, found.attention) == (6 * matrices, 6 * layers * heads * (n + r + v) * length)
        assert found.attention_causal == pytest.approx(found.attention * (length + 1) / 2 / length)


def test_phases_of_wsd_and_a_sparkline():
    rate = partial(wsd, peak=1.0, final=0.1, warmup_steps=100, total_steps=1000, decay_steps=200, shape="linear")
    found = phases(rate, 1000, lambda step: 10 * step)
    assert [(p.name, p.steps, p.tokens) for p in found] == [
        ("warmup", 100, 1000),
        ("stable", 700, 7000),
        ("decay", 200, 2000),
    ]
    drawn = sparkline(lambda t: min(t, 100 - t), 99, width=9)
    assert drawn[0] == "▁" == drawn[-1] and drawn[4] == "█" and drawn == drawn[::-1]
