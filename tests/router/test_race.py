"""The legs of a request: which result counts when, and that nothing runs on afterwards. No network: answers are told by hand."""

import asyncio
from collections.abc import Callable

import pytest

from router.client.upstream import UpstreamError
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.requests.legs import Leg, LegError
from router.requests.race import Race

WORKER: Worker = WorkerTable().add("http://h:1", role=Role.DECODE)
EVENTS = {"content-type": "text/event-stream"}


class ToldReply:
    """What a worker answers, told by the test."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.error: UpstreamError | None = None
        self.heard_s = 0.0
        self.listener: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self._body = b""

    @property
    def num_buffered(self) -> int:
        return len(self._body)

    @property
    def closed(self) -> bool:
        return self.error is not None

    def tell(self, status: int, body: bytes = b"x", *, events: bool = False, complete: bool = True) -> None:
        self.status, self._body, self.complete = status, body, complete
        self.headers = EVENTS if events else {}
        self.listener()

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def readany(self) -> bytes:
        return self.take()

    def close(self, error: UpstreamError | None = None) -> None:
        if not self.complete and self.error is None:
            self.error = error or UpstreamError("lost", "closed")
            self.listener()


def race_of(prefill: ToldReply, decode: ToldReply) -> Race:
    return Race(Leg(WORKER, decode, stream=True), prefill=Leg(WORKER, prefill, stream=False))


@pytest.mark.parametrize("statuses", [(500, 400), (400, 500)])
def test_of_two_failures_at_once_the_final_one_counts(statuses: tuple[int, int]) -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        prefill.tell(statuses[0])
        decode.tell(statuses[1])
        with pytest.raises(LegError) as caught:
            await race.answer(wait_for_prefill=False)
        assert caught.value.status == 400 and caught.value.body == b"x"

    asyncio.run(scenario())


def test_a_worker_that_is_gone_is_blamed_before_the_one_that_says_it_lost_its_peer() -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        prefill.tell(500)
        decode.close()
        with pytest.raises(LegError) as caught:
            await race.answer(wait_for_prefill=False)
        assert caught.value.reason == "lost"

    asyncio.run(scenario())


@pytest.mark.parametrize("prefill_fails", [True, False])
def test_the_first_failure_ends_the_other_leg(*, prefill_fails: bool) -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        asyncio.get_running_loop().call_soon((prefill if prefill_fails else decode).tell, 500)
        with pytest.raises(LegError):
            await race.answer(wait_for_prefill=True)
        race.close()
        assert (decode if prefill_fails else prefill).closed

    asyncio.run(scenario())


def test_an_answer_that_came_together_with_a_failure_is_closed() -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        prefill.tell(400)
        decode.tell(200, events=True, complete=False)
        with pytest.raises(LegError):
            await race.answer(wait_for_prefill=False)
        race.close()
        assert decode.closed

    asyncio.run(scenario())


def test_a_stream_begins_with_its_first_bytes_and_another_answer_with_its_last() -> None:
    async def scenario() -> None:
        for events in (True, False):
            prefill, decode = ToldReply(), ToldReply()
            answer = asyncio.create_task(race_of(prefill, decode).answer(wait_for_prefill=False))
            decode.tell(200, b"", events=events, complete=False)
            await asyncio.sleep(0)
            assert not answer.done()
            decode.tell(200, events=events, complete=False)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert answer.done() is events
            decode.tell(200, events=events)
            assert (await answer).reply.take() == b"x"

    asyncio.run(scenario())


def test_an_answer_waits_for_prefill_where_it_is_asked_to() -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        answer = asyncio.create_task(race_of(prefill, decode).answer(wait_for_prefill=True))
        decode.tell(200)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not answer.done()
        prefill.tell(200)
        await answer

    asyncio.run(scenario())


def test_after_the_answer_prefill_may_end_in_peace() -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        decode.tell(200)
        assert await race.answer(wait_for_prefill=False) is race.answering
        race.finish()
        race.close()
        ended: list[str] = []
        race.when_prefill_ends(lambda: ended.append("prefill"))
        assert not prefill.closed and not ended
        prefill.tell(200)
        assert ended == ["prefill"] and race.refused is None

    asyncio.run(scenario())


def test_a_prefill_leg_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.race.TAIL_S", 0.01)

    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        decode.tell(200)
        await race.answer(wait_for_prefill=False)
        race.finish()
        ended = asyncio.Event()
        race.when_prefill_ends(ended.set)
        await asyncio.wait_for(ended.wait(), 10)
        assert prefill.closed

    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "cut"), [(400, True), (503, False)])
def test_a_prefill_worker_that_refuses_late_cuts_the_stream(status: int, *, cut: bool) -> None:
    async def scenario() -> None:
        prefill, decode = ToldReply(), ToldReply()
        race = race_of(prefill, decode)
        decode.tell(200, events=True, complete=False)
        await race.answer(wait_for_prefill=False)
        seen: list[LegError] = []
        race.watch_prefill(seen.append)
        prefill.tell(status)
        assert [failure.status for failure in seen] == [status]
        assert decode.closed is cut and (race.refused is not None) is cut

    asyncio.run(scenario())
