"""The memory's layout: whatever the numbers, no two things share a byte, and all begin with a cache line."""

from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.region_plan import BOARD_ROWS, LINE_BYTES, ROW_NUMBERS, RegionPlan

PLANS = st.builds(
    RegionPlan,
    ranks=st.integers(1, 5),
    stages=st.integers(1, 4),
    logits_rows=st.integers(0, 3),
    vocab=st.integers(0, 33),
    slots=st.integers(0, 9),
    hidden=st.integers(0, 19),
    link_rows=st.integers(0, 3),
    link_depth=st.integers(1, 3),
    window=st.sampled_from([16, 48]),
    dp_ranks=st.integers(0, 3),
)


def places(plan: RegionPlan) -> list[tuple[int, int]]:
    """(first byte, bytes) of everything."""
    found = [(plan.abort, LINE_BYTES), (plan.tokens_count, LINE_BYTES)]
    for stage in range(plan.stages):
        found += [(lines, plan.ranks * LINE_BYTES) for lines in (plan.sum_lines(stage), plan.gather_lines(stage))]
        found.append((plan.windows(stage), 2 * plan.ranks * plan.window * 4))
    found += [(plan.logits, plan.logits_rows * plan.vocab * 4), (plan.tokens, plan.slots * 8)]
    for stage in range(plan.stages - 1):
        for rank in range(plan.ranks):
            slots = plan.link_depth * plan.link_rows * plan.hidden * 4
            found += [(plan.link_lines(stage, rank), 2 * LINE_BYTES), (plan.link_slots(stage, rank), slots)]
    found += [(plan.board_lines(rank), 2 * LINE_BYTES) for rank in range(plan.dp_ranks)]
    found.append((plan.board_rows, plan.dp_ranks * BOARD_ROWS * ROW_NUMBERS * 8))
    return found


@given(PLANS)
def test_nothing_overlaps(plan: RegionPlan) -> None:
    end = 0
    for begin, size in sorted(places(plan)):
        assert begin >= end and begin % LINE_BYTES == 0
        end = begin + size
    assert end <= plan.size


def test_one_stage_has_no_links() -> None:
    assert RegionPlan(ranks=2, hidden=4096, link_rows=512).size == RegionPlan(ranks=2).size
