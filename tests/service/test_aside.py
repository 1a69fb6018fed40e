"""Work beside an event loop: by size it runs in the loop, in a thread, or in the thread of very long work."""

import asyncio
import json
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from service.http.errors import ApiError
from service.http.routes import json_rows
from service.waiter import BODIES, SWITCH_S, Aside


def thread_name() -> str:
    return threading.current_thread().name.rpartition("_")[0]


async def test_short_work_runs_at_once_and_longer_work_in_threads_by_its_length() -> None:
    aside = Aside("work", inline=10, huge=100)
    names = [await aside.run(thread_name, size=size) for size in (9, 10, 99, 100)]
    assert names[1:] == ["work", "work", "work-huge"] and "work" not in names[0]
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S), "the loop gets the interpreter soon"
    aside.close()


async def test_very_long_work_holds_up_its_like_alone() -> None:
    aside, begun, over = Aside("work", inline=10, huge=100), threading.Event(), threading.Event()

    def waits() -> bool:
        begun.set()
        return over.wait(60)

    first = asyncio.ensure_future(aside.run(waits, size=100))
    second = asyncio.ensure_future(aside.run(thread_name, size=100))
    assert await aside.run(begun.wait, size=10) and await aside.run(thread_name, size=10) == "work"
    assert not second.done()
    aside.close()
    over.set()
    assert await first
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        await second


async def test_errors_of_a_thread_reach_the_request() -> None:
    def refuses() -> None:
        raise ApiError(413, "too much")

    with pytest.raises(ApiError, match="too much"):
        await BODIES.run(refuses, size=1 << 20)


async def test_rows_of_an_answer_are_encoded_where_they_are_made() -> None:
    for size, name in ((1, ""), (1 << 19, "bodies")):
        rows = await json_rows(({"name": thread_name(), "row": row} for row in range(3)), size=size)
        assert [json.loads(bytes(row)) for row in rows] == [{"name": name, "row": row} for row in range(3)]
