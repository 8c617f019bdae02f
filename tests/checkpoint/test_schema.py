"""A checkpoint whose checksums are right and whose content is wrong: one sentence that names the key."""

import pytest
import torch
from saved import checkpoint, step_path

from lit_llm.checkpoint import disk_format
from lit_llm.checkpoint.load_weights import mismatch
from lit_llm.checkpoint.schema import part_problem
from lit_llm.core.errors import UserError

STATE = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
RIGHT = {
    "optimizer_states": [STATE],
    "lr_schedulers": [],
    "callbacks": {"StepCheckpoint": {"best_score": None}},
    "loops": {"fit_loop": {"state_dict": {}}},
    "settings": {"trainer.max_steps": 3},
    "model_config": {"n_layer": 1},
    "prompt_start": [3],
    "TextFiles": {"consumed_samples": 3},
}
PLACEHOLDER = {"sharded tensor": "w", "shape": [2], "dtype": "float32"}
WRONG = {
    "global_step": ["seven", None, -7, 2.5, True, 2**70, [3]],
    "epoch": [-1, "0"],
    "tokens": [1.5, "many"],
    "state_dict": [None, {"w": 3}, {"w": {0: {1: 2}}}, [torch.ones(1)], {3: torch.ones(1)}, {"w": torch.eye(3).to_sparse()}, {"w": torch.ones(1, device="meta")}],  # noqa: E501
    "ema_state_dict": [[], {"w": 3}],
    "loops.fit_loop": [
        *({"epoch_progress": {"total": {"ready": value}}} for value in (None, -1, "x", 2.5, [], {}, {1: 2})),
        *({"epoch_progress": {"current": value}} for value in (None, [], 3)),
    ],
    "loops.test_loop": [{"epoch_loop.state_dict": {"_batches_that_stepped": None}}],
    "loops.validate_loop": [{"batch_progress": {"is_last_batch": value}} for value in ("maybe", [], {})],
    "settings": [None, [], {1: 2}, dict.fromkeys(map(str, range(10_001)), 0)],
    "model_config": ["gpt", None],
    "callbacks": [[], None, {0: {}}],
    "loops": [[], 3],
    "lr_schedulers": [{}, [3]],
    "optimizer_states": [
        [3],
        [{"state": {0: 3}, "param_groups": [{"params": [0]}]}],
        [{"state": {7: {}}, "param_groups": [{"params": [0]}]}],
        [{"state": {}, "param_groups": [{"lr": "high", "params": []}]}],
        [{"state": {0: {"exp_avg": torch.eye(3).to_sparse()}}, "param_groups": [{"params": [0]}]}],
    ],
    "lora": [3],
    "base": [{"path": "x"}, {"path": 3, "sha256": "x"}, "x"],
    "pytorch-lightning_version": [3, "hello"],
    "optimizer_class": [3],
    "tokenizer_sha256": [b"x"],
    "prompt_start": ["abc", [-1], [1.5]],
}  # fmt: skip


def test_a_right_one_is_read(tmp_path):
    disk_format.write(checkpoint(7, **RIGHT, sharded=PLACEHOLDER), step_path(tmp_path, 7))
    assert disk_format.read(step_path(tmp_path, 7))["settings"] == RIGHT["settings"]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
@pytest.mark.parametrize("read", [disk_format.read, disk_format.read_values])
def test_a_wrong_value_is_refused_by_its_key(read, key, value, tmp_path):
    if read is disk_format.read_values and key == "state_dict" and isinstance(value, dict) and "w" in value:
        return  # it reads tensors without their data
    key, _, below = key.partition(".")
    torch.save(checkpoint(7, **RIGHT) | {key: {below: value} if below else value}, tmp_path / "step.ckpt")
    with pytest.raises(UserError, match=key) as raised:
        read(tmp_path / "step.ckpt")
    assert str(tmp_path / "step.ckpt") in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "placeholder",
    [
        PLACEHOLDER | {"dtype": "os"},
        PLACEHOLDER | {"shape": [-1]},
        PLACEHOLDER | {"sharded tensor": 3},
    ],
)
def test_a_placeholder_names_a_tensor(placeholder, tmp_path):
    torch.save(checkpoint(7, x={"deep": [placeholder]}), tmp_path / "step.ckpt")
    with pytest.raises(UserError, match=r"x\.deep\.0"):
        disk_format.read(tmp_path / "step.ckpt")


def test_a_shard_has_parts():
    assert part_problem({"w": {"offset": [0, 0], "part": torch.ones(2, 3)}}) is None
    for wrong in (3, {}, {"offset": [0], "part": torch.ones(2, 3)}, {"offset": ["0", 0], "part": torch.ones(2, 3)}):
        assert "'w'" in part_problem({"w": wrong})


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_another_kind_of_number_do_not_fit(dtype):
    own = {"w": torch.ones(2)}
    assert mismatch(own, {"w": torch.ones(2, dtype=torch.bfloat16)}, "x") is None
    assert str(dtype) in mismatch(own, {"w": torch.ones(2).to(dtype)}, "x")
