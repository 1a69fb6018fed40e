"""GET /traces/ID: a client sees where its own request went, and no other client's."""

import json
import time
from typing import Any

from aiohttp import web

from service.security.keys import bearer
from tests.router.dummies import STREAM, Behaviour, Cluster, DummyWorker, answer_ok, cluster, key_file

PATH = "/v1/chat/completions"


def keeps(process: str) -> Behaviour:
    """Answers, and keeps the times of its first request."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path != "/traces":
            return await answer_ok(worker, request, body)
        now_s = time.time()
        room = str(worker.seen[0].body["bootstrap_room"])
        span = {"name": process, "start_s": now_s, "end_s": now_s + 0.5}
        record = {"request_id": body["ids"][0], "process": process, "operation": "chat", "spans": [span]}
        record |= {"start_s": now_s, "end_s": now_s + 1, "attributes": {"tandem.bootstrap_room": room}}
        return web.json_response({"records": [record]})

    return behave


async def send(c: Cluster, request_id: str, key: str = "") -> None:
    headers = {"X-Request-Id": request_id, **(bearer(key) if key else {})}
    assert (await c.post(PATH, STREAM, headers=headers))[0] == 200
    await c.settled()


async def test_a_request_is_found_with_its_two_workers_and_what_they_kept() -> None:
    async with cluster(prefill=2, decode=2) as c:
        for worker in (*c.prefills, *c.decodes):
            worker.behave = keeps(worker.mode)
        await send(c, "mine")
        status, found = await c.get("/traces/mine")
        assert status == 200
        (attempt,) = found["record"]["attempts"]
        assert attempt["prefill"] in [w.url for w in c.prefills] and attempt["answering"] in [w.url for w in c.decodes]
        assert {part["url"]: part["process"] for part in found["workers"]} == {
            attempt["prefill"]: "prefill",
            attempt["answering"]: "decode",
        }
        assert found["record"]["started_s"] < found["record"]["ended_s"] < found["now_s"]
        assert abs(found["wall_s"] - time.time()) < 60


async def test_a_client_sees_its_own_requests_and_an_admin_all(tmp_path: Any) -> None:
    async with cluster(api_key_file=key_file(tmp_path, "alice", "bob"), admin_api_key="admin") as c:
        await send(c, "a", "alice")
        await send(c, "b", "bob")
        for key, statuses in (("alice", (200, 404)), ("bob", (404, 200)), ("admin", (200, 200)), ("eve", (401, 401))):
            for name, status in zip("ab", statuses, strict=True):
                assert (await c.get(f"/traces/{name}", **bearer(key)))[0] == status, (key, name)
        assert (await c.get("/traces/a"))[0] == 401
        status, said = await c.get("/traces/b", **bearer("alice"))
        assert "bob" not in json.dumps(said) and said["error"]["message"].startswith("no request b of this key")


async def test_of_one_name_the_caller_s_last_is_meant(tmp_path: Any) -> None:
    async with cluster(api_key_file=key_file(tmp_path, "alice", "bob"), admin_api_key="admin") as c:
        for key in ("alice", "alice", "bob"):
            await send(c, "same", key)
        _, second, third = [record.key for record in c.router.recorder.snapshot().records]
        for key, meant in (("alice", second), ("bob", third), ("admin", third)):
            assert (await c.get("/traces/same", **bearer(key)))[1]["record"]["key"] == meant


async def test_what_a_worker_kept_of_another_client_s_request_of_that_name_stays_there(tmp_path: Any) -> None:
    async with cluster(api_key_file=key_file(tmp_path, "alice", "bob"), admin_api_key="admin") as c:
        for worker in (*c.prefills, *c.decodes):
            worker.behave = keeps(worker.mode)
        await send(c, "same", "alice")
        assert len((await c.get("/traces/same", **bearer("alice")))[1]["workers"]) == 2
        await send(c, "same", "bob")
        assert (await c.get("/traces/same", **bearer("bob")))[1]["workers"] == []


async def test_a_long_name_is_found_too() -> None:
    async with cluster() as c:
        name = "x" * 200
        await send(c, name)
        assert (await c.get(f"/traces/{name}"))[0] == 200
        assert (await c.get("/traces/unknown"))[0] == 404
