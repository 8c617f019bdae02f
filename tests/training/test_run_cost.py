"""What a launch costs, and the loss of a last step that was not a logged one."""

import dataclasses
import json
import re
import time

import pytest
from recipe_runs import curve, run

from lit_llm.core.hardware import find
from lit_llm.plan import plan_monitor
from lit_llm.plan.plan_monitor import print_cost


def test_cost_is_devices_times_hours_times_price(capsys):
    h100 = find("h100-sxm")
    low, high = (8 * 5 * price for price in h100.price_usd_hour)
    print_cost(h100, 2.5, 8, "planned for", 1800)
    print_cost(h100, None, 8, "for", 5 * 3600)
    print_cost(h100, 2.5, 8, "for", 0)
    print_cost(find("cpu"), None, 1, "for", 1)
    assert capsys.readouterr().out.splitlines() == [
        "cost: about $10 planned for 30m00s on 8 x h100-sxm (--plan.price)",
        f"cost: about ${low:.0f} to ${high:.0f} for 5h00m on 8 x h100-sxm (assumed price, --plan.price)",
        "cost: less than $0.01 for 0s on 8 x h100-sxm (--plan.price)",
    ]


def test_a_run_with_a_price_has_a_line_at_its_start_and_one_at_its_end(folder, capsys, monkeypatch):
    """And the last step, 8, which is not a logged one, has the mean loss of the two steps since the last line."""
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
    losses = curve(folder / "runs" / "every", "train/loss")
    assert float(line.split("loss ")[1].split()[0]) == pytest.approx((losses[7] + losses[8]) / 2, abs=5e-5)
    assert other.count("step 8/8") == 1
