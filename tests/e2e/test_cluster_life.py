"""Death of real processes: every request ends, and nothing is left behind. (Their return: tests/tools.)"""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.process.child_process import HTTP_SERVER_VARIABLE, SERVER_VARIABLE
from tests.e2e.client import session
from tests.e2e.cluster import DEAD, SHIPPED, Cluster, child_of, cluster
from tests.e2e.leftovers import Leftovers
from tests.e2e.workload import recall_body
from tools.recall.oracle import continuation

BOUNDED_S = 60.0
GONE_S = 60.0


@contextlib.contextmanager
def up_in(temp: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> Iterator[Cluster]:
    monkeypatch.setenv("TMPDIR", str(temp))
    for variable in (SERVER_VARIABLE, HTTP_SERVER_VARIABLE):  # it has fork servers of its own, which must end with it
        monkeypatch.delenv(variable, raising=False)
    with cluster(temp / "up", "--run-dir", str(temp / "logs"), *args, *SHIPPED) as c:
        yield c


async def test_kill_9_of_the_launcher_leaves_nothing(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process (the guard, which leads a session of its own, ends too), no directory of sockets, no segment of shared
    memory: under load, after a transfer."""
    with up_in(temp, monkeypatch) as c:
        load = await start_load(c.router, count=8, new_tokens=20_000)
        traces = Leftovers(c.launcher.pid, temp)
        c.launcher.kill()
        assert set(await load) == {"cut"}
        c.launcher.wait()
        traces.assert_gone(within_s=GONE_S)


@pytest.mark.slow  # `make test` kills children in tests/tools/test_matrix.py
async def test_kill_9_of_one_child_after_the_other_leaves_nothing(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker as a whole, a child of a worker, the router: of each nothing stays, while the others go on; the router
    takes the launcher with it."""
    with up_in(temp, monkeypatch, DEAD) as c:
        load = await start_load(c.router, count=8, new_tokens=20_000)
        whole = Leftovers(c.launcher.pid, temp)
        (router,) = [p for p in whole.family if "router" in p.cmdline()]
        prefill, decode = (Leftovers(c.of(role)[0].pid, temp) for role in ("prefill", "decode"))
        for traces, victim in (
            (prefill, prefill.family[0]),
            (decode, child_of(c.of("decode")[0].pid, "scheduler")),
            (Leftovers(router.pid, temp), router),
        ):
            assert c.launcher.poll() is None
            victim.kill()
            await asyncio.to_thread(traces.assert_gone, within_s=BOUNDED_S)
        assert await asyncio.to_thread(c.launcher.wait, BOUNDED_S) == 1  # clients reach nothing any more
        whole.assert_gone(within_s=GONE_S)
        assert set(await load) <= {"cut", "error"}
        said = c.log.read_text()
        assert said.count("the others go on") == 2 and "it stays dead, so all ends" in said


async def start_load(url: str, *, count: int, new_tokens: int) -> "asyncio.Future[list[str]]":
    """Half of them streams; returns once the first tokens have come. The result: how each ended (see `_one`)."""
    begun = asyncio.Event()
    load = asyncio.gather(*(_one(url, i, new_tokens, begun) for i in range(count)))
    await asyncio.wait_for(begun.wait(), BOUNDED_S)
    return load


async def _one(url: str, i: int, new_tokens: int, begun: asyncio.Event) -> str:
    """ "right" or "wrong" (a whole answer), "error" (one that says what happened), "cut" (the connection broke)."""
    body, _ = recall_body(random.Random(i), 250)
    body["sampling_params"] |= {"max_new_tokens": new_tokens, "ignore_eos": True}
    try:
        async with session() as http, http.post(f"{url}/generate", json={**body, "stream": bool(i % 2)}) as response:
            if response.status != 200:
                print(f"request {i}: {response.status}: {await response.text()}")  # pytest shows it where a test fails
                return "error" if (await response.json())["error"]["message"] else "wrong"
            return await _read(response, body, new_tokens, begun)
    except (aiohttp.ClientError, ConnectionError) as error:
        print(f"request {i}: {error!r}")
        return "cut"


async def _read(response: aiohttp.ClientResponse, body: dict[str, Any], new_tokens: int, begun: asyncio.Event) -> str:
    whole = b""
    async for chunk in response.content.iter_any():
        begun.set()
        whole += chunk
    if b'"error"' in whole:
        print(f"a stream ended so: {whole[-1000:]!r}")
        return "error"
    last = whole.decode().strip().removesuffix("data: [DONE]").strip().rpartition("data: ")[2]
    ids = json.loads(last)["output_ids"]
    return (
        "right"
        if len(ids) == new_tokens and ids == continuation(body["input_ids"], new_tokens, ignore_eos=True)
        else "wrong"
    )
