"""What a launch costs, and the loss of a last step that was not a logged one."""

import dataclasses
import json
import re
import time

import pytest
from recipe_runs import curve, run

from lit_llm.core.errors import UserError
from lit_llm.core.hardware import find
from lit_llm.training import plan_monitor
from lit_llm.training.plan_monitor import PlanMonitor, RunCost


def test_cost_is_devices_times_hours_times_price():
    h100 = find("h100-sxm")
    cost = RunCost.known(h100, 2.5, 8)
    assert cost.line("planned for", 1800) == "cost: about $10 planned for 30m00s on 8 x h100-sxm (--plan.price)"
    low, high = (8 * 5 * price for price in h100.price_usd_hour)
    assumed = RunCost.known(h100, None, 8).line("for", 5 * 3600)
    assert assumed == f"cost: about ${low:.0f} to ${high:.0f} for 5h00m on 8 x h100-sxm (assumed price, --plan.price)"
    assert cost.line("for", 0) == "cost: less than $0.01 for 0s on 8 x h100-sxm (--plan.price)"
    assert RunCost.known(find("cpu"), None, 1) is None


def test_a_run_with_a_price_has_a_line_at_its_start_and_one_at_its_end(folder, capsys, monkeypatch):
    """And the last step, 8, which is not a logged one, has the loss that a run has that logs it."""
    plan = plan_monitor.step_times
    monkeypatch.setattr(plan_monitor, "step_times", lambda *of: dataclasses.replace(plan(*of), step=450.0))
    began = time.monotonic()
    said = run(capsys, "fit", "--config", "tiny.yaml", "--plan.price", "100", "--trainer.log_every_n_steps=3")[1].splitlines()
    (launch,) = json.loads((folder / "runs" / "tiny" / "plan.json").read_text())["launches"]
    assert (launch["devices"], launch["price_usd_hour"], launch["predicted"]["run_seconds"]) == (1, [100, 100], 8 * 450)
    assert 0 < launch["measured"]["trained_seconds"] < time.monotonic() - began
    costs = [line for line in said if line.startswith("cost")]
    assert costs[0].startswith("cost: about $100 planned for 1h00m on ")
    assert re.fullmatch(r"cost: (about \$0\.\d+|less than \$0.01) for \d+s on .* \(--plan.price\)", costs[1]), costs
    steps = [line.split()[1] for line in said if line.startswith("step ")]
    assert steps == ["1/8", "3/8", "6/8", "8/8"]
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    other = run(capsys, "fit", "--config", "tiny.yaml", "--run_dir=runs/every")[1]
    assert not [line for line in other.splitlines() if line.startswith("cost")], "nobody knows the price of this machine"
    (line,) = [line for line in said if line.startswith("step 8/8")]
    last = curve(folder / "runs" / "every", "train/loss")[8]
    assert float(line.split("loss ")[1].split()[0]) == pytest.approx(last, abs=5e-5)
    assert other.count("step 8/8") == 1


@pytest.mark.parametrize("price", [0, -1.0, float("inf"), float("nan")])
def test_a_price_must_be_above_0(price):
    with pytest.raises(UserError, match=r"PlanMonitor\(price\) is .*, but must be .*above 0 or null"):
        PlanMonitor(price=price)
