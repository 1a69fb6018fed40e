"""Placement of experts: every expert is somewhere, ranks have equal numbers, and no rank has much more to do than the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.expert_placement import balanced, imbalance, rank_loads, trivial

# The example in the readme of DeepSeek's EPLB: two layers of 12 experts, 16 slots on 8 GPUs of 2 nodes, 4 groups.
LOADS = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]


@pytest.mark.parametrize("loads", LOADS)
def test_the_published_example_stays_in_its_nodes(loads: list[int]) -> None:
    placement = balanced(loads, slots=16, ranks=8, groups=4, nodes=2)
    groups = [{expert // 3 for expert in placement[node * 8 : node * 8 + 8]} for node in range(2)]
    assert all(len(of_node) == 2 for of_node in groups) and not groups[0] & groups[1]
    assert imbalance(placement, loads, ranks=8) < imbalance(trivial(12, slots=16), loads, ranks=8)


def test_the_published_example_has_the_published_copies() -> None:
    """From its readme: node by node, in any order within."""
    published = [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    placement = balanced(LOADS[0], slots=16, ranks=8, groups=4, nodes=2)
    halves = {tuple(sorted(placement[:8])), tuple(sorted(placement[8:]))}
    assert halves == {tuple(sorted(published[:8])), tuple(sorted(published[8:]))}


@given(
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    redundant=st.integers(0, 8),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_every_expert_has_a_slot_and_ranks_have_as_many(loads: list[int], redundant: int, ranks: int) -> None:
    slots = -(-(len(loads) + redundant) // ranks) * ranks
    placement = balanced(loads, slots=slots, ranks=ranks)
    assert len(placement) == slots and set(placement) == set(range(len(loads)))
    of_ranks = rank_loads(placement, loads, ranks=ranks)
    assert sum(of_ranks) == pytest.approx(sum(loads))
    # greedy: the lightest pack with room gets each copy, so none is ahead by more than a copy and what no other had room for
    assert max(of_ranks) <= sum(loads) / ranks + max(loads) + 1e-9
    assert balanced(list(loads), slots=slots, ranks=ranks) == placement


def test_a_hot_expert_gets_copies_on_several_ranks() -> None:
    placement = balanced([800, 10, 10, 10, 10, 10, 10, 10], slots=12, ranks=4)
    assert placement.count(0) == 5 and {slot // 3 for slot, expert in enumerate(placement) if expert == 0} == {
        0,
        1,
        2,
        3,
    }
    assert imbalance(placement, [800, 10, 10, 10, 10, 10, 10, 10], ranks=4) < 1.6


def test_equal_loads_stay_in_order_and_no_load_is_even() -> None:
    assert sorted(balanced([1] * 8, slots=8, ranks=2)) == list(range(8))
    assert imbalance(trivial(8, slots=8), [0] * 8, ranks=4) == 1.0
