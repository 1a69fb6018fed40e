"""Streams that leave a decode worker with their KV, by order or because its memory is full: scripted workers let them go."""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from aiohttp import web

import router.parts.failover
from router.pool.active_calls import num_to_give
from router.pool.worker import LoadReport, Worker
from service.http.resume import RESUME_FIELD, FrameRecord, Resume, SampleSource, begin_frame, ids_frame, moved_frame
from service.security.keys import bearer, owner_of
from tests.router.behaviours import hang
from tests.router.dummies import Cluster, DummyWorker, always, begin_stream, cluster, table_of, until
from tests.router.test_failover import BEGUN, DONE, event, goes_on, read, tokens_of

KV = SampleSource(control="10.0.0.1:5000", incarnation="d0")
HELD_BACK = ids_frame(0, [2])  # a token whose text waits


class Leaving:
    """Streams a token, and when its worker is told to let go: what it held back, and where the KV is."""

    def __init__(self, last: bytes = HELD_BACK + moved_frame({0: KV})) -> None:
        self.last = last
        self.told: list[list[dict[str, Any]]] = []
        self._let_go = asyncio.Event()

    def lets_go(self, samples: list[dict[str, Any]]) -> list[str]:
        self.told.append(samples)
        self._let_go.set()
        return [sample["rid"] for sample in samples]

    async def behave(self, worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if RESUME_FIELD in body:
            return await goes_on(worker, request, body)
        out = await begin_stream(request, begin_frame(BEGUN) + event(1))
        await self._let_go.wait()
        await out.write(self.last)
        await out.write_eof()
        return out


async def move_one(
    c: Cluster, leaving: Leaving, other: Any = goes_on, **headers: str
) -> tuple[bytes, DummyWorker, DummyWorker]:
    """Read a stream that leaves in the middle; return it, with the worker that it leaves and the other one."""
    for worker in c.decodes:
        worker.behave, worker.lets_go = leaving.behave, leaving.lets_go
    running = asyncio.create_task(read(c, **headers))
    await c.first_byte()
    to, at = sorted(c.decodes, key=lambda w: len(w.seen))
    to.behave = other
    status, _, answer = await c.post("/workers/migrate", {"url": at.url}, headers=headers)
    assert (status, json.loads(answer)["moved"]) == (200, 1)
    return await running, at, to


def resumed(worker: DummyWorker) -> list[tuple[Resume, dict[str, Any]]]:
    bodies = [seen.body for seen in worker.seen if RESUME_FIELD in seen.body]
    return [(msgspec.convert(body[RESUME_FIELD], Resume), body) for body in bodies]


async def counted(c: Cluster, result: str) -> float:
    lines = [
        m for m in await c.metrics() if m.startswith("tandem_router_failovers_total") and f'result="{result}"' in m
    ]
    return sum(float(line.split()[-1]) for line in lines)


async def test_another_decode_worker_goes_on_with_the_kv_and_prefill_is_not_asked() -> None:
    async with cluster(decode=2, info={"disaggregation_bootstrap_port": 8998}) as c:
        leaving = Leaving()
        text, _, to = await move_one(c, leaving)
        assert tokens_of(text) == [1, 3, 4] and text.endswith(DONE)  # 2 is held back at the next worker, too
        ((resume, body),) = resumed(to)
        assert resume.output_ids == [[1, 2]] and resume.sources == [KV]
        ((sample,),) = leaving.told
        assert sample == {"rid": BEGUN.names[0], "room": body["bootstrap_room"]}
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 8998), "of the prefill worker"
        assert not resumed(c.prefills[0])
        assert (await counted(c, "moved"), await counted(c, "went_on")) == (1, 0)


async def test_a_stream_is_moved_by_the_name_of_its_owner() -> None:
    async with cluster(decode=2, api_key="k") as c:
        _, at, _ = await move_one(c, Leaving(), **bearer("k"))
        assert at.owners == [owner_of("Bearer k")]
    async with cluster(decode=2) as c:
        _, at, _ = await move_one(c, Leaving(), **bearer("EMPTY"))
        assert at.owners == [""]


