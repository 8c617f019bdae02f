"""What the plan says a rank sends, against the collectives of the real code on a fake process group."""

import pytest
from collective_cases import CASES, counted, planned

QUICK = ("tensor parallel, bf16-mixed", "context, heads")
SOAK = (  # what slow cases have together
    *("FSDP2, each time", "experts", "ahead, FSDP2, each time"),
    *("latents, context", "latents, tensor", "convolutions, context", "convolutions, tensor"),
)


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.soak if name in SOAK else pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_the_plan_says_what_a_step_sends(name):
    # Left out are sums of the loss and of norms, and gradients of norms under tensor parallelism: 0.3 % of so small a model.
    assert planned(CASES[name]) == pytest.approx(counted(CASES[name]), rel=0.01)
