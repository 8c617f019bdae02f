"""Numbers of an optimizer's parameters on pipeline stages. Saving and loading: tests/distributed/test_cross_load.py."""

import pytest
import torch

from lit_llm.checkpoint.stages import number_as_own, number_as_whole

WHOLE = [["a", "c"], ["b", "d", "e"]]
OWN = [["c"], ["b", "e"]]  # of a stage


def state(groups, values):
    return {"state": values, "param_groups": [{"lr": 0.5, "params": numbers} for numbers in groups]}


def test_a_stage_numbers_its_parameters_as_the_whole_model_does():
    whole = number_as_whole(state([[0], [1, 2]], {0: "of c", 2: "of e"}), OWN, WHOLE)
    assert whole == state([[0, 1], [2, 3, 4]], {1: "of c", 4: "of e"})


def test_a_stage_finds_its_own_among_the_whole_models():
    everything = {i: f"of {name}" for i, name in enumerate("acbde")}
    assert number_as_own(state([[0, 1], [2, 3, 4]], everything), OWN, WHOLE) == state(
        [[0], [1, 2]], {0: "of c", 1: "of b", 2: "of e"}
    )


def test_the_numbers_in_a_checkpoint_may_be_any():
    saved = state([[70, 11], [5, 9, 2]], {11: "of c", 2: "of e"})
    assert number_as_own(saved, OWN, WHOLE)["state"] == {0: "of c", 2: "of e"}


def test_a_stage_without_a_parameter_of_a_group_keeps_the_group():
    whole = number_as_whole(state([[], [0]], {0: "of d"}), [[], ["d"]], WHOLE)
    assert whole == state([[0, 1], [2, 3, 4]], {3: "of d"})
    assert number_as_own(whole, [[], ["d"]], WHOLE) == state([[], [0]], {0: "of d"})


def test_torch_loads_what_a_stage_finds():
    """The moments of each parameter arrive at it, though the whole model's groups are in another order."""
    parameters = {name: torch.nn.Parameter(torch.full((2,), float(i))) for i, name in enumerate("abcde")}

    def adam(groups):
        return torch.optim.Adam([{"params": [parameters[name] for name in group]} for group in groups])

    whole = adam(WHOLE)
    for i, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full((2,), float(i + 1))
    whole.step()
    stage = adam(OWN)
    stage.load_state_dict(number_as_own(whole.state_dict(), OWN, WHOLE))
    for name in "bce":
        gradient = "abcde".index(name) + 1
        assert stage.state[parameters[name]]["exp_avg"].tolist() == pytest.approx([0.1 * gradient] * 2)
