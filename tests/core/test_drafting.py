"""How many rows go to drafts: as many as yield more tokens a second."""

from collections.abc import Callable

import pytest

from engine.core.plan import Plan, PlanItem, StateRollback
from engine.core.request import Request
from engine.speculative.drafting import TRY_EVERY, Drafting, DraftRequest, RowCosts
from engine.speculative.drafts import MODELED, NO_DRAFT, Draft, Drafts
from tests.core.engine_in_a_test import request_of
from tests.core.guesses import Free


class Constant:
    """Drafts ten tokens for every request, all of the same number."""

    def draft(self, request: Request) -> Draft:
        return Draft([7] * 10, match=3)


def drafting(cost: Callable[[int], float], *, rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> Drafting:
    """`cost`: of a step by its rows, measured at `rows`."""
    costs = RowCosts()
    for _ in range(10):
        for n in rows:
            costs.note(n, cost(n))
    return Drafting(Constant(), most=10, costs=costs)


def generate(one: Drafting, request: Request, token: int, count: int) -> None:
    for _ in range(count):
        one.choose([request], rows=1, overlaps=False)
        request.output_ids.append(token)


def num_drafted(one: Drafting, requests: list[Request], *, overlaps: bool = False) -> int:
    return sum(map(len, one.choose(requests, rows=len(requests), overlaps=overlaps).values()))


def ask(n: int = 0) -> Request:
    return request_of([1, 2, 3], rid=f"r{n}", max_new_tokens=1000)


def test_drafts_that_are_right_become_long() -> None:
    one, request = drafting(lambda rows: 1 + 0.03 * rows), ask()
    first = num_drafted(one, [request])
    generate(one, request, 7, 30)
    assert 0 < first < num_drafted(one, [request]) == 10


def test_drafts_that_are_wrong_end_though_they_were_not_computed() -> None:
    one, request = drafting(lambda rows: 1 + 0.1 * rows), ask()
    generate(one, request, 8, 30)
    assert num_drafted(one, [request]) == 0
    generate(one, request, 7, 60)
    assert num_drafted(one, [request]) > 0


def test_where_rows_cost_all_that_they_yield_nothing_is_drafted() -> None:
    """Two of three are right, and a row adds as much as a step takes."""
    one, request = drafting(lambda rows: float(rows)), ask()
    for _ in range(10):
        generate(one, request, 8, 1)
        generate(one, request, 7, 2)
    assert num_drafted(one, [request]) == 0


def test_a_full_batch_drafts_less() -> None:
    """Up to 32 rows cost little, then each costs as much as the step yields."""
    one = drafting(lambda rows: 1 + 0.02 * rows)
    requests = [ask(n) for n in range(64)]
    alone = num_drafted(one, requests[:1])
    assert num_drafted(one, requests) / 64 < alone


def test_overlap_is_worth_something() -> None:
    one, request = drafting(lambda rows: 1 + 0.15 * rows), ask()
    generate(one, request, 8, 8)
    generate(one, request, 7, 2)
    assert num_drafted(one, [request]) > num_drafted(one, [request], overlaps=True) == 0


@pytest.mark.parametrize(("left", "drafted"), [(1, 0), (2, 1), (4, 3)])
def test_no_more_is_drafted_than_may_be_sampled(left: int, drafted: int) -> None:
    one, request = drafting(lambda rows: 1.0), request_of([1, 2, 3], max_new_tokens=left)
    assert num_drafted(one, [request]) == drafted


def test_rows_that_cost_nothing_are_all_taken() -> None:
    """Four rows take as long as one, eight twice as long: three drafts."""
    one, request = (
        drafting(lambda rows: 1.0 if rows <= 4 else 2.0 + 0.25 * (rows - 8), rows=(1, 2, 3, 4, 6, 8, 12)),
        ask(),
    )
    generate(one, request, 7, 12)
    for _ in range(4):
        generate(one, request, 8, 1)
        generate(one, request, 7, 4)
    assert num_drafted(one, [request]) == 3


def test_costs_are_what_was_measured() -> None:
    costs = RowCosts()
    for _ in range(30):
        for rows, seconds in ((1, 0.1), (4, 0.11), (8, 0.2)):
            costs.note(rows, seconds)
    assert [costs.step(n) for n in (1, 4, 8)] == pytest.approx([0.1, 0.11, 0.2], rel=0.06)
    assert 0.11 < costs.step(6) < 0.2 < costs.step(12) < 0.3


def test_costs_follow_what_was_measured_last() -> None:
    costs = RowCosts()
    for scale in (1.0, 5.0):
        for _ in range(30):
            for rows in (1, 4, 8):
                costs.note(rows, scale * (0.1 + 0.01 * rows))
    assert costs.step(4) == pytest.approx(5 * 0.14, rel=0.06)


def test_a_batch_that_has_always_drafted_tries_without() -> None:
    """Eight rows take 2.4, 32 take 10: what was measured first hides that plain steps are better."""
    one = drafting(lambda rows: 10.0, rows=(32,))
    requests = [ask(n) for n in range(8)]
    for request in requests:
        generate(one, request, 7, 12)
        generate(one, request, 8, 2)
        generate(one, request, 7, 4)
    one.costs.note(8, 2.4)
    assert num_drafted(one, requests) == 0
    assert drafting(lambda rows: 10.0, rows=(32,)).costs.step(8) <= 2.5


def test_a_range_that_was_slow_once_is_tried_again() -> None:
    costs = RowCosts()
    costs.note(1, 0.1)
    costs.note(4, 10.0)
    assert costs.step(4) > 1.0
    for _ in range(3000):
        costs.note(1, 0.1)
    assert costs.step(4) < 0.3


def test_before_anything_was_measured_rows_are_cheap() -> None:
    costs = RowCosts()
    assert costs.step(1) < costs.step(8) < 2 * costs.step(1)
    costs.note(4, 0.2)
    assert costs.step(4) == pytest.approx(0.2) and 0.2 < costs.step(8) < 0.4
    assert costs.step(5000) > costs.step(512)


# ---- a drafter in the executor


def asking(
    cost: Callable[[int], float], *, of_pass: Callable[[int], float], passes: int = 4, topk: int = 1
) -> Drafting:
    """`of_pass`: of a pass by its rows."""
    measured = (RowCosts(), RowCosts())
    for costs, what in zip(measured, (cost, of_pass), strict=True):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for _ in range(10):
                costs.note(rows, what(rows))
    most = passes if topk == 1 else 15
    return Drafting(None, most=most, passes=passes, topk=topk, costs=measured[0], pass_costs=measured[1])


def known(one: Drafting, request: Request, guesses: list[int], sampled: list[int]) -> None:
    """The drafter's last guesses, and what came of them."""
    drafts = request.of(Drafts)
    drafts.draft, drafts.known = Draft(guesses, MODELED), request.num_tokens
    request.output_ids += sampled
    one.choose([request], rows=1, overlaps=False)


def num_asked(one: Drafting, requests: list[Request]) -> list[int]:
    asked = one.ask(requests, rows=len(requests), overlaps=False)
    return [asked.passes.get(request.rid, 0) for request in requests]


def test_a_cheap_drafter_that_is_right_drafts_all_it_may() -> None:
    one, request = asking(lambda rows: 1 + 0.02 * rows, of_pass=lambda rows: 0.02), ask()
    for _ in range(10):
        known(one, request, [7], [7])
    assert num_asked(one, [request]) == [4]


def test_one_that_is_wrong_is_asked_now_and_then() -> None:
    one, request = asking(lambda rows: 1 + 0.1 * rows, of_pass=lambda rows: 0.1), ask()
    for _ in range(30):
        known(one, request, [7], [8])
    asked = []
    for _ in range(2 * TRY_EVERY):
        asked += num_asked(one, [request])
        request.of(Drafts).draft = NO_DRAFT
        request.output_ids.append(8)
    assert sum(asked) == asked.count(1) == 2


@pytest.mark.parametrize(("of_pass", "asked"), [(0.01, 4), (0.45, 2), (0.9, 0)])
def test_what_passes_cost_counts(of_pass: float, asked: int) -> None:
    """Four of five are right, and rows cost little."""
    one, request = asking(lambda rows: 1 + 0.01 * rows, of_pass=lambda rows: of_pass), ask()
    for _ in range(12):
        known(one, request, [7], [8])
        for _ in range(4):
            known(one, request, [7], [7])
    assert num_asked(one, [request]) == [asked]


def test_in_a_full_batch_where_rows_cost_nothing_is_asked() -> None:
    one = asking(lambda rows: 1 + max(0, rows - 8), of_pass=lambda rows: 0.05)
    requests = [ask(n) for n in range(16)]
    for request in requests:
        for _ in range(10):
            known(one, request, [7], [7])
    assert num_asked(one, requests[:1]) == [4]
    requests[0].output_ids.append(7)
    assert num_asked(one, requests) == [0] * 16


def test_no_more_is_asked_than_may_be_sampled_and_not_twice() -> None:
    one = asking(lambda rows: 1 + 0.02 * rows, of_pass=lambda rows: 0.01)
    one_left, three_left, asked = (request_of([1, 2], rid=f"l{n}", max_new_tokens=n) for n in (1, 3, 9))
    asked.of(Drafts).asked_at = asked.num_tokens
    assert num_asked(one, [one_left, three_left, asked]) == [0, 2, 0]


def test_rows_without_drafts_do_not_pay_for_states_that_go_back() -> None:
    """Steps with drafts do, and passes of the executor's drafter: they cause it."""

    def item(**fields: object) -> PlanItem:
        return PlanItem("r", 0, [1], 0, 0, [], True, 0, False, **fields)  # type: ignore[arg-type]

    back = [StateRollback(0, 9)]
    for fields, rows in (({}, 0), ({"behind": 1}, 2)):
        costs = Noted()
        one = Drafting(None, most=4, passes=4, costs=costs)
        one.note(Plan(seq=1, extend=False, items=[item(), item(**fields)], rewinds=back), 0.4)
        assert costs.rows == [rows] * (rows > 0)
        one.note(Plan(seq=2, extend=False, items=[item(to_draft=2)], rewinds=back), 0.4)
        assert one.pass_costs is not None
        one.note(Plan(seq=3, extend=False, items=[item()]), 0.4)
        assert costs.rows[-1] == 1


@pytest.mark.parametrize(("a_row", "topk"), [(0.005, 4), (0.3, 1)])
def test_drafts_are_trees_where_rows_cost_little(a_row: float, topk: int) -> None:
    """A first guess is right in three of four places, another one in half of the rest."""
    one, request = asking(lambda rows: 1 + a_row * rows, of_pass=lambda rows: 0.02 + 0.1 * a_row * rows, topk=4), ask()
    for i in range(200):
        guess = Draft([7, 8], MODELED, (-1, -1), (0.75, 0.12))
        drafts = request.of(Drafts)
        drafts.draft, drafts.known = guess, request.num_tokens
        request.output_ids.append((7, 7, 7, 8, 7, 7, 7, 9)[i % 8])
        one.choose([request], rows=1, overlaps=False)
    found = one.ask([request], rows=1, overlaps=False)
    assert found.topk == topk and found.passes


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
def test_passes_take_the_room_that_they_write(topk: int) -> None:
    one = DraftRequest({}, topk)
    for passes in range(1, 12):
        room = one.places(passes)
        assert one.passes_within(room, passes) == passes
        assert one.passes_within(room - 1, passes) == passes - 1
        assert 0 < passes <= room and (passes - 1) * topk <= room


def test_a_tree_is_verified_down_to_what_is_unlikely() -> None:
    """The drafter is sure of one branch, which is two tokens deep; the other ones stay out."""
    one, request = asking(lambda rows: 1 + 0.05 * rows, of_pass=lambda rows: 0.02, topk=2), ask()
    tree = Draft([7, 8, 1, 2, 3, 4], MODELED, (-1, -1, 0, 0, 1, 1), (0.96, 0.03, 0.97, 0.02, 0.5, 0.4))
    drafts = request.of(Drafts)
    drafts.draft, drafts.known = tree, request.num_tokens
    found = one.choose([request], rows=1, overlaps=False)[request.rid]
    assert (found.tokens, list(found.parents)) == ([7, 1], [-1, 0])


class Noted(Free):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def step(self, rows: int) -> float:
        return 1.0

    def note(self, rows: int, taken_s: float) -> None:
        self.rows.append(rows)


def test_a_pass_costs_what_its_steps_took() -> None:
    one = Drafting(None, most=4, passes=4)
    items = [PlanItem(f"r{n}", n, [1], 3, 0, [], False, 0, False, to_draft=4) for n in range(8)]
    for _ in range(20):
        one.note(Plan(seq=1, extend=False, items=items), 0.4)
    assert one.pass_costs is not None and one.pass_costs.step(8) == pytest.approx(0.1, rel=0.05)
    assert one.costs.step(8) == RowCosts().step(8)  # no step of the model
