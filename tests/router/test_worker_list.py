"""The list of workers: as msgspec would write it whole, in slices between which other tasks run."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from router.http.worker_list import SLICE, describe, describe_all
from router.pool.worker import LoadReport
from tests.router.dummies import table_of


@pytest.mark.parametrize("count", [0, 1, SLICE, 4 * SLICE + 1])
async def test_other_tasks_run_while_many_workers_are_listed(count: int) -> None:
    table, turns = table_of(count), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for worker in table.workers()[::2]:
        table.loads.on_report(worker, LoadReport(running_reqs=worker.worker_id, stages={"running": 1}))
    task = asyncio.create_task(others())
    listed: list[dict[str, Any]] = json.loads(msgspec.json.encode(await describe_all(table.workers())))
    task.cancel()
    assert listed == json.loads(msgspec.json.encode([describe(worker) for worker in table.workers()]))
    assert [worker["report"] and worker["report"]["running_reqs"] for worker in listed[:2]] == [0, None][:count]
    assert turns >= count // SLICE
