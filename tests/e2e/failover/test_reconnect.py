"""A router is killed under streams, or a connection breaks: clients come again, and have what they would have had.

Real processes. Where they come again is the router's other process, or another router.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.client import session
from tests.e2e.cluster import Started, several, tandem
from tests.e2e.failover.test_failover import BODIES, DELAY_S, KV, SLOW, shown
from tests.e2e.settings import settings
from tools.family import family

WINDOW_S = 3.0
KEYS = {"Authorization": "Bearer one"}


@dataclass
class Cluster:
    workers: list[Started]
    first: Started  # of two processes
    second: Started


@pytest.fixture(scope="module")
def cluster(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("again")
    keys = folder / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    serve = ("serve", "--port", "0", "--model-path", qwen3, *SLOW, *KV)
    with several(folder, {"a": serve, "b": serve}, settings(stream_delay_s=DELAY_S)) as workers:
        urls = [worker.url for worker in workers.values()]
        flags = (
            "router",
            "--port",
            "0",
            "--resume-window",
            str(WINDOW_S),
            "--api-key-file",
            str(keys),
            "--worker-urls",
            *urls,
        )
        with tandem(folder / "r1", *flags, "--workers", "2") as first, tandem(folder / "r2", *flags) as second:
            yield Cluster(list(workers.values()), first, second)


@dataclass
class Client:
    """One stream of events. `stop_after`: events, after which it hangs up; 0: never."""

    path: str
    body: dict[str, Any]
    name: str
    stop_after: int = 0
    events: list[Any] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    done: bool = False
    num_reads: int = 0
    error: dict[str, Any] = field(default_factory=dict)

    async def read(self, url: str, **headers: str) -> int:
        """Go on behind what it has; the status."""
        self.num_reads += 1
        headers = {**KEYS, "X-Request-Id": self.name, **headers}
        if self.ids:
            headers.setdefault("Last-Event-ID", self.ids[-1])
        with suppress(aiohttp.ClientError):
            async with (
                session() as http,
                http.post(url + self.path, json={**self.body, "stream": True}, headers=headers) as got,
            ):
                if got.status != 200:
                    self.error = (await got.json())["error"]
                    return got.status
                await self._read(got)
        return 200

    async def _read(self, got: aiohttp.ClientResponse) -> None:
        """An event counts when it is whole: its id comes last."""
        data = ""
        async for line in got.content:
            text = line.decode().rstrip("\n")
            if text.startswith("data: "):
                data = text[6:]
            elif text.startswith("id: "):
                self.ids.append(text[4:])
            elif text == "" and data == "[DONE]":
                self.done = True
            elif text == "" and data:
                self.events.append(json.loads(data))
                assert "error" not in self.events[-1], data
                data = ""
                if self.stop_after == len(self.events):
                    return


async def until_done(client: Client, first: str, again: str) -> Client:
    """Come again at once, as clients do."""
    await client.read(first)
    while not client.done:
        assert await client.read(again) == 200, client.error
    return client


def clients(name: str) -> list[Client]:
    """(Of all kinds, cut at any byte: tests/frontend/test_going_on.py.)"""
    return [Client(*BODIES[kind], f"{name}-{kind}") for kind in ("native", "chat")]


def serving(router: Started) -> psutil.Process:
    """A process of a router that has a client."""
    port = int(router.url.rpartition(":")[2])
    for process in psutil.Process(router.process.pid).children():
        if any(c.laddr.port == port and c.status == "ESTABLISHED" for c in process.net_connections("tcp")):
            return process
    raise AssertionError("no process serves anything")


async def test_streams_go_on_where_their_clients_come_again(cluster: Cluster) -> None:
    """A router is killed, one process of several or the only one's clients go to another; or connections break again and again."""
    calm = await asyncio.gather(*(until_done(client, cluster.second.url, "") for client in clients("calm")))
    right = [shown(client.events) for client in calm]
    for again in (cluster.first.url, cluster.second.url):
        asked = clients(again[-5:])
        running = [asyncio.ensure_future(until_done(client, cluster.first.url, again)) for client in asked]
        while min(len(client.events) for client in asked) < 5:
            await asyncio.sleep(0.005)
        serving(cluster.first).kill()
        await asyncio.gather(*running)
        assert [shown(client.events) for client in asked] == right
        assert sum(client.num_reads for client in asked) > len(asked)
        assert all(len(client.ids) == len(set(client.ids)) == len(client.events) for client in asked)
    asked = await asyncio.gather(*(hang_up_often(client, cluster.second.url) for client in clients("broken")))
    assert [shown(client.events) for client in asked] == right


async def hang_up_often(client: Client, url: str) -> Client:
    for client.stop_after in (1, 2, 3, 40, 41, 0):
        assert await client.read(url) == 200, client.error
    assert client.done
    return client


async def test_the_rest_is_for_the_same_key_and_request_and_within_the_window(cluster: Cluster) -> None:
    (client, *_) = clients("mine")
    client.stop_after = 5
    await client.read(cluster.second.url)
    assert await client.read(cluster.second.url, Authorization="Bearer two") == 410
    assert "no worker keeps it for this API key" in client.error["message"] and client.error["code"] == "stream_gone"
    assert await client.read(cluster.second.url, **{"X-Request-Id": "another"}) == 410
    client.body = {**client.body, "text": "another"}
    assert await client.read(cluster.second.url) == 410
    (client, *_) = clients("late")
    client.stop_after = 5
    await client.read(cluster.second.url)
    while await kept(cluster):
        await asyncio.sleep(0.05)
    assert await client.read(cluster.second.url) == 410 and f"{WINDOW_S:g} s" in client.error["message"]


async def kept(cluster: Cluster) -> int:
    """Streams that workers keep."""
    found = 0
    async with session() as http:
        for worker in cluster.workers:
            async with http.get(f"{worker.url}/metrics") as response:
                lines = [
                    line for line in (await response.text()).splitlines() if line.startswith("tandem_kept_streams{")
                ]
                found += int(float(lines[0].split()[-1]))
    return found


async def test_a_stream_whose_worker_is_gone_as_well_is_gone(cluster: Cluster) -> None:
    """It comes last: a worker less."""
    (client, *_) = clients("gone")
    client.stop_after = 5
    await client.read(cluster.second.url)
    for worker in cluster.workers:
        for process in reversed(family(worker.process.pid)):
            process.kill()
    assert await client.read(cluster.second.url) in (410, 503)
