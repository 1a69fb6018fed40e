"""Planned clusters against times worked out by hand, and against the laws that no schedule escapes."""

import random

import pytest

from tests.planner.planned import (
    CONTROL_S,
    LATENCY_S,
    LINK,
    OUTSIDE_S,
    PAGE_BYTES,
    assert_at_rest,
    cluster,
    decode_s,
    prefill_s,
    request_at,
)

FOREVER = float("inf")


def test_one_request_on_a_unified_worker() -> None:
    planned = cluster("1U")
    (record,) = planned.run([request_at(0, 100, 4)], rate=1, until_s=FOREVER)
    assert record.error is None and (record.prompt_tokens, record.output_tokens) == (100, 4)
    assert record.ttft_s == pytest.approx(OUTSIDE_S + prefill_s(100))
    assert record.itl_s == pytest.approx([decode_s(101), decode_s(102), decode_s(103)])
    assert_at_rest(planned)


def test_one_request_through_prefill_and_decode() -> None:
    """Two messages of the handshake and one with decode's pages; the prompt; its 7 pages; the news that they are there.

    The first token was drawn by prefill: decode says it before it computes its own first step.
    """
    planned = cluster("1P1D")
    (record,) = planned.run([request_at(0, 100, 3)], rate=1, until_s=FOREVER)
    transfer_s = 7 * PAGE_BYTES / LINK + LATENCY_S + CONTROL_S
    assert record.ttft_s == pytest.approx(OUTSIDE_S + 3 * CONTROL_S + prefill_s(100) + transfer_s)
    assert record.itl_s == pytest.approx([decode_s(101), decode_s(102)])
    assert_at_rest(planned)


def test_a_long_prompt_travels_while_it_is_computed() -> None:
    """Chunks of 2048: only the last one's pages are left to move when the last chunk is done, if the link keeps up."""
    planned = cluster("1P1D", link=64 * LINK)
    (record,) = planned.run([request_at(0, 3 * 2048, 2)], rate=1, until_s=FOREVER)
    computed_s = sum(prefill_s(2048, after=start) for start in (0, 2048, 4096))
    tail_s = 128 * PAGE_BYTES / (64 * LINK) + LATENCY_S + CONTROL_S
    assert record.ttft_s == pytest.approx(OUTSIDE_S + 3 * CONTROL_S + computed_s + tail_s)


def test_transfers_share_a_link() -> None:
    """Two prompts are ready at about the same time, on two prefill workers; one decode worker takes one after the other."""
    planned = cluster("2P1D", link=LINK / 64)
    one, other = planned.run([request_at(0, 512, 2), request_at(0, 512, 2, block=1)], rate=1, until_s=FOREVER)
    assert one.ttft_s is not None and other.ttft_s is not None
    assert other.ttft_s - one.ttft_s == pytest.approx(32 * PAGE_BYTES / (LINK / 64), rel=0.02)


def test_prefill_does_not_stop_the_decodes_of_another_worker() -> None:
    """What disaggregation is for: a long prompt makes a gap in a unified worker's answers, and none in decode's."""
    requests = [request_at(0, 64, 200), request_at(0.2, 2048, 1, block=1)]
    longest = {}
    for name in ("1U", "1P1D"):
        record, _ = cluster(name).run(requests, rate=1, until_s=FOREVER)
        longest[name] = max(record.itl_s)
    assert longest["1U"] == pytest.approx(prefill_s(2048) + decode_s(120), rel=0.02)
    assert longest["1P1D"] < 2 * decode_s(264)


def test_on_one_core_a_long_prompt_slows_decode_down() -> None:
    """What a pair on a laptop suffers: half a core for each, as long as the prompt is computed."""
    requests = [request_at(0, 64, 200), request_at(0.2, 2048, 1, block=1)]
    slow, fast = (cluster("1P1D", cores=cores).run(requests, rate=1, until_s=FOREVER)[0] for cores in (1, 2))
    assert max(fast.itl_s) < 2 * decode_s(264)
    doubled = sum(gap == pytest.approx(2 * decode_s(140), rel=0.02) for gap in slow.itl_s)
    assert doubled == pytest.approx(prefill_s(2048) / (2 * decode_s(140)), rel=0.1)


