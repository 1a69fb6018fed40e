"""The calls of an attempt: which result counts when, and that nothing runs on afterwards. No network: answers are scripted."""

import asyncio

import pytest

from router.attempts.pair_attempt import PairAttempt
from router.attempts.upstream_call import CallFailed
from tests.router.attempts import Launched, make_request, turns


async def begun(attempt: PairAttempt) -> PairAttempt:
    await attempt.launcher.until_begun(make_request(), attempt)
    return attempt


@pytest.mark.parametrize("statuses", [(500, 400), (400, 500)])
async def test_of_two_failures_at_once_the_final_one_counts(statuses: tuple[int, int]) -> None:
    attempt, prefill, decode = Launched().pair()
    prefill.answer(statuses[0])
    decode.answer(statuses[1])
    with pytest.raises(CallFailed) as caught:
        await begun(attempt)
    assert caught.value.status == 400 and caught.value.body == b"x"


async def test_a_worker_that_is_gone_is_blamed_before_the_one_that_says_it_lost_its_peer() -> None:
    attempt, prefill, decode = Launched().pair()
    prefill.answer(500)
    decode.close()
    with pytest.raises(CallFailed) as caught:
        await begun(attempt)
    assert caught.value.reason == "lost"


async def test_an_answer_that_came_together_with_a_failure_is_closed() -> None:
    attempt, prefill, decode = Launched().pair()
    prefill.answer(400)
    decode.answer(200, events=True, complete=False)
    with pytest.raises(CallFailed):
        await begun(attempt)
    attempt.end()
    assert decode.closed


async def test_a_stream_begins_with_its_first_bytes_and_another_answer_with_its_last() -> None:
    for events in (True, False):
        attempt, _, decode = Launched().pair()
        answer = asyncio.create_task(begun(attempt))
        decode.answer(200, b"", events=events, complete=False)
        await turns(1)
        assert not answer.done()
        decode.answer(200, events=events, complete=False)
        await turns()
        assert answer.done() is events
        decode.answer(200, events=events)
        assert (await answer).answering.reply.take() == b"x"


async def test_a_prefill_call_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.attempts.pair_attempt.TAIL_S", 0.01)

    launched = Launched()
    attempt, prefill, decode = launched.pair()
    decode.answer(200)
    await begun(attempt)
    attempt.complete()
    attempt.end()
    async with asyncio.timeout(10):
        while launched.launcher.tails:
            await asyncio.sleep(0.001)
    assert prefill.closed
    launched.check()
