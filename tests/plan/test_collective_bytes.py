"""What the plan says a rank sends, against the collectives of the real code on a fake process group."""

import pytest
from collective_cases import CASES, counted, planned

QUICK = ("tensor parallel, bf16-mixed", "context, heads")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES])
def test_the_plan_says_what_a_step_sends(name):
    # Left out are sums of the loss and of norms, and gradients of norms under tensor parallelism: 0.3 % of so small a model.
    assert planned(CASES[name]) == pytest.approx(counted(CASES[name]), rel=0.01)