def test_a_bound_worker_keeps_to_its_cores_and_a_unified_one_goes_anywhere() -> None:
    """Steps of two threads on two cores: a bound worker has one of them, so each of its threads has half a core."""
    slow, fast, whole = (
        cluster(name, cores=2, worker_cores=bound, threads=2).run([request_at(0, 64, 20)], rate=1, until_s=FOREVER)[0]
        for name, bound in (("1P1D", 1), ("1P1D", None), ("1U", 1))
    )
    assert fast.itl_s[-1] == whole.itl_s[-1] == pytest.approx(decode_s(83))
    assert slow.itl_s[-1] == pytest.approx(2 * decode_s(83))


def test_what_serves_beside_the_steps_takes_its_part_of_the_cores() -> None:
    """A step's token costs as much again in HTTP: on one core the next step has half of it meanwhile."""
    alone, beside = (
        cluster("1U", cores=1, host_token_s=seconds).run([request_at(0, 64, 100)], rate=1, until_s=FOREVER)[0]
        for seconds in (0.0, decode_s(100))
    )
    assert sum(beside.itl_s) == pytest.approx(2 * sum(alone.itl_s), rel=0.05)


def test_the_router_s_cache_aware_policy_brings_prompts_back_to_their_prefix() -> None:
    """Four conversations on four workers, later turns in another order: least_load scatters them, cache_aware does not."""
    first = [request_at(i, 1600, 2, block=i) for i in range(4)]
    later = [request_at(4 + i, 2400, 2, block=(3 * i + 1) % 4) for i in range(8)]
    cached = {}
    for policy in ("least_load", "cache_aware"):
        planned = cluster("4U", policy=policy)
        records = planned.run([*first, *later], rate=1, until_s=FOREVER)
        cached[policy] = sum(record.cached_tokens for record in records)
        assert_at_rest(planned)
    assert cached["cache_aware"] == 4 * (1600 + 2399 // 16 * 16) > cached["least_load"]


def test_an_equal_prefix_is_not_computed_again_and_history_counts() -> None:
    planned = cluster("1U")
    planned.warm([request_at(0, 320, 1)])
    (record,) = planned.run([request_at(0, 640, 2)], rate=1, until_s=FOREVER)
    assert record.cached_tokens == 320
    assert record.ttft_s == pytest.approx(OUTSIDE_S + prefill_s(320, after=320))
    assert_at_rest(planned)


@pytest.mark.parametrize("name", ["1U", "2U-mixed", "1P1D", "2P3D"])
def test_every_request_ends_with_any_memory(name: str) -> None:
    """More than memory holds at once: waits and retractions, and in the end all is back. No device is busy twice."""
    draw = random.Random(5)
    requests = [
        request_at(i * 0.5, draw.randint(1, 900), draw.randint(1, 120), block=draw.randint(0, 9)) for i in range(60)
    ]
    planned = cluster(name, num_pages=80, max_running=12)
    records = planned.run(requests, rate=40, until_s=FOREVER)
    assert [r.error for r in records] == [None] * 60
    assert [r.output_tokens for r in records] == [one.output_len for one in requests]
    assert all(gap >= 0 for r in records for gap in r.itl_s)
    assert all(worker.executor.busy_s <= worker.clock.now_s for worker in planned.workers)
    assert_at_rest(planned)


@pytest.mark.parametrize("name", ["1U", "1P1D"])
def test_a_request_that_no_worker_can_hold_fails_alone(name: str) -> None:
    """Of a pair decode refuses it; prefill, where prompt and one token fit, is told to forget it."""
    planned = cluster(name, num_pages=40)
    records = planned.run(
        [request_at(0, 100, 5), request_at(0, 600, 100), request_at(0, 100, 5)], rate=1, until_s=FOREVER
    )
    assert [r.error is None for r in records] == [True, False, True]
    assert records[1].error is not None and "KV capacity of 640" in records[1].error
    assert_at_rest(planned)


def test_who_is_not_done_in_time_is_late() -> None:
    records = cluster("1U").run([request_at(0, 100, 5), request_at(0, 100, 9999, block=1)], rate=1, until_s=1.0)
    assert [r.error for r in records] == [None, "late"]
