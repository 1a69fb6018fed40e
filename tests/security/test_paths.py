"""Paths that mean another one: a router checks the key of what its workers would serve, and a name stays a name on its way."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.conftest import Worker, start_worker
from tests.hostile.doors import Answer, ask
from tests.hostile.table import Call
from tests.router.dummies import cluster

KEYS: dict[str, Any] = {"api_key": "client", "admin_api_key": "r00t-key"}
# Places whose rest is a name, and ways from there to another path.
NAMED = ("/v1/models/", "/v1/responses/", "/traces/", "/dashboard/requests/")
WAYS = ("../", "%2e%2e/", ".%2E/", "..%2f", "..\\", "..%5C", "x/../../", "./../", "%2f..%2f..%2f", "//../")
ADMINS = ("flush_cache", "check")  # of a worker: GET
AUTHORIZED = ((b"Authorization", b"Bearer client"),)


def targets(to: str) -> dict[str, bytes]:
    """Ways to `to`, a path of one segment."""
    return {f"{place}{way}": f"{place}{way * 3}{to}".encode() for place in NAMED for way in WAYS}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("keyed"), server=KEYS) as started:
        yield started


async def test_no_way_through_a_name_leads_to_a_worker_s_other_routes() -> None:
    """The workers have no keys: what reaches them is served."""
    async with cluster(**KEYS) as c:
        for to, status in {"flush_cache": 403, "check": 404, "server_info": 200}.items():
            for way, target in targets(to).items():
                answer = await _ask(c.url, target)
                assert answer.status == status, (way, to, answer)
                assert to != "server_info" or b"router_manager" in answer.body, (way, answer)
        assert {path for worker in (*c.prefills, *c.decodes) for path, _ in worker.calls} <= {"/v1/models"}


async def test_a_name_is_one_segment_on_its_way_to_a_worker() -> None:
    async with cluster() as c:
        for target in (b"org/name", b"org%2Fname", b"/org//name/", b"x/../org/name"):
            answer = await _ask(c.url, b"/v1/models/" + target)
            assert json.loads(answer.body)["sent_as"] == "/v1/models/org%2Fname"
        answer = await _ask(c.url, b"/v1/models/%252e%252e%252fflush_cache?x=../y")
        assert json.loads(answer.body)["sent_as"] == "/v1/models/%252e%252e%252fflush_cache"


def test_a_worker_serves_each_path_in_one_form(worker: Worker) -> None:
    for to in ADMINS:
        for way, target in targets(to).items():
            answer = ask(worker.url, Call(b"GET", target, headers=AUTHORIZED))
            assert answer.status == 403 and b"admin_key_needed" in answer.body, (way, to, answer)
    for target in (b"/v1%2fmodels", b"/v1/models/%2e/tiny", b"//v1/models//tiny/", b"/v1\\models"):
        assert ask(worker.url, Call(b"GET", target, headers=AUTHORIZED)).status == 200
        assert ask(worker.url, Call(b"GET", target)).status == 401


def test_an_open_path_is_no_way_to_one_that_needs_a_key(worker: Worker) -> None:
    for target in (b"/health/../v1/models", b"/health/%2e%2e/server_info", b"/metrics/..%2fserver_info"):
        assert ask(worker.url, Call(b"GET", target)).status == 401


async def _ask(url: str, target: bytes) -> Answer:
    return await asyncio.to_thread(ask, url, Call(b"GET", target, headers=AUTHORIZED))
