"""A device from a user's YAML file: `--hardware FILE.yaml`, and `hardware=FILE.yaml` in a sweep."""

import pytest

from lit_llm.core.errors import UserError
from lit_llm.core.yaml_reading import dump_yaml
from lit_llm.plan import find

OWN = {
    "source": "measured",
    "device_name": "NVIDIA H100",
    "compute_capability": 9,
    "peak_tflops": {"bf16": 700.0, "tf32": None, "fp32": 60, "fp8": 1400.0},
    "memory_gb": 96,
    "memory_gbps": 2400,
    "node_gbps": 450,
    "network_gbps": None,
    "devices_per_node": 4,
    "price_usd_hour": [1.5, 1.5],
    "watts": 500,
    "host": {"copy_gbps": 50, "memory_gbps": None, "memory_gb": 512},
}


def test_a_file_with_the_keys_of_the_table_is_a_device(tmp_path):
    path = tmp_path / "my-h100-96gb.yaml"
    path.write_text(dump_yaml(OWN))
    found = find(str(path))
    assert {key: getattr(found, key) for key in OWN} == {**OWN, "price_usd_hour": (1.5, 1.5)}
    assert (found.name, found.is_gpu, found.peak_for("bf16-mixed")) == ("my-h100-96gb", True, 700.0)
    path.write_text(dump_yaml({**OWN, "price_usd_hour": None, "device_name": "cpu"}))
    assert not find(str(path)).is_gpu and find(str(path)).price_usd_hour is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory": 80}, "has unknown memory; its keys are device_name, source"),
        ({"memory_gb": "80 GB"}, "memory_gb is '80 GB', but must be a number above 0, or null"),
        ({"devices_per_node": 2.5}, "devices_per_node is 2.5, but must be a whole number above 0"),
        ({"price_usd_hour": [3, 2]}, "price_usd_hour is [3, 2], but must be two numbers above 0, the lower one first"),
        ({"peak_tflops": {"bf16": 1}}, "must be numbers above 0, or null, for bf16, tf32, fp32, fp8"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(change, said, tmp_path):
    path = tmp_path / "own.yml"
    path.write_text(dump_yaml({key: value for key, value in (OWN | change).items() if value is not ...}))
    with pytest.raises(UserError) as refusal:
        find(str(path))
    text = str(refusal.value)
    assert said in text and text.startswith(f"{path}") and text.endswith("(--hardware).") and "\n" not in text
