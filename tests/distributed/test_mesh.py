"""MeshStrategy apart from losses: parts on each rank, memory, refusals, generation, reduction in fp32."""

import pytest
import torch
from launch import run_ranks
from lightning.pytorch.strategies import FSDPStrategy

from lit_llm.distributed.mesh_strategy import MeshStrategy

BUILD = """
import resource, torch
from launch import report
from lightning.pytorch import Trainer
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel
from lit_llm.distributed.mesh_strategy import MeshStrategy

class Built(LanguageModel):
    def configure_model(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        super().configure_model()
        self.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024  # bytes, at the highest

    def configure_optimizers(self):
        raise SystemExit(0)

module = Built(GPTConfig(n_layer=8, n_head=8, n_embd=768, vocab_size=1024, block_size=64))
trainer = Trainer(accelerator="cpu", devices=4, strategy=MeshStrategy(), max_steps=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
try:
    trainer.fit(module, [0])
except SystemExit:
    pass
whole = sum(p.numel() for p in module.model.parameters()) * 4
report(grown=module.grown, whole=whole, largest=max(p.numel() for p in module.model.parameters()) * 4)
"""


@pytest.mark.slow
def test_building_a_sharded_model_never_allocates_the_whole_model_on_a_rank(tmp_path):
    for each in run_ranks(BUILD, 4, tmp_path):
        assert each["whole"] > 200e6
        # A quarter of the model, the tensor being drawn, and the memory of allocators and lazy imports of torch.
        assert each["grown"] < each["whole"] / 4 + 2 * each["largest"] + 40e6 < 0.6 * each["whole"]


LEFT_WHOLE = """
from launch import report
from lightning.pytorch import LightningModule, Trainer
import torch
from lit_llm.distributed.mesh_strategy import MeshStrategy

class Forgetful(LightningModule):
    def configure_model(self):
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch): ...
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

trainer = Trainer(accelerator="cpu", devices=2, strategy=MeshStrategy(), max_steps=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
try:
    trainer.fit(Forgetful(), [0])
    report(said="")
except ValueError as error:
    report(said=str(error))
"""


@pytest.mark.slow
def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    for each in run_ranks(LEFT_WHOLE, 2, tmp_path):
        assert "2 processes, but layer.weight, layer.bias of Forgetful is not distributed" in each["said"]


LOGITS = """
import torch
from launch import report
from lightning.pytorch import Trainer
from lit_llm.models.gpt import GPTConfig
from lit_llm.training.language_model import LanguageModel
from lit_llm.models.generation import Sampling, generate
from lit_llm.distributed.mesh_strategy import MeshStrategy
from layouts import MODELS, SIZE

out = {}
class Sampled(LanguageModel):
    def configure_optimizers(self):
        ids = torch.arange(32)[None] * 7 % 61
        with torch.no_grad():
            for length in (1, 3, 8, 31, 32):
                out[str(length)] = self.model(ids[:, :length])
        out["text"] = list(generate(self.model, [5, 9, 2], max_new_tokens=40, sampling=Sampling(temperature=0)))
        raise SystemExit(0)

for name, strategy in STRATEGIES.items():
    torch.manual_seed(3)
    module = Sampled(GPTConfig(**{**SIZE, **MODELS["gpt2"], "vocab_size": 61, "init_std": 0.3}))
    trainer = Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    try:
        trainer.fit(module, [0])
    except SystemExit:
        pass
    out = {f"{name} {key}" if " " not in key else key: value for key, value in out.items()}
report(**out)
"""


@pytest.mark.slow
def test_every_layout_generates_the_same_text(tmp_path, monkeypatch):
    """Prompts of any length, also those not divisible by the ranks, and beyond the context."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # earlier tests may set it; it must not affect the weights of any rank
    script = LOGITS.replace("STRATEGIES", "{'tp': MeshStrategy(tensor_parallel=2), 'fsdp': MeshStrategy()}").replace(
        "RANKS", "2"
    )
    single = LOGITS.replace("STRATEGIES", "{'one': 'auto'}").replace("RANKS", "1")
    (tmp_path / "one").mkdir()
    reference = run_ranks(single, 1, tmp_path / "one")[0]
    for each in run_ranks(script, 2, tmp_path):
        for layout in ("tp", "fsdp"):
            for length in (1, 3, 8, 31, 32):
                ours = each[f"{layout} {length}"]
                assert ours.shape == (1, length, 61)
                torch.testing.assert_close(ours, reference[f"one {length}"], rtol=1e-4, atol=1e-5)
            assert each[f"{layout} text"] == reference["one text"]


REDUCED = """
from types import SimpleNamespace
import torch, torch.distributed as dist
from launch import report
from torch.distributed.device_mesh import init_device_mesh
from lit_llm.distributed.keep_rule import KeptWhole
from lit_llm.distributed.ddp import reduce_in_fp32
from lit_llm.distributed.fsdp import apply_fsdp
from lit_llm.models.gpt import GPT, GPTConfig

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (4,))
rank = dist.get_rank()
# In bf16 256 + 1 is 256 again, so a sum that rounds on the way loses what the mean, (256 + 1 + 1 + 2) / 4 = 65, has.
value = [256.0, 1.0, 1.0, 2.0][rank]

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    def forward(self):
        return (self.weight * value).sum()

