"""The ranks that orthogonalise Muon's matrices."""

from lit_llm.optim.owners import newton_schulz_flops, owners, turns


def test_the_most_work_goes_to_the_rank_with_the_least():
    assert newton_schulz_flops(4, 2) == newton_schulz_flops(2, 4) == 5 * (2 * 2 * 2 * 4 * 2 + 2 * 2 * 2 * 2)
    # Three steps and two at once in fp32: Gram matrix and application twice, two squares, and 4 products for 3 further steps.
    assert newton_schulz_flops(2, 5, element_bytes=4) == 2 * (2 * 2 * 2 * 5 * 2) + 2 * 2**3 * 2 + 3 * 4 * 2 * 2**3
    assert newton_schulz_flops(2, 4, element_bytes=4) == newton_schulz_flops(2, 4)
    # 5 (4 r² c + 2 r³): 6 k³ for a square of k. In units of 30: 64, 27, 27, 8, 8, 1.
    squares = [(2, 2), (3, 3), (4, 4), (1, 1), (3, 3), (2, 2)]
    assert owners(squares, 2) == [1, 1, 0, 0, 1, 1]  # 64 + 1 and 27 + 27 + 8 + 8
    assert owners([(4, 4)] * 5, 3) == [0, 1, 2, 0, 1]
    assert owners([(4, 4)], 3) == [0] and owners([], 3) == []


def test_a_turn_has_matrices_up_to_a_limit_but_at_least_one_of_each_owner():
    assert turns([5, 3, 3, 9, 2, 2], [0, 1, 1, 0, 1, 0], limit=6) == [[0, 1, 2], [3, 4], [5]]
    assert turns([5, 5], [0, 0], limit=10) == [[0, 1]] and turns([], [], limit=1) == []
