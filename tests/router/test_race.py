"""Two legs as tasks: which result counts when, and that nothing runs on afterwards. No network."""

import asyncio
from typing import Any

import pytest

from router.legs import Answer, LegError, Wait
from router.lifelines import Lifelines
from router.race import Race
from router.workers import Role, Worker, WorkerTable

WORKER: Worker = WorkerTable().add("http://h:1", role=Role.DECODE)


class FakeResponse:
    """Stands for the HTTP answer of a decode worker; only closing matters here."""

    def __init__(self) -> None:
        self.closed = False
        self.content = self

    def is_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


async def fails(status: int) -> Any:
    raise LegError(WORKER, reason="status", status=status)


async def succeeds(value: Any) -> Any:
    return value


async def hangs() -> Any:
    await asyncio.Event().wait()


def answer() -> tuple[Answer, FakeResponse]:
    response = FakeResponse()
    return Answer(response, Wait(Lifelines(timeout_s=0.0), WORKER)), response  # type: ignore[arg-type]


def race_of(prefill: Any, decode: Any) -> Race:
    return Race(asyncio.create_task(prefill), asyncio.create_task(decode))


@pytest.mark.parametrize("statuses", [(500, 400), (400, 500)])
def test_of_two_failures_at_once_the_final_one_counts(statuses: tuple[int, int]) -> None:
    async def scenario() -> None:
        race = race_of(fails(statuses[0]), fails(statuses[1]))
        with pytest.raises(LegError) as caught:
            await race.answer(wait_for_prefill=False)
        assert caught.value.status == 400
        await race.close()

    asyncio.run(scenario())


def test_a_worker_that_is_gone_is_blamed_before_the_one_that_says_it_lost_its_peer() -> None:
    async def scenario() -> None:
        async def breaks() -> Any:
            raise LegError(WORKER, reason="lost")

        race = race_of(fails(500), breaks())
        with pytest.raises(LegError) as caught:
            await race.answer(wait_for_prefill=False)
        assert caught.value.reason == "lost"
        await race.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("prefill_fails", [True, False])
def test_the_first_failure_ends_the_other_leg(*, prefill_fails: bool) -> None:
    async def scenario() -> None:
        race = race_of(fails(500), hangs()) if prefill_fails else race_of(hangs(), fails(500))
        with pytest.raises(LegError):
            await race.answer(wait_for_prefill=True)
        await race.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_an_answer_that_came_together_with_a_failure_is_closed() -> None:
    async def scenario() -> None:
        good, response = answer()
        race = race_of(fails(400), succeeds(good))
        with pytest.raises(LegError):
            await race.answer(wait_for_prefill=False)
        await race.close()
        assert response.closed

    asyncio.run(scenario())


def test_after_the_answer_prefill_may_end_in_peace() -> None:
    async def scenario() -> None:
        good, response = answer()
        go_on = asyncio.Event()
        race = race_of(go_on.wait(), succeeds(good))
        assert await race.answer(wait_for_prefill=False) is good
        race.finish()
        await race.close()
        assert not race.prefill.done() and not response.closed
        go_on.set()
        await race.prefill

    asyncio.run(scenario())


def test_a_prefill_leg_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.race.TAIL_S", 0.01)

    async def scenario() -> None:
        good, _ = answer()
        race = race_of(hangs(), succeeds(good))
        await race.answer(wait_for_prefill=False)
        race.finish()
        await race.close()
        await asyncio.wait_for(asyncio.wait([race.prefill]), 10)
        assert race.prefill.cancelled()

    asyncio.run(scenario())
