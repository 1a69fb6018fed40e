"""Workers that change their role: what may move, and how the router's pools follow, whoever asked."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from router.client.credentials import Credentials
from router.fleet import PeerProcesses
from router.pool.breaker import Check, Health
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from router.roles.switch import Switch, SwitchProgress, SwitchRefused, objection, progress
from service.security.keys import KeyRing
from tests.router.behaviours import later, obey
from tests.router.dummies import BOOTSTRAP_PORT, Cluster, DummyWorker, always, cluster, table_of, until


def make_table(*, prefill: int = 2, decode: int = 1) -> WorkerTable:
    return table_of(roles=[Role.PREFILL] * prefill + [Role.DECODE] * decode)


def test_the_last_of_a_pool_stays_unless_forced() -> None:
    table = make_table()
    p0, p1, d0 = table.workers()
    assert objection(table, p0, Role.DECODE) == ""
    assert "the last healthy decode worker; force" in objection(table, d0, Role.PREFILL)
    assert objection(table, d0, Role.PREFILL, force=True) == ""
    table.set_switching(p1, Role.DECODE)
    assert "the last healthy prefill worker" in objection(table, p0, Role.DECODE), "the other is leaving the pool"
    assert "becoming a decode worker already" in objection(table, p1, Role.DECODE, force=True)
    table.set_switching(p1, None)
    table.on_check(p1, Check.REFUSED, now_s=2.0)
    assert "the last healthy prefill worker" in objection(table, p0, Role.DECODE)
    assert "it is down" in objection(table, p1, Role.DECODE, force=True)


def test_a_pool_is_a_models_and_an_adapter_is_one() -> None:
    table = make_table(prefill=3)
    p0, p1, p2, _ = table.workers()
    table.on_models(p0, ("a",))
    table.on_models(p1, ("a", "adapter"))
    table.on_models(p2, ("b",))
    assert objection(table, p0, Role.DECODE) == ""
    assert "worker of 'adapter'" in objection(table, p1, Role.DECODE)
    assert "worker of 'b'" in objection(table, p2, Role.DECODE)


def test_who_may_not_move_at_all() -> None:
    table = make_table()
    unified, stranger = table.add("http://u:1", role=Role.UNIFIED), make_table().workers()[0]
    leaving = table.workers()[0]
    table.retire(leaving.url)
    assert "only prefill and decode" in objection(table, unified, Role.DECODE, force=True)
    assert "only prefill and decode" in objection(table, leaving, Role.UNIFIED, force=True)
    assert "not in the table" in objection(table, stranger, Role.DECODE, force=True)
    assert "it is leaving" in objection(table, leaving, Role.DECODE, force=True)


def test_what_was_known_of_the_old_role_is_forgotten() -> None:
    gone: list[Worker] = []
    table = make_table()
    table.on_gone = gone.append
    p0 = table.workers()[0]
    p0.bootstrap.given_port = 9
    table.loads.on_report(p0, LoadReport(waiting_tokens=100))
    lease = table.loads.charge(p0, 7)
    table.on_role(p0, Role.DECODE)
    assert table.alive(Role.DECODE)[0] is p0 and p0 not in table.alive(Role.PREFILL)
    assert (p0.report, p0.foreign_tokens, p0.bootstrap.given_port, gone) == (None, 0, None, [p0])
    table.loads.release(lease)
    table.check()


PROGRESS: list[tuple[list[tuple[str, Any]], SwitchProgress]] = [
    ([], SwitchProgress.UNDER_WAY),
    ([("check", Check.DRAINING)], SwitchProgress.UNDER_WAY),
    ([("check", Check.FAILED)] * 2, SwitchProgress.UNDER_WAY),  # down, but its port is open: it loads
    ([("check", Check.REFUSED)], SwitchProgress.ENDED),
    ([("check", Check.DRAINING), ("life", "b"), ("role", Role.DECODE)], SwitchProgress.UNDER_WAY),
    ([("check", Check.DRAINING), ("life", "b"), ("role", Role.DECODE), ("check", Check.OK)], SwitchProgress.THERE),
    ([("check", Check.DRAINING), ("life", "b"), ("check", Check.OK)], SwitchProgress.WENT_BACK),
    ([("life", "b")], SwitchProgress.UNDER_WAY),  # nobody saw it drain, and its role is just being read
    ([("life", "b"), ("role", Role.DECODE)], SwitchProgress.THERE),
    ([("life", "b"), ("check", Check.OK)], SwitchProgress.WENT_BACK),
    ([("remove", None)], SwitchProgress.REMOVED),
]


@pytest.mark.parametrize(("told", "expected"), PROGRESS)
def test_how_far_a_move_is(told: list[tuple[str, Any]], expected: SwitchProgress) -> None:
    table, now_s = make_table(), 10.0
    worker = table.workers()[0]
    table.on_incarnation(worker, "a", checked_s=0.0)
    for kind, what in told:
        now_s += 1.0
        match kind:
            case "check":
                table.on_check(worker, what, now_s=now_s)
            case "life":
                table.on_incarnation(worker, what, checked_s=now_s)
            case "role":
                table.on_role(worker, what)
            case "remove":
                table.remove(worker.url)
    assert progress(table, worker, Role.DECODE, was="a") is expected


async def go_back(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    worker.incarnation += "+"
    worker.info["last_switch"] = {"from": "prefill", "to": "decode", "error": "no memory"}
    return web.json_response({}, status=202)


refuse, unknown = always(400, {"error": {"message": "role: this worker cannot"}}), always(404, {})


async def end(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(worker.stop()))
    return web.json_response({}, status=202)


@asynccontextmanager
async def movable() -> AsyncIterator[Cluster]:
    """Two prefill workers and one for decode, which obey."""
    async with cluster(prefill=2, decode=1) as c:
        for number, dummy in enumerate((*c.prefills, *c.decodes)):
            dummy.behave, dummy.incarnation = obey, f"life-{number}-"
        await until(lambda: all(w.process.incarnation for w in c.router.table.workers()))
        yield c


async def ask(c: Cluster, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, answer = await c.post("/workers/role", body)
    return status, json.loads(answer)


async def test_an_admin_moves_a_worker_and_requests_follow_it() -> None:
    async with movable() as c:
        mover = c.prefills[0]
        status, said = await ask(c, {"url": mover.url, "role": "decode", "timeout": 3})
        assert (status, said["role"], said["switching_to"], said["health"]) == (200, "decode", None, "up")
        assert mover.seen[-1].path == "/switch_role" and mover.seen[-1].body == {"role": "decode", "timeout": 3}
        for _ in range(4):
            assert (await c.post("/v1/completions", {"prompt": "a"}))[0] == 200
        legs = [seen.body for seen in mover.seen if seen.path == "/v1/completions"]
        assert len(legs) == 2 and {leg["bootstrap_port"] for leg in legs} == {BOOTSTRAP_PORT}
        assert len([s for s in c.prefills[1].seen if s.path == "/v1/completions"]) == 4
        assert (await ask(c, {"url": mover.url, "role": "decode"}))[0] == 200, "nothing to do"
        assert len([seen for seen in mover.seen if seen.path == "/switch_role"]) == 1
        mover.info["disaggregation_bootstrap_port"] = 4711
        assert (await ask(c, {"url": mover.url, "role": "prefill"}))[1]["bootstrap_port"] == 4711


async def test_the_router_notices_a_worker_that_another_client_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom it reads what a worker says of itself: another life is a reason to."""
    monkeypatch.setattr("router.pool.health.BOOTSTRAP_REFRESH_S", 1e9)
    async with movable() as c:
        worker = c.router.table.workers()[0]
        c.prefills[0].mode, c.prefills[0].incarnation = "decode", "another life"
        await until(lambda: worker.role is Role.DECODE and worker.health is Health.UP)
        assert c.router.table.alive(Role.DECODE)[0] is worker


