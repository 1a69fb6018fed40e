"""A follower computes from a view of the plan: all that a forward reads, and nothing else."""

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from engine.core.plan import (
    FeatureLand,
    FeatureRows,
    ItemImages,
    PageCopy,
    PageLoad,
    PageSave,
    Plan,
    PlanItem,
    SlotOpen,
    StateCopy,
    StateRollback,
)
from engine.executor.step_part import logit_calls
from engine.images import ImageInput
from engine.messages import LogprobOptions
from engine.ranks.messages import Step, ToFollower, plan_of, step_of
from engine.sampling_params import SamplingParams
from tests.core.proof.driver import play
from tests.core.proof.story import Story, stories, stories_with_images


def item(slot: int, tokens: list[int], start: int, **more: object) -> PlanItem:
    fields = {"page_start": 0, "new_pages": [], "sample": True, "output_len": 3, "extend": True}
    return PlanItem(rid=f"r{slot}", slot=slot, tokens=tokens, start=start, **{**fields, **more})  # type: ignore[arg-type]


def through_the_wire(plan: Plan) -> Plan:
    frame = msgspec.msgpack.encode(step_of(plan, answer=7))
    step = msgspec.msgpack.decode(frame, type=ToFollower)  # type: ignore[call-overload]
    assert isinstance(step, Step) and step.answer == 7
    return plan_of(step)


IMAGE = ImageInput(17, 2, b"k" * 32, (1, 2, 4), 2, (1, 2, 4), b"pixels")
ROWS = (FeatureRows(1, b"k" * 32, 0, 2),)
ROPE = ([16, 17, 17], [16, 17, 17], [16, 17, 18])


def mixed_plan() -> Plan:
    return Plan(
        seq=9,
        extend=True,
        items=[
            item(
                4,
                [11, 12, 13],
                16,
                page_start=1,
                new_pages=[5, 6],
                window_start=1,
                new_window=[3],
                sample=False,
                images=ItemImages(ROWS, ROPE),
            ),
            item(2, [-3], 40, extend=False, images=ItemImages(rope_delta=-4), unverified=2),
            item(7, [1, 2], 0, new_pages=[8], logprobs=LogprobOptions(start_len=1), logprob_from=1, logprob_next=99),
        ],
        opens=[SlotOpen(4, SamplingParams(temperature=0.0), [1, 2], [3], (0,), adapter=5, state=6)],
        closes=[1],
        masks={1: b"\xff"},
        saves=[PageSave(3, [1, 2])],
        loads=[PageLoad(2, 1, [9])],
        drops=[6],
        to_host=[PageCopy(1, 2)],
        from_host=[PageCopy(3, 4)],
        states=[StateCopy(None, 6)],
        snapshots=[StateCopy(6, 2)],
        rewinds=[StateRollback(4, 17)],
        lands=[FeatureLand(b"l" * 32, [1], 3)],
        encodes=[IMAGE],
        forgets=[b"f" * 32],
    )


FOR_THE_LEADER = {"rid", "output_len", "logprobs", "logprob_next", "hidden_from", "pool"}


def test_what_the_forward_reads_arrives() -> None:
    plan, arrived = mixed_plan(), through_the_wire(mixed_plan())
    for name in {*PlanItem.__struct_fields__} - FOR_THE_LEADER:
        assert [getattr(i, name) for i in arrived.items] == [getattr(i, name) for i in plan.items], name
    for name in {field.name for field in dataclasses.fields(Plan)} - {"items", "opens", "closes", "masks"}:
        assert getattr(arrived, name) == getattr(plan, name), name
    assert [(opened.slot, opened.adapter, opened.state) for opened in arrived.opens] == [(4, 5, 6)]
    assert [list(rows) for rows in logit_calls(arrived.items)] == [list(rows) for rows in logit_calls(plan.items)]


def forward_inputs(plan: Plan) -> dict[str, Any]:
    """All that a rank's part of a step depends on: its batch, page rows, rows of logits, adapters and copies."""
    items = plan.items
    return {
        "tokens": [token for item in items for token in item.tokens],
        "positions": [(item.start, item.q_len, item.kv_len) for item in items],
        "slots": [item.slot for item in items],
        "page rows": [(item.slot, item.page_start, item.new_pages) for item in items if item.new_pages],
        "window rows": [(item.slot, item.window_start, item.new_window) for item in items if item.new_window],
        "riders": [i for i, item in enumerate(items) if not item.extend] if plan.extend else [],
        "rows of logits": list(logit_calls(items)),
        "samples": any(item.sample for item in items),
        "adapters": [(opened.slot, opened.adapter) for opened in plan.opens],
        "copies": (plan.saves, plan.loads, plan.drops, plan.to_host, plan.from_host),
        "images": ([item.images for item in items], plan.encodes, plan.forgets),
        "step": (plan.seq, plan.extend),
    }


@settings(max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=stories() | stories_with_images())
def test_any_plan_of_the_scheduler_computes_the_same_on_a_follower(story: Story) -> None:
    """And its steps count up by one, which is how a follower knows that none is lost."""
    plans = play(story).plans
    assert [plan.seq for plan in plans] == list(range(1, 1 + len(plans)))
    for plan in plans:
        assert forward_inputs(through_the_wire(plan)) == forward_inputs(plan)


def test_what_only_the_leader_needs_stays() -> None:
    data = msgspec.msgpack.encode(step_of(mixed_plan()))
    assert b"r4" not in data, "the name of a request"
    arrived = through_the_wire(mixed_plan())
    assert not arrived.masks and not arrived.closes
    assert arrived.opens[0].prompt_ids == [] and arrived.items[2].logprob_next != 99


@pytest.mark.parametrize("size", [1, 256])
def test_a_decode_step_is_small(size: int) -> None:
    """A plan as a map takes 44 KB for 256 requests."""
    items = [item(slot, [-(slot + 1)], 3000 + slot, extend=False) for slot in range(size)]
    frame = msgspec.msgpack.encode(step_of(Plan(seq=10_000, extend=False, items=items)))
    assert len(frame) < 40 + 12 * size


def test_rows_of_logits_follow_the_prompt_positions_and_the_samples() -> None:
    items = [item(0, [1] * 600, 0, logprobs=LogprobOptions(start_len=1), logprob_from=1), item(1, [5], 8)]
    assert list(logit_calls(items)) == [*map(list, (range(256), range(256, 512), range(512, 599))), [599, 600]]
