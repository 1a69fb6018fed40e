"""Requests without a room: the worker that gets one serves it whole, beside halves of pairs."""

import random
from typing import Any

import pytest

from tests.core.hash_model import expected_tokens
from tests.disagg.two_roles import Cluster

WHOLE = pytest.mark.parametrize("to", ["prefill", "decode"])


@pytest.mark.parametrize("depth", [1, 2])
@WHOLE
def test_a_whole_request_runs_beside_a_pair(to: str, depth: int) -> None:
    cluster = Cluster(pages=(90, 90), depth=depth)
    prompts = {"pair": list(range(21)), "whole": list(range(5, 30))}
    cluster.submit("pair", prompts["pair"], 1, new=8)
    cluster.submit_whole("whole", prompts["whole"], to=to, new=8)
    cluster.run(random.Random(depth))
    served = {**cluster.decode.tokens, "whole": getattr(cluster, to).tokens["whole"]}
    assert served == {rid: expected_tokens(prompt, 8) for rid, prompt in prompts.items()}
    cluster.assert_all_back()


@WHOLE
def test_it_waits_in_the_queue_that_routers_see(to: str) -> None:
    cluster = Cluster(pages=(90, 90), both={"max_running": 1})
    for rid in ("r", "s"):
        cluster.submit_whole(rid, list(range(20)), to=to, new=4)
    engine = getattr(cluster, to)
    assert engine.role.queues()["waiting"] == 2 and engine.scheduler.waiting_tokens == 40
    engine.turn()
    assert engine.role.queues()["waiting"] == 1 and not engine.role.waits_for_outside()
    cluster.run(random.Random(1))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_that_decode_retracts_is_computed_again_there(elsewhere: bool) -> None:
    """Prefill knows nothing of it, whatever becomes of those that prefill has computed."""
    cluster = Cluster(pages=(200, 16), conservativeness=0.0, resume_elsewhere=elsewhere)
    prompts = {f"r{i}": [i, *range(8 + i)] for i in range(6)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        if i % 2:
            cluster.submit(rid, prompt, i + 1, new=24)
        else:
            cluster.submit_whole(rid, prompt, to="decode", new=24)
    cluster.run(random.Random(7))
    decode = cluster.decode
    assert decode.tokens == {rid: expected_tokens(prompt, 24) for rid, prompt in prompts.items()}
    retracted = {rid for rid, said in decode.outputs.items() if said[-1].retractions}
    assert retracted & {"r0", "r2", "r4"} and set(cluster.prefill.outputs) == {"r1", "r3", "r5"}
    assert (decode.role.counters()["resumed_through_prefill"] > 0) == elsewhere
    cluster.assert_all_back()


BIG, SMALL = list(range(100, 160)), 16  # of 25 pages of 4


@pytest.mark.parametrize("big_is_whole", [True, False])
def test_neither_queue_starves_the_other(big_is_whole: bool) -> None:
    """A long one waits for memory, and short ones of the other kind keep coming: those behind it do not pass it."""
    cluster, rng, room = Cluster(pages=(400, 25), rows=9, clip=0), random.Random(5), 0

    def submit(rid: str, prompt: list[int], *, whole: bool, **wishes: Any) -> None:
        nonlocal room
        room += 1
        if whole:
            cluster.submit_whole(rid, prompt, to="decode", **wishes)
        else:
            cluster.submit(rid, prompt, room, **wishes)

    def turns(count: int) -> None:
        for _ in range(count):
            cluster.turn(rng)

    for i in range(3):
        submit(f"before{i}", [i] * SMALL, whole=True, new=8 + 8 * i)
    turns(6)
    submit("big", BIG, whole=big_is_whole, new=4)
    turns(6)
    for i in range(30):
        submit(f"small{i}", [50 + i] * SMALL, whole=not big_is_whole, new=12)
        turns(3)
    cluster.run(rng)
    ends = list(cluster.decode.finish)
    passed = [rid for rid in ends[: ends.index("big")] if rid.startswith("small")]
    assert not passed, f"{passed} passed one that came before them"
    assert cluster.decode.tokens["big"] == expected_tokens(BIG, 4)
    cluster.assert_all_back()


def test_kv_that_never_comes_holds_no_prompt_back() -> None:
    """Its client leaves while it waits for memory."""
    cluster, rng = Cluster(pages=(400, 25), rows=9, clip=0), random.Random(5)
    cluster.submit_whole("runs", [1] * SMALL, to="decode", new=60)
    while "runs" not in cluster.decode.tokens:
        cluster.turn(rng)
    cluster.submit("big", [*BIG, *range(20)], 1, new=4)
    for _ in range(8):
        cluster.turn(rng)
    assert cluster.decode.role.queues()["prealloc"] == 1
    cluster.decode.abort("big")
    cluster.prefill.abort("big")
    cluster.submit_whole("next", BIG[:40], to="decode", new=4)
    while "next" not in cluster.decode.finish:
        cluster.turn(rng)
    assert "runs" not in cluster.decode.finish
    cluster.run(rng)
    cluster.assert_all_back()


@pytest.mark.parametrize("first_is_whole", [True, False])
def test_rows_go_by_arrival(first_is_whole: bool) -> None:
    """One row: whichever kind has come first gets it first, and the other kind does not pass it."""
    cluster, rng = Cluster(pages=(200, 200), rows=9, both={"max_running": 1}), random.Random(2)
    cluster.submit("runs", [1, 2, 3], 1, new=40)
    while "runs" not in cluster.decode.tokens:
        cluster.turn(rng)
    kinds = [("first", first_is_whole), *((f"next{i}", not first_is_whole) for i in range(3))]
    for number, (rid, whole) in enumerate(kinds, 2):
        if whole:
            cluster.submit_whole(rid, [number] * 9, to="decode", new=4)
        else:
            cluster.submit(rid, [number] * 9, number, new=4)
        for _ in range(8):
            cluster.turn(rng)
    cluster.run(rng)
    assert list(cluster.decode.finish)[:2] == ["runs", "first"]
    cluster.assert_all_back()
