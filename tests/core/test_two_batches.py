"""Where a step is cut into two halves, by literals; and that all DP ranks halve the same steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.core.dp_step import Padding, Row, agree
from engine.core.plan import ItemImages, PlanItem
from engine.core.split_rule import NEVER, SplitRule
from engine.core.two_batches import WHOLE, Splitter, halves
from tests.core.engine_in_a_test import plan_item

ALWAYS = SplitRule(2, 2)
LONG = math.inf  # tokens before attention costs anything


def decode(start: int = 8, *, behind: int = 0) -> PlanItem:
    return replace(plan_item(start=start, extend=False), behind=behind)


def prompt(length: int, start: int = 0) -> PlanItem:
    return replace(plan_item(start=start, extend=True), tokens=list(range(length)))


def cut(items: list[PlanItem], *, rule: SplitRule = ALWAYS, attention: float = LONG, asks: bool = False) -> int:
    extend = any(item.extend for item in items)
    return Splitter(rule, attention_tokens=attention, asks_others=asks).cut(items, extend=extend)


@pytest.mark.parametrize(
    ("items", "rows"),
    [
        ([decode()] * 6, 3),
        ([decode()] * 7, 4),
        ([decode(), decode()], 1),
        ([prompt(100)], 50),
        ([prompt(60), prompt(20), prompt(20)], 50),
        ([prompt(30), prompt(70)], 50),
        ([*[decode()] * 10, prompt(90)], 50),
        ([prompt(40), prompt(40)], 40),
    ],
)
def test_halves_have_equal_rows_where_attention_costs_nothing(items: list[PlanItem], rows: int) -> None:
    assert cut(items) == rows


def test_work_counts_and_not_rows() -> None:
    """The first half of a long prompt attends to less; a request far on weighs more than those that begin."""
    assert 540 < cut([prompt(1000)], attention=1000.0) < 700
    assert cut([decode(5000), *[decode(0)] * 5], attention=1000.0) == 1


@pytest.mark.parametrize("items", [[decode()], [prompt(1)], []])
def test_one_row_has_no_halves(items: list[PlanItem]) -> None:
    assert cut(items) == WHOLE


def test_a_step_is_cut_from_the_rows_on_that_its_kind_needs() -> None:
    rule = SplitRule(decodes_from=4, prompts_from=100)
    assert [cut([decode()] * rows, rule=rule) for rows in (3, 4)] == [WHOLE, 2]
    assert [cut([prompt(rows)], rule=rule) for rows in (99, 100)] == [WHOLE, 50]
    assert cut([decode()] * 64, rule=NEVER) == WHOLE


def test_drafts_stay_with_the_token_they_follow() -> None:
    """Rows of a request read KV that its rows before them write in the same layer."""
    run = [decode(), decode(9, behind=1), decode(10, behind=1), decode(11, behind=1)]
    assert cut([*run, decode()]) == 4
    assert cut([decode(), *run]) == WHOLE, "nothing is left behind the run"
    assert cut([decode(), *run, *run]) == 5


def test_steps_with_images_and_of_drafters_stay_whole() -> None:
    for item in (replace(prompt(50), images=ItemImages()), replace(decode(), to_draft=2)):
        assert cut([item, prompt(50)]) == WHOLE
        assert cut([item, prompt(50)], asks=True) == WHOLE


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 50)), max_size=8), st.integers(0, 80))
def test_halves_hold_each_token_once_and_in_its_place(sizes: list[tuple[int, bool, int]], rows: int) -> None:
    items = [prompt(length, start) if extend else decode(start) for length, extend, start in sizes]
    first, second = halves(items, rows)
    assert sum(item.q_len for item in first) == min(rows, sum(item.q_len for item in items))
    found = [(token, item.start + i) for item in [*first, *second] for i, token in enumerate(item.tokens)]
    assert found == [(token, item.start + i) for item in items for i, token in enumerate(item.tokens)]
    assert all(item.q_len for item in [*first, *second])


# ---- DP attention


def row(tokens: int, *, at: int, rule: SplitRule = ALWAYS, extend: bool = False) -> Row:
    return Row(
        step=3,
        idle=tokens == 0,
        tokens=tokens,
        extend=extend,
        cut=at,
        decodes_from=rule.decodes_from,
        prompts_from=rule.prompts_from,
    )


def test_a_step_is_halved_on_all_ranks_where_each_would_cut_it() -> None:
    step = agree([row(8, at=4), row(0, at=0), row(3, at=2)])
    assert (step.cuts, step.tokens, step.padding, step.graph) == ((4, 0, 2), (8, 0, 3), Padding.SUM_LEN, False)


@pytest.mark.parametrize(
    "rows",
    [
        [row(8, at=4), row(3, at=WHOLE)],  # images
        [row(1, at=1), row(0, at=0)],  # the second half would be empty
        [row(8, at=4, rule=SplitRule(9, 0)), row(3, at=2)],  # too few on each
        [row(8, at=4, rule=NEVER), row(3, at=2, rule=ALWAYS)],  # the figures of rank 0 count
        [row(8, at=4, rule=SplitRule(2, 0), extend=True), row(3, at=2)],
    ],
)
def test_other_steps_are_whole_on_all_ranks(rows: list[Row]) -> None:
    assert agree(rows).cuts == ()


def test_the_rank_with_most_rows_says_how_large_a_step_is() -> None:
    rule = SplitRule(6, 0)
    assert agree([row(1, at=1, rule=rule), row(6, at=3, rule=rule)]).cuts == (1, 3)
    assert agree([row(4, at=2, rule=rule), row(5, at=3, rule=rule)]).cuts == ()


def test_a_rank_of_several_always_says_where_it_would_cut() -> None:
    assert cut([decode()], asks=True) == 1
    assert cut([prompt(10)], rule=NEVER, asks=True) == 5