ddp = torch.nn.parallel.DistributedDataParallel(Scale())
ddp.register_comm_hook(None, reduce_in_fp32)
ddp().backward()


model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=4, pad_vocab_to=4)).to(torch.bfloat16)
strategy = SimpleNamespace(shard_mesh=mesh, cpu_offload=False, root_device=torch.device("cpu"), autocast_dtype=None, prefetch=1,
                           kept=KeptWhole(weights=False, gradients=False))
apply_fsdp(model, strategy)
# A loss whose gradient with respect to the head, and to no other weight, is `value` on this rank.
model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long),
      loss=lambda x, weight, targets, **_: (weight * value).sum() + 0 * x.sum()).backward()

# fp16: an overflow in one rank's part skips the step of all.
from torch.distributed.tensor import distribute_tensor, Shard
from lit_llm.distributed.mesh_strategy import loss_scaling

weight = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
optimizer, scaler = torch.optim.SGD([weight], lr=1.0), loss_scaling("cpu").scaler
after = []
for broken in (3, None):
    scaler.scale(torch.ones(()))
    weight.grad = distribute_tensor(torch.full((8,), float(scaler.get_scale())), mesh, [Shard(0)])
    if rank == broken:
        weight.grad.to_local()[0] = float("inf")
    before = scaler.get_scale()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after.append([weight.full_tensor().tolist(), scaler.get_scale() / before])
report(overflow=after, ddp=ddp.module.weight.grad.float(), dtype=str(ddp.module.weight.grad.dtype),
       fsdp=model.head.weight.grad.full_tensor().float(), fsdp_dtype=str(model.head.weight.grad.dtype))
"""


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    return run_ranks(REDUCED, 4, tmp_path_factory.mktemp("reduced"))


@pytest.mark.slow
def test_an_fp16_overflow_on_one_rank_skips_the_step_of_all(reduced):
    for each in reduced:
        assert each["overflow"] == [[[1.0] * 8, 0.5], [[0.0] * 8, 1.0]]


@pytest.mark.slow
def test_bf16_gradients_are_reduced_in_fp32(reduced):
    for each in reduced:
        assert each["dtype"] == "torch.bfloat16" and each["ddp"].tolist() == [65.0] * 8
        assert each["fsdp_dtype"] == "torch.bfloat16" and (each["fsdp"] == 65.0).all()


def test_fsdp1_settings_are_translated_or_refused():
    def carried(**settings):
        return MeshStrategy.from_fsdp1(FSDPStrategy(**settings), num_nodes=2)

    def of(mesh):
        return mesh.replicate, mesh.shard, mesh.reshard_after_forward, mesh.cpu_offload, mesh.sharded_checkpoints

    assert of(carried()) == (1, "auto", True, False, False)
    assert of(carried(sharding_strategy="SHARD_GRAD_OP", state_dict_type="sharded")) == (1, "auto", False, False, True)
    assert of(carried(sharding_strategy="HYBRID_SHARD", cpu_offload=True, auto_wrap_policy={torch.nn.Linear})) == (
        *(2, "auto", True),
        *(True, False),
    )
    assert of(MeshStrategy.from_fsdp1("fsdp_cpu_offload", 1)) == (1, "auto", True, True, False)
    for settings, said in (
        ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD has no counterpart"),
        ({"activation_checkpointing_policy": {torch.nn.Linear}}, "--compute.activation_checkpointing"),
        ({"device_mesh": (2, 2), "sharding_strategy": "HYBRID_SHARD"}, "device_mesh"),
    ):
        with pytest.raises(ValueError, match=said):
            carried(**settings)


@pytest.mark.parametrize(
    ("settings", "world", "sizes"),
    [
        ({}, 8, (1, 1, 8, 1, 1)),
        ({"tensor_parallel": 2}, 8, (1, 1, 4, 1, 2)),
        ({"replicate": 2, "shard": 2, "tensor_parallel": 2}, 8, (1, 2, 2, 1, 2)),
        ({"pipeline": 2, "context": 2, "tensor_parallel": 2}, 16, (2, 1, 2, 2, 2)),
    ],
)
def test_the_mesh_takes_all_processes(settings, world, sizes):
    assert MeshStrategy(**settings).sizes(world) == sizes


@pytest.mark.parametrize(
    ("settings", "world", "said"),
    [
        ({"tensor_parallel": 2}, 5, "but the run has 5: use 4 or 6"),
        ({"tensor_parallel": 4}, 2, "but the run has 2: use 4"),
        ({"shard": 3}, 4, "needs 3 processes, but the run has 4"),
        ({"pipeline": 3, "context": 2}, 8, "pipeline 3, .*context 2.* needs a multiple of 6 .*: use 6 or 12"),
    ],
)
def test_a_mesh_of_the_wrong_size_is_refused_with_sizes_that_fit(settings, world, said):
    with pytest.raises(ValueError, match=said):
        MeshStrategy(**settings).sizes(world)