@pytest.mark.parametrize("fails", [always(503, {"error": "full"}), always(500, {"error": "no"}), always(502, {})])
async def test_a_pair_goes_on_where_the_other_worker_does_not_get_the_kv(fails: Any) -> None:
    async def other(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        by_kv = msgspec.convert(body[RESUME_FIELD], Resume).sources
        return await (fails if by_kv else goes_on)(worker, request, body)

    async with cluster(decode=2) as c:
        text, at, to = await move_one(c, Leaving(), other)
        assert tokens_of(text) == [1, 3, 4] and text.endswith(DONE)
        assert [bool(resume.sources) for resume, _ in (*resumed(to), *resumed(at))] == [True, False]
        assert len(resumed(c.prefills[0])) == 1
        assert (await counted(c, "moved"), await counted(c, "went_on")) == (0, 1)


async def test_a_worker_that_does_not_begin_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.parts.failover, "TAKE_OVER_S", 0.05)

    async def other(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        by_kv = msgspec.convert(body[RESUME_FIELD], Resume).sources
        return await (hang if by_kv else goes_on)(worker, request, body)

    async with cluster(decode=2) as c:
        text, _, to = await move_one(c, Leaving(), other)
        assert tokens_of(text) == [1, 3, 4] and to.cancelled == 1


async def test_a_sample_without_kv_goes_on_by_a_pair() -> None:
    async with cluster(decode=2) as c:
        text, _, _ = await move_one(c, Leaving(moved_frame({0: None})))
        assert tokens_of(text) == [1, 2, 3] and len(resumed(c.prefills[0])) == 1


async def test_a_stream_that_leaves_without_an_order_goes_on_by_a_pair() -> None:
    """No room is known for its KV."""
    async with cluster(decode=2) as c:
        leaving = Leaving()
        leaving.lets_go([])
        for worker in c.decodes:
            worker.behave = leaving.behave
        assert tokens_of(await read(c)) == [1, 3, 4] and len(resumed(c.prefills[0])) == 1


def refuses(samples: list[dict[str, Any]]) -> list[str]:
    return []


def only_says_so(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["rid"] for sample in samples]


@pytest.mark.parametrize("lets_go", [None, refuses, only_says_so])
async def test_a_worker_that_does_not_let_go_is_given_up(
    lets_go: Callable[[list[dict[str, Any]]], list[str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another make, one that knows no such stream, one that never ends it."""
    monkeypatch.setattr(router.parts.failover, "END_S", 0.05)
    async with cluster(decode=2) as c:
        leaving = Leaving()
        leaving.lets_go = lets_go  # type: ignore[assignment, method-assign]
        text, at, _ = await move_one(c, leaving)
        assert tokens_of(text) == [1, 2, 3] and len(resumed(c.prefills[0])) == 1 and at.cancelled == 1


async def test_a_stream_may_move_more_often_than_it_may_be_lost() -> None:
    """There and back; a move is no sign that the request ends its workers."""
    async with cluster(decode=2, failover_max=1) as c:
        leavings = [Leaving(ids_frame(0, [i]) + moved_frame({0: KV})) for i in (2, 3, 4)]
        for worker in c.decodes:
            worker.behave = Hops(leavings).behave
            worker.lets_go = lambda samples: next(x for x in leavings if not x.told).lets_go(samples)
        running = asyncio.create_task(read(c))
        for number in range(3):
            place = await until(lambda n=number: next((w for w in c.decodes if at_hop(w, n)), None))
            await until(lambda w=place: any(call.continuable for call in c.router.table.find(w.url).calls))
            await c.post("/workers/migrate", {"url": place.url})
        assert tokens_of(await running)[-2:] == [5, 6]
        assert await counted(c, "moved") == 3


class Hops:
    def __init__(self, leavings: list[Leaving]) -> None:
        self._leavings = leavings

    async def behave(self, worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        hop = len(body[RESUME_FIELD]["output_ids"][0]) // 2 if RESUME_FIELD in body else 0
        if hop == len(self._leavings):
            return await goes_on(worker, request, body)
        return await self._leavings[hop].behave(worker, request, {})


def at_hop(worker: DummyWorker, hop: int) -> bool:
    known = [len(resume.output_ids[0]) // 2 for resume, _ in resumed(worker)]
    return hop in known if hop else any(RESUME_FIELD not in seen.body for seen in worker.seen)


def test_a_router_keeps_where_kv_waits() -> None:
    record = FrameRecord()
    record.take(begin_frame(BEGUN) + event(1))
    assert record.samples_left() == {0: BEGUN.names[0]} and not record.has_sources()
    assert record.take(HELD_BACK + moved_frame({0: KV})) == b""
    assert record.has_sources()
    by_kv, by_pair = record.resume(by_kv=True), record.resume()
    assert by_kv is not None and msgspec.json.decode(by_kv, type=Resume).sources == [KV]
    assert by_pair is not None and msgspec.json.decode(by_pair, type=Resume).sources == []
    record.restart()
    assert not record.moved and record.samples_left()


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
        await c.first_byte()
        to, at = sorted(c.decodes, key=lambda w: len(w.seen))
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
