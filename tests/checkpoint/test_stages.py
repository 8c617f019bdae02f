"""Numbers of an optimizer's parameters on pipeline stages. Saving and loading: tests/distributed/test_cross_load.py."""

from lit_llm.checkpoint.stages import number_as_own, number_as_whole

WHOLE = [["a", "c"], ["b", "d", "e"]]
OWN = [["c"], ["b", "e"]]  # of a stage


def state(groups, values):
    return {"state": values, "param_groups": [{"lr": 0.5, "params": numbers} for numbers in groups]}


def test_a_stage_finds_its_own_among_the_whole_models():
    everything = {i: f"of {name}" for i, name in enumerate("acbde")}
    assert number_as_own(state([[0, 1], [2, 3, 4]], everything), OWN, WHOLE) == state(
        [[0], [1, 2]], {0: "of c", 1: "of b", 2: "of e"}
    )


def test_a_stage_without_a_parameter_of_a_group_keeps_the_group():
    whole = number_as_whole(state([[], [0]], {0: "of d"}), [[], ["d"]], WHOLE)
    assert whole == state([[0, 1], [2, 3, 4]], {3: "of d"})
    assert number_as_own(whole, [[], ["d"]], WHOLE) == state([[], [0]], {0: "of d"})