@pytest.mark.parametrize(
    ("behave", "status", "says"),
    [
        (refuse, 409, "answers 400: role: this worker cannot"),
        (unknown, 409, "has no /switch_role"),
        (go_back, 502, "it started again in its old role: no memory"),
        (end, 502, "it has ended"),
    ],
)
async def test_a_failed_switch_is_reported_and_the_worker_keeps_its_role(behave: Any, status: int, says: str) -> None:
    async with movable() as c:
        c.prefills[0].behave = behave
        got, said = await ask(c, {"url": c.prefills[0].url, "role": "decode"})
        assert got == status and says in said["error"]["message"]
        worker = c.router.table.workers()[0]
        assert (worker.role, worker.switching_to) == (Role.PREFILL, None)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"role": "decode"}, 400, "url"),
        ({"url": "http://127.0.0.1:1", "role": "decode"}, 400, "url"),
        ({"url": "P0"}, 400, "role"),
        ({"url": "P0", "role": "unified"}, 400, "role"),
        ({"url": "P0", "role": "decode", "force": 1}, 400, "force"),
        ({"url": "P0", "role": "decode", "timeout": -1}, 400, "timeout"),
        ({"url": "P0", "role": "decode", "timeout": True}, 400, "timeout"),
        ({"url": "D0", "role": "prefill"}, 409, None),
    ],
)
async def test_a_switch_that_makes_no_sense_is_refused_before_anybody_is_asked(
    body: dict[str, Any], status: int, param: str | None
) -> None:
    async with movable() as c:
        urls = {"P0": c.prefills[0].url, "D0": c.decodes[0].url}
        if "url" in body:
            body["url"] = urls.get(body["url"], body["url"])
        got, said = await ask(c, body)
        assert (got, said["error"]["param"]) == (status, param)
        assert not c.prefills[0].seen and not c.decodes[0].seen


async def test_the_last_of_a_pool_moves_by_force() -> None:
    async with movable() as c:
        status, said = await ask(c, {"url": c.decodes[0].url, "role": "prefill", "force": True})
        assert (status, said["role"]) == (200, "prefill")
        assert (await c.post("/v1/completions", {"prompt": "a"}))[0] == 503


async def test_a_move_goes_on_when_its_caller_leaves() -> None:
    async with movable() as c:
        worker, may_go_on = c.router.table.workers()[0], asyncio.Event()
        c.prefills[0].behave = later(may_go_on, obey)
        switch = Switch(
            table=c.router.table,
            monitor=c.router.monitor,
            session=c.client,
            credentials=Credentials(api=KeyRing(key="k")),
            peers=PeerProcesses(None),
        )
        caller = asyncio.create_task(switch.move(worker, Role.DECODE))
        await until(lambda: c.prefills[0].seen)
        assert worker.switching_to is Role.DECODE and worker not in c.router.table.alive(Role.PREFILL)
        with pytest.raises(SwitchRefused, match="already"):
            await switch.move(worker, Role.DECODE)
        caller.cancel()
        await asyncio.wait([caller])
        may_go_on.set()
        await until(lambda: worker.role is Role.DECODE and worker.switching_to is None)
        assert c.prefills[0].seen[-1].headers["authorization"] == "Bearer k", "the router's own key"
        await switch.close()
