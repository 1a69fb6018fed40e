"""When a decode worker near its memory limit gives requests away: the decision, and that the router acts on it."""

import asyncio
from collections.abc import Iterable

import pytest

from router.pool.active_calls import num_to_give
from router.pool.worker import LoadReport, Worker
from tests.router.dummies import cluster, table_of, until
from tests.router.test_failover import DONE, read, tokens_of
from tests.router.test_moves import Leaving, goes_on


def reporting(*reports: LoadReport | None) -> list[Worker]:
    table = table_of(len(reports))
    for worker, report in zip(table.workers(), reports, strict=True):
        worker.report = report
    return list(table.workers())


def report(used: int, *, running: int = 10, pending: int = 0, capacity: int = 1000) -> LoadReport:
    return LoadReport(running_reqs=running, used_tokens=used, capacity_tokens=capacity, pending_tokens=pending)


@pytest.mark.parametrize(
    ("mine", "others", "given"),
    [
        (report(950), [report(0)], 1),  # 50 above, a request holds 95
        (report(1000, running=20), [report(0)], 2),
        (report(900), [report(0)], 0),  # not above
        (report(950), [report(850)], 0),  # nowhere room for one
        (report(950), [report(850), report(400)], 1),
        (report(950), [report(400, pending=450)], 0),  # its room is spoken for
        (report(1000, running=2), [report(0)], 1),
        (report(1000, running=1), [report(0)], 0),  # the last one stays: it would be as large there
        (report(1000, running=20), [report(840, running=20)], 1),  # room for one of 50
        (None, [report(0)], 0),
        (report(950), [None], 0),
        (report(950), [], 0),
    ],
)
def test_so_many_are_given(mine: LoadReport | None, others: Iterable[LoadReport | None], given: int) -> None:
    worker, *rest = reporting(mine, *others)
    assert num_to_give(worker, [worker, *rest], above=0.9) == given


def loads(used: int, running: int) -> dict[str, object]:
    return {"loads": [{"num_running_reqs": running, "num_used_tokens": used, "max_total_num_tokens": 1000}]}


@pytest.mark.parametrize("above", [0.9, 0.0])
async def test_a_stream_moves_from_a_full_worker_to_one_with_room(above: float) -> None:
    async with cluster(decode=2, rebalance_above=above, load_poll_interval_s=0.02) as c:
        leaving = Leaving()
        for worker in c.decodes:
            worker.behave, worker.lets_go, worker.loads = leaving.behave, leaving.lets_go, loads(100, 1)
        running = asyncio.create_task(read(c))
        await until(lambda: c.router.live.requests and next(iter(c.router.live.requests)).first_byte_s is not None)
        (at,) = [w for w in c.decodes if w.seen]
        (to,) = [w for w in c.decodes if w is not at]
        to.behave, at.loads = goes_on, loads(960, 2)
        full = c.router.table.find(at.url)
        await until(lambda: full.report is not None and full.report.used_tokens == 960)
        if not above:  # by default: reports come, and nothing follows
            first = full.report
            await until(lambda: full.report is not first)
            assert not leaving.told
            await c.post("/workers/migrate", {"url": at.url})
        text = await running
        assert tokens_of(text) == [1, 3, 4] and text.endswith(DONE) and len(leaving.told) == 1
        await c.settled()
