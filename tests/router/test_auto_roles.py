"""The loop around the controller: what it makes of moves that go well, are refused or break; what it tells; its flags."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from prometheus_client import generate_latest

from router.config import RouterConfig
from router.fleet import PeerProcesses
from router.history.metrics import RouterMetrics
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from router.roles.auto import PATH, AutoRoles
from router.roles.switch import SwitchFailed, SwitchRefused
from tests.router.dummies import table_of

CONFIG = RouterConfig(
    pd_disaggregation=True,
    auto_roles=True,
    auto_roles_interval_s=0.01,
    auto_roles_sustain_s=0.02,
    auto_roles_cooldown_s=0.1,
    auto_roles_switch_time_s=0.0,
)
FULL = LoadReport(running_reqs=9, used_tokens=99, capacity_tokens=100, max_running_reqs=100)


class ScriptedSwitch:
    """Moves a worker at once, unless `errors` has one for it."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors
        self.asked: list[tuple[str, Role]] = []

    async def move(self, worker: Worker, role: Role) -> None:
        self.asked.append((worker.url, role))
        if self.errors:
            raise self.errors.pop(0)
        worker.role = role


class Process:
    """A router's process as far as this goes: two idle prefill workers and a full decode worker."""

    def __init__(self, *errors: Exception, leads: bool = True, peers: PeerProcesses | None = None) -> None:
        self.table = table_of(roles=(Role.PREFILL, Role.PREFILL, Role.DECODE))
        self.workers = self.table.workers()
        for worker in self.workers:
            self.table.on_models(worker, ("m",))
        self.switch = ScriptedSwitch(list(errors))
        self.metrics = RouterMetrics(self.table)
        self.auto = AutoRoles(
            config=CONFIG,
            table=self.table,
            mover=self.switch,
            metrics=self.metrics,
            peers=peers or PeerProcesses(None),
            leads=leads,
        )

    async def run(self, *, moves: int) -> None:
        """Workers report, until so many moves are over."""
        self.auto.start()
        try:
            async with asyncio.timeout(10.0):
                while sum(done["result"] is not None for done in self.moves()) < moves:
                    self.report()
                    await asyncio.sleep(0.002)
        finally:
            await self.auto.close()

    def report(self) -> None:
        for worker in self.workers:
            self.table.loads.on_report(worker, replace(FULL if worker is self.workers[2] else LoadReport()))

    def moves(self) -> list[dict[str, Any]]:
        """The newest first."""
        found: list[dict[str, Any]] = json.loads(encoded(self.auto.status()))["moves"]
        return found


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


async def test_a_short_pool_gets_a_worker_and_everybody_can_see_why() -> None:
    process = Process()
    await process.run(moves=1)
    assert process.switch.asked == [("http://h0:1", Role.DECODE)]
    (done,) = process.moves()
    assert (done["url"], done["to_role"], done["result"]) == ("http://h0:1", "decode", "moved")
    assert "decode is short" in done["reason"]
    text = generate_latest(process.metrics._registry).decode()
    assert 'tandem_router_role_moves_total{model="m",result="moved",to_role="decode"} 1.0' in text
    assert 'tandem_router_role_pressure{model="m",role="decode"} 0.99' in text


async def test_moves_that_do_not_come_about_are_counted_and_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(SwitchRefused("no bootstrap port"), SwitchFailed("it is gone"), RuntimeError("a bug"))
    await process.run(moves=4)
    assert [done["result"] for done in process.moves()] == ["moved", "failed", "failed", "refused"]
    begins = [done["began_s"] for done in reversed(process.moves())]
    assert all(round(b - a, 6) >= CONFIG.auto_roles_cooldown_s for a, b in pairwise(begins))  # times are sums of floats
    assert "the move of http://h0:1 to decode was refused: no bootstrap port" in caplog.text
    assert "the move of http://h0:1 to decode failed: it is gone" in caplog.text


async def test_a_look_that_breaks_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    read, broken = process.table.workers, [ZeroDivisionError()]

    def workers(role: Role | None = None) -> list[Worker]:
        if broken:
            raise broken.pop()
        return read(role)

    process.auto.table = cast(WorkerTable, type("Table", (), {"workers": staticmethod(workers)}))
    await process.run(moves=1)
    assert not broken
    assert "a look at the pools failed" in caplog.text


async def test_one_process_of_a_fleet_moves_workers_and_the_others_ask_it() -> None:
    class Others(PeerProcesses):
        def __init__(self, leader: AutoRoles) -> None:
            super().__init__(None)
            self.leader = leader

        async def request(self, method: str, path: str, body: Any = None) -> list[bytes]:
            assert (method, path) == ("GET", PATH)
            return [encoded({"runs": False}), encoded(self.leader.status())]

    leader = Process()
    other = Process(leads=False, peers=Others(leader.auto))
    other.auto.start()
    await leader.run(moves=1)
    for _ in range(20):  # as many looks as its leader took, and more
        other.report()
        await asyncio.sleep(2 * CONFIG.auto_roles_interval_s)
    await other.auto.close()
    assert other.switch.asked == []
    answer = await other.auto.handle(cast(web.BaseRequest, type("Request", (), {"headers": {}})()))
    told = json.loads(cast(bytes, answer.body))
    assert told["runs"] and told["moves"][0]["result"] == "moved"
    assert not other.auto.status()["runs"]
