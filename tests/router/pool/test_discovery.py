"""Service discovery of a whole router against a real HTTP watch stream, with real (scripted) workers behind it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from router.compose.router import Router
from router.config import RouterConfig
from router.fleet import PeerProcesses
from router.http.workers_api import describe
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from router.server import start_router
from service.flags import ConfigError
from tests.router.behaviours import later
from tests.router.dummies import DEADLINE_S, DummyWorker, until
from tests.router.pool.kube_server import NAMESPACE, KubeServer, kube_server, pod

PORT = 7001  # of its bootstrap server
LABELS = {role: {"app": "tandem", "role": role.value} for role in (Role.PREFILL, Role.DECODE, Role.ENCODE)}


@dataclass
class Setup:
    kube: KubeServer
    router: Router
    client: aiohttp.ClientSession
    prefill: DummyWorker
    decodes: list[DummyWorker]

    def urls(self, role: Role) -> list[str]:
        """Of those that get requests."""
        return [worker.url for worker in self.router.table.alive(role)]

    async def alive(self, role: Role, *workers: DummyWorker) -> None:
        await until(lambda: sorted(self.urls(role)) == sorted(w.url for w in workers))

    async def show(self, worker: DummyWorker, role: Role, name: str = "", **more: Any) -> None:
        await self.kube.put(pod(name or worker.name, worker.host, labels=LABELS[role], **more))

    async def show_all(self, count: int = 2) -> None:
        await self.show(self.prefill, Role.PREFILL, annotations={"sglang.ai/bootstrap-port": str(PORT)})
        for decode in self.decodes[:count]:
            await self.show(decode, Role.DECODE)

    async def watched(self) -> None:
        await until(lambda: self.kube.num_watching == 2)

    async def generate(self) -> tuple[int, Any]:
        async with self.client.post(self.router.url + "/generate", json={"text": "x"}) as response:
            return response.status, await response.json()

    async def status(self) -> dict[str, Any]:
        async with self.client.get(self.router.url + "/server_info") as response:
            found: dict[str, Any] = (await response.json())["service_discovery"]
            return found


def flags(**more: Any) -> RouterConfig:
    settings: dict[str, Any] = {
        "port": 0,
        "pd_disaggregation": True,
        "service_discovery": True,
        "service_discovery_namespace": NAMESPACE,
        "prefill_selector": ("app=tandem", "role=prefill"),
        "decode_selector": ("app=tandem role=decode",),
        "health_check_interval_s": 0.05,
    }
    return RouterConfig(**(settings | more))


Started = Callable[..., AbstractAsyncContextManager[Setup]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return partial(start, tmp_path / "kubeconfig")


@asynccontextmanager
async def start(config: Path, *, shown: int = 0, **more: Any) -> AsyncIterator[Setup]:
    """An API server, one prefill and two decode workers; the pods of prefill and of `shown` decode workers, or none."""
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(kube_server(config))
        prefill = DummyWorker("prefill-0", "prefill", host="127.0.0.11", info={"disaggregation_bootstrap_port": PORT})
        decodes = [DummyWorker(f"decode-{i}", "decode", host=f"127.0.0.{20 + i}") for i in range(2)]
        rooms = set[int]()
        for worker in (prefill, *decodes):
            worker.port, worker.rooms = prefill.port, rooms  # pods listen on one port, each at its own address
            await worker.start()
            stack.push_async_callback(worker.stop)
        router = await stack.enter_async_context(start_router(flags(service_discovery_port=prefill.port, **more)))
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)))
        setup = Setup(kube, router, client, prefill, decodes)
        if shown:
            await setup.watched()
            await setup.show_all(shown)
            await setup.alive(Role.PREFILL, prefill)
            await setup.alive(Role.DECODE, *decodes[:shown])
        yield setup
        router.table.check()


async def test_pods_that_are_ready_serve_and_a_deleted_one_leaves(started: Started) -> None:
    async with started() as setup:
        await setup.watched()
        assert (await setup.generate())[0] == 503
        first, second = setup.decodes
        await setup.show_all()
        await setup.alive(Role.PREFILL, setup.prefill)
        await setup.alive(Role.DECODE, first, second)
        assert (await setup.generate())[0] == 200
        body = setup.prefill.seen[0].body
        assert (body["bootstrap_host"], body["bootstrap_port"]) == (setup.prefill.host, PORT)
        await setup.kube.delete(first.name)
        await setup.alive(Role.DECODE, second)
        await until(lambda: first.url not in [w.url for w in setup.router.table.workers()])
        assert await setup.status() == {
            "roles": {role: {"synced": True, "pods": 1, "error": None} for role in ("prefill", "decode")},
            "workers": 2,
            "leaving": 0,
            "problems": {},
        }


async def test_a_pod_that_is_being_deleted_finishes_what_it_has(started: Started) -> None:
    async with started(shown=1) as setup:
        first, second = setup.decodes
        go_on = asyncio.Event()
        first.behave = later(go_on)
        running = asyncio.create_task(setup.generate())
        await until(lambda: first.seen)
        await setup.show(second, Role.DECODE)
        await setup.show(first, Role.DECODE, deletionTimestamp="2026-01-01T00:00:00Z")
        await setup.alive(Role.DECODE, second)
        assert (await setup.generate())[1]["from"] == second.name
        await setup.kube.delete(first.name)  # even now its request may end
        assert (await setup.generate())[1]["from"] == second.name
        await setup.kube.delete(second.name)  # it has none: when it is gone the first was looked at, too
        await until(lambda: second.url not in [w.url for w in setup.router.table.workers()])
        assert first.url in [w.url for w in setup.router.table.workers()]
        go_on.set()
        status, answer = await running
        assert (status, answer["from"]) == (200, first.name)
        await until(lambda: first.url not in [w.url for w in setup.router.table.workers()])


async def test_the_last_one_serves_until_its_successor_was_checked(started: Started) -> None:
    """A Deployment deletes the old pod in the moment that the new one is Ready; we have not asked that one yet."""
    async with started(shown=1) as setup:
        first, second = setup.decodes
        second.healthy = False
        await setup.show(second, Role.DECODE)
        await setup.show(first, Role.DECODE, deletionTimestamp="2026-01-01T00:00:00Z")
        await until(lambda: setup.router.table.workers(Role.DECODE)[0].leaving)
        await setup.kube.put(pod("nobody", "127.0.0.99", labels=LABELS[Role.DECODE]))
        await until(lambda: len(setup.router.table.workers(Role.DECODE)) == 3)
        await setup.kube.delete("nobody")  # when it is gone, those who leave have been looked at
        await until(lambda: len(setup.router.table.workers(Role.DECODE)) == 2)
        assert (await setup.generate())[1]["from"] == first.name
        second.healthy = True
        await setup.alive(Role.DECODE, second)
        await until(lambda: first.url not in [w.url for w in setup.router.table.workers()])


async def test_encoder_workers_are_found_and_leave_by_their_own_labels(started: Started) -> None:
    async with started(encode_selector=("app=tandem", "role=encode")) as setup:
        encoder = DummyWorker("encode-0", "encode", host="127.0.0.30", port=setup.prefill.port)
        encoder.info["image_encoder"] = '{"control": "127.0.0.30:5", "incarnation": "e"}'
        await encoder.start()
        try:
            await until(lambda: setup.kube.num_watching == 3)
            await setup.show_all()
            await setup.show(encoder, Role.ENCODE)
            await setup.alive(Role.ENCODE, encoder)
            await setup.alive(Role.PREFILL, setup.prefill)
            await setup.alive(Role.DECODE, *setup.decodes)
            assert (await setup.status())["roles"]["encode"]["pods"] == 1
            await setup.kube.delete(encoder.name)
            await setup.alive(Role.ENCODE)
            assert (await setup.generate())[0] == 200
        finally:
            await encoder.stop()


async def test_a_long_list_comes_in_pages_and_the_watch_goes_on_from_it(started: Started) -> None:
    async with started() as setup:
        await setup.watched()
        setup.kube.refuse = 503
        setup.kube.cut()
        await until(lambda: setup.kube.num_watching == 0)
        for i in range(4):  # pods that were there before, and never get an address that answers
            await setup.kube.put(pod(f"old-{i}", None, labels=LABELS[Role.DECODE], ready=False))
        await setup.show_all()
        setup.kube.compact()
        setup.kube.lists.clear()
        setup.kube.refuse = None
        await setup.alive(Role.DECODE, *setup.decodes)
        pages = [query.get("continue") for query in setup.kube.lists if "decode" in query["labelSelector"]]
        assert pages == [None, "2", "4"]
        await setup.watched()
        assert {query["resourceVersion"] for query in setup.kube.watches[-2:]} == {str(setup.kube.version)}
        assert all(query["allowWatchBookmarks"] == "true" for query in setup.kube.watches)


async def test_after_a_cut_it_goes_on_from_the_last_bookmark(started: Started) -> None:
    async with started(shown=2) as setup:
        await setup.kube.bookmark()
        mark, lists = setup.kube.version, len(setup.kube.lists)
        setup.kube.compact()  # only the bookmark's version is new enough now
        await setup.kube.say(b'{"type": "MODIFIED", "object": {"metadata": {"na')  # cut in the middle of an event
        await setup.watched()
        seen = len(setup.kube.watches)
        setup.kube.cut()
        await until(lambda: len(setup.kube.watches) >= seen + 2)
        await setup.watched()
        assert {query["resourceVersion"] for query in setup.kube.watches[seen:]} == {str(mark)}
        await setup.kube.delete(setup.decodes[0].name)
        await setup.alive(Role.DECODE, setup.decodes[1])
        assert len(setup.kube.lists) == lists


@pytest.mark.parametrize("way", ["event", "status"])
async def test_an_expired_version_is_listed_anew_and_deleted_pods_leave(started: Started, way: str) -> None:
    async with started(shown=2) as setup:
        lists = len(setup.kube.lists)
        setup.kube.refuse = 410 if way == "status" else 500  # nothing comes through meanwhile
        setup.kube.cut()
        await until(lambda: setup.kube.num_watching == 0)
        await setup.kube.delete(setup.decodes[0].name)
        setup.kube.compact()
        if way == "status":
            await until(lambda: len(setup.kube.lists) > lists)  # 410 alone makes it list
        setup.kube.refuse = None
        await setup.alive(Role.DECODE, setup.decodes[1])
        await setup.watched()
        assert len(setup.kube.lists) >= lists + 2


async def test_junk_between_events_does_no_harm(started: Started) -> None:
    """A line that is no JSON, an event without a pod, a pod with half its fields, two pods at one address."""
    async with started(shown=2) as setup:
        await setup.kube.say(b'{"type": "MODIFIED"}\n{"type": "NEW", "object": {}}\n\n')
        await setup.kube.say(b'{"type": "ADDED", "object": {"metadata": {"name": "half", "resourceVersion": "1"}}}\n')
        await setup.kube.say(b'{"type": "ADDED", "object": {"metadata": {"name": 5}}}\n')
        await setup.show(setup.decodes[0], Role.DECODE, name="twin")
        await setup.kube.put(pod("no-address", None, labels=LABELS[Role.DECODE]))

        async def are_named() -> bool:
            return set((await setup.status())["problems"]) == {f"{NAMESPACE}/twin", f"{NAMESPACE}/no-address"}

        await until(are_named)
        lists = len(setup.kube.lists)
        await setup.kube.say(b"}{ junk\n")
        await until(lambda: len(setup.kube.lists) > lists)  # nothing is trusted after that: listed anew
        await setup.watched()
        assert sorted(setup.urls(Role.DECODE)) == sorted(w.url for w in setup.decodes)
        assert (await setup.generate())[0] == 200
        await setup.kube.delete(setup.decodes[1].name)
        await setup.alive(Role.DECODE, setup.decodes[0])


async def test_a_pod_that_is_relabelled_changes_its_pool(started: Started) -> None:
    async with started(shown=2) as setup:
        moved = setup.decodes[0]
        moved.mode = "prefill"
        await setup.show(moved, Role.PREFILL)
        await setup.alive(Role.PREFILL, setup.prefill, moved)
        await setup.alive(Role.DECODE, setup.decodes[1])


async def test_a_worker_s_reported_role_wins_over_its_label(started: Started) -> None:
    """Neither an event of its pod nor a new list moves it back, or takes it out."""
    async with started(shown=2) as setup:
        mover, kube = setup.decodes[0], setup.kube
        worker = setup.router.table.find(mover.url)
        mover.mode, mover.incarnation = "prefill", "another life"
        await setup.alive(Role.PREFILL, setup.prefill, mover)
        await setup.show(mover, Role.DECODE, annotations={"any": "change"})
        lists = len(kube.lists)
        kube.refuse = 410
        kube.cut()
        await until(lambda: len(kube.lists) > lists)
        kube.refuse = None
        await setup.watched()
        await kube.delete(setup.decodes[1].name)  # what came before this was seen as well
        await setup.alive(Role.DECODE)
        assert setup.router.table.find(mover.url) is worker and not worker.leaving
        await setup.alive(Role.PREFILL, setup.prefill, mover)
        await kube.delete(mover.name)
        await setup.alive(Role.PREFILL, setup.prefill)


async def test_while_the_api_server_refuses_the_pool_stays_and_the_reason_is_said(started: Started) -> None:
    async with started(shown=2) as setup:
        setup.kube.refuse = 403
        watches = len(setup.kube.watches)
        setup.kube.cut()
        await until(lambda: len(setup.kube.watches) >= watches + 2)
        async with asyncio.timeout(DEADLINE_S):
            while (await setup.status())["roles"]["decode"]["synced"]:
                await asyncio.sleep(0.01)
        assert "answers 403" in (await setup.status())["roles"]["decode"]["error"]
        assert "needs get, list and watch" in (await setup.status())["roles"]["decode"]["error"]
        assert (await setup.generate())[0] == 200
        setup.kube.refuse = None
        await setup.watched()


async def test_workers_that_an_admin_named_are_his(started: Started) -> None:
    async with started() as setup:
        await setup.watched()
        by_hand, found = setup.decodes
        workers = setup.router.url + "/workers"
        async with setup.client.post(workers, json={"url": by_hand.url, "role": "decode"}) as response:
            assert response.status == 201
        await setup.show_all()  # one of these pods is there already
        await setup.alive(Role.DECODE, by_hand, found)
        await setup.kube.delete(by_hand.name)
        async with setup.client.delete(workers, params={"url": found.url}) as response:
            assert response.status == 200
        await setup.kube.bookmark()
        await setup.show(setup.prefill, Role.PREFILL)  # another look at everything
        await setup.kube.delete(setup.prefill.name)
        await setup.alive(Role.PREFILL)
        assert setup.urls(Role.DECODE) == [by_hand.url]


async def test_without_an_api_server_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigError, match=r"^--service-discovery: no API server: .*none"):
        async with start_router(flags()):
            raise AssertionError("it started")


async def test_a_process_takes_from_its_peers_only_what_it_does_not_discover_itself() -> None:
    """Else a discovered worker would be somebody's by hand, and stay for ever."""

    class Told(PeerProcesses):
        async def request(self, method: str, path: str, body: Any = None) -> list[bytes]:
            there = WorkerTable()
            there.add("http://by.hand:1", role=Role.DECODE)
            there.add("http://found:1", role=Role.DECODE, discovered=True)
            return [msgspec.json.encode({"workers": [describe(w, {}) for w in there.workers()]})]

    table = WorkerTable()
    await Told(None).catch_up(table, now_s=0.0)
    assert [w.url for w in table.workers()] == ["http://by.hand:1"]
