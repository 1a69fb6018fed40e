"""The router in front of dummy workers: what passes, how it is spread, what the router says of itself."""

import asyncio
import json
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from router.client.session import READ_BUFFER_BYTES
from router.config import RouterConfig
from router.pool.worker import RankSizes, Role
from router.server import start_router
from service.flags import ConfigError
from tests.router.behaviours import later, pauses
from tests.router.dummies import CHAT, STREAM, DummyWorker, always, cluster, events_of, until, workers


async def test_both_legs_get_the_body_and_the_client_gets_decodes_answer() -> None:
    async with cluster(info={"disaggregation_bootstrap_port": 8998}) as c:
        headers = {"X-Request-Id": "req-7", "traceparent": "00-1-2-01", "authorization": "Bearer k", "cookie": "no"}
        headers |= {"X-Session-Id": "agent-7"}
        body = {**CHAT, "unknown_field": {"deep": [1, None]}, "bootstrap_room": 3}
        status, got, answer = await c.post("/v1/chat/completions", body, headers=headers)
        assert (status, json.loads(answer)["from"], got["X-Request-ID"]) == (200, "decode-0", "req-7")
        (prefill,), (decode,) = c.prefills[0].seen, c.decodes[0].seen
        assert prefill.body == decode.body
        room = decode.body.pop("bootstrap_room")
        assert 3 < room < 2**63
        del body["bootstrap_room"]
        assert decode.body == {**body, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
        for leg in (prefill, decode):
            assert leg.headers["x-request-id"] == "req-7" and leg.headers["traceparent"] == "00-1-2-01"
            assert leg.headers["x-session-id"] == "agent-7"
            assert leg.headers["authorization"] == "Bearer k" and "cookie" not in leg.headers


async def test_an_answer_longer_than_the_buffer_of_a_stream_comes_whole() -> None:
    """Of either worker: embeddings, or hidden states of a prompt."""
    text = "x" * (3 * READ_BUFFER_BYTES)
    async with cluster(decode=[always(200, {"data": text})], prefill=[always(200, {"data": text})]) as c:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/embeddings", {"input": "hi"})):
            status, _, answer = await c.post(path, body)
            assert (status, json.loads(answer)["data"]) == (200, text), path


async def test_a_request_that_names_a_dp_rank_gets_a_room_of_it() -> None:
    named: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"routed_dp_rank": 2}, {}),
        ({"data_parallel_rank": 2}, {}),
        ({}, {"X-data-parallel-rank": "2"}),
    ]
    async with cluster(info={"disaggregation_bootstrap_port": 8998, "dp_size": 3}) as c:
        for fields, headers in named:
            sampling = {"sampling_params": {"n": 4}}
            status, _, _ = await c.post("/generate", {"text": "a", **sampling, **fields}, headers=headers)
            seen = c.prefills[0].seen[-1]
            assert status == 200 and [room % 3 for room in seen.body["bootstrap_room"]] == [2] * 4
            assert seen.headers.get("x-data-parallel-rank") == headers.get("X-data-parallel-rank")
        status, _, answer = await c.post("/generate", {"text": "a"}, headers={"X-data-parallel-rank": "one"})
        assert status == 400 and "x-data-parallel-rank: must be the number of a DP rank, got 'one'" in answer.decode()
        assert (await c.post("/generate", {"text": "a", "routed_dp_rank": 7}))[0] == 200  # the worker refuses it


async def test_a_worker_of_one_rank_beside_one_of_several_is_not_asked_for_a_rank() -> None:
    async with cluster(info={"disaggregation_bootstrap_port": 8998}) as c:
        several = next(worker for worker in c.router.table.workers() if worker.role is Role.DECODE)
        several.ranks, c.decodes[0].info = RankSizes(dp=4), {"dp_size": 4}
        body = {"text": "a", "routed_dp_rank": 3}
        assert (await c.post("/generate", body, headers={"X-data-parallel-rank": "3"}))[0] == 200
        prefill, decode = c.prefills[0].seen[-1], c.decodes[0].seen[-1]
        assert (decode.body["routed_dp_rank"], decode.headers["x-data-parallel-rank"]) == (3, "3")
        assert "routed_dp_rank" not in prefill.body and "x-data-parallel-rank" not in prefill.headers


async def test_a_request_id_is_minted_and_the_workers_key_replaces_the_clients() -> None:
    async with cluster(worker_api_key="wk", api_key="ck") as c:
        status, _, answer = await c.post("/generate", {"text": "a"})
        assert status == 401 and json.loads(answer)["error"]["type"] == "invalid_request_error"
        status, headers, _ = await c.post("/generate", {"text": "a"}, headers={"Authorization": "Bearer ck"})
        seen = c.decodes[0].seen[0].headers
        assert status == 200 and re.fullmatch("[0-9a-f]{32}", headers["X-Request-ID"])
        assert seen["x-request-id"] == headers["X-Request-ID"] and seen["authorization"] == "Bearer wk"
        assert (await c.get("/health"))[0] == 200


async def test_events_arrive_as_they_are_made() -> None:
    """The client holds event 0 before the worker makes event 1; prefill's late answer delays nothing."""
    go_on, end_prefill = asyncio.Event(), asyncio.Event()
    async with cluster(prefill=[later(end_prefill)], decode=[pauses(go_on)]) as c:
        async with c.client.post(c.url + "/v1/chat/completions", json=STREAM) as response:
            assert response.content_type == "text/event-stream" and response.headers["X-Request-ID"]
            assert await response.content.readuntil(b"\n\n") == b'data: {"i": 0}\n\n'
            go_on.set()
            assert events_of(await response.read()) == [{"i": 1}, "[DONE]"]
        assert "stream" in c.prefills[0].seen[0].body and not c.prefills[0].seen[0].body["stream"]
        assert c.prefills[0].cancelled == 0 and c.router.rooms.num_live == 1
        end_prefill.set()
        await c.settled()
        assert c.prefills[0].cancelled == 0


async def test_plain_mode_passes_bodies_unread() -> None:
    async with cluster(unified=2) as c:
        bodies = [await c.post("/v1/completions", b'{"prompt":  "a","bootstrap_room":1}') for _ in range(4)]
        assert sorted(json.loads(b)["from"] for _, _, b in bodies) == ["null-0", "null-0", "null-1", "null-1"]
        assert c.decodes[0].seen[0].body == {"prompt": "a", "bootstrap_room": 1}
        async with c.client.put(c.url + "/generate", json={"text": "a", "stream": True}) as response:
            assert len(events_of(await response.read())) == 4


async def test_load_that_others_put_on_a_worker_counts() -> None:
    async with cluster(decode=2) as c:
        c.decodes[0].load = {"num_used_tokens": 50_000, "num_waiting_reqs": 0}
        await until(lambda: c.router.table.workers()[1].foreign_tokens == 50_000)
        for _ in range(3):
            await c.post("/generate", {"text": "a"})
        assert [len(w.seen) for w in c.decodes] == [0, 3]


async def test_what_the_router_says_of_itself() -> None:
    async with cluster(prefill=1, decode=2) as c:
        get = c.get
        assert await get("/liveness") == (200, {"status": "alive"})
        assert await get("/readiness") == (200, {"status": "ready", "healthy_workers": 3, "total_workers": 3})
        assert (await get("/v1/models"))[1]["data"][0]["id"] == "decode-0"
        assert (await get("/get_model_info"))[0] == 200
        assert (await get("/get_weight_version")) == (200, {"weight_version": "decode-0"})
        info = (await get("/get_server_info"))[1]
        assert [w["role"] for w in info["workers"]] == ["prefill", "decode", "decode"]
        assert (await get("/workers"))[1]["total"] == 3 and len((await get("/get_loads"))[1]["workers"]) == 3
        assert (await get("/health_generate"))[1]["success"] is True
        status, error = await get("/v1/nowhere")
        assert status == 404 and error["error"]["type"] == "invalid_request_error"
        status, error = await get("/generate")
        assert status == 405 and "does not take GET" in error["error"]["message"]
        assert (await c.post("/flush_cache", b""))[0] == 200
        await c.post("/abort_request", {"rid": "r1"})
        for worker in (*c.prefills, *c.decodes):
            assert ("/flush_cache", "") in worker.calls and ("/abort_request", '{"rid": "r1"}') in worker.calls
        await c.post("/generate", {"text": "a"})
        metrics = (await get("/metrics"))[1]
        assert 'tandem_router_requests_total{path="/generate",status="200"} 1.0' in metrics
        assert f'tandem_router_worker_up{{role="prefill",url="{c.prefills[0].url}"}} 1.0' in metrics


async def test_ready_for_all_workers_means_that_every_one_is_known_as_healthy() -> None:
    async with cluster(prefill=1, decode=2) as c:

        async def all_ready() -> bool:
            return (await c.get("/readiness?workers=all"))[0] == 200

        await until(all_ready)
        c.decodes[1].healthy = False
        await until(lambda: len(c.router.table.alive(Role.DECODE)) == 1)
        status, error = await c.get("/readiness?workers=all")
        assert status == 503
        assert f"1 of 3 workers are not healthy: decode {c.decodes[1].url} is down" in error["error"]["message"]
        assert (await c.get("/readiness"))[0] == 200  # a request would be served
        c.decodes[1].healthy = True
        await until(all_ready)


async def test_workers_join_and_leave_at_run_time() -> None:
    async with cluster() as c, workers(1, mode="decode") as (extra,):
        bad = [
            {"url": extra.url},
            {"url": extra.url, "role": "unified"},
            {"url": "nonsense", "role": "decode"},
            {
                "url": c.decodes[0].url.replace("http", "HTTP") + "/",
                "role": "decode",
            },  # in the table, written otherwise
            {"url": extra.url, "role": "prefill", "bootstrap_port": "x"},
        ]
        for body in bad:
            status, _, answer = await c.post("/workers", body)
            assert status == 400 and json.loads(answer)["error"]["param"] in ("role", "url", "bootstrap_port")
        assert (await c.post("/workers", {"url": extra.url, "worker_type": "decode"}))[0] == 201
        await until(lambda: len(c.router.table.alive(c.router.table.workers()[1].role)) == 2)
        async with c.client.delete(c.url + "/workers", json={"url": c.decodes[0].url}) as response:
            assert response.status == 200
        assert json.loads((await c.post("/generate", {"text": "a"}))[2])["from"] == extra.name
        assert await c.remove(c.decodes[0]) == 400
        shown = {worker["url"]: worker["id"] for worker in (await c.get("/workers"))[1]["workers"]}
        named = (c.decodes[0].url, c.prefills[0].url, shown[extra.url], shown[extra.url])
        assert [await c.remove_by_path(str(one)) for one in named] == [404, 200, 200, 404]
        assert not (await c.get("/workers"))[1]["workers"]


async def test_processes_of_a_router_remove_no_worker_by_an_id_of_one_of_them() -> None:
    async with cluster(workers=2) as c:
        assert [await c.remove_by_path(named) for named in ("1", c.decodes[0].url)] == [400, 200]


async def test_a_unified_worker_never_joins_a_disaggregated_pool() -> None:
    async with workers(1, mode="null") as (one,), workers(1, mode="decode") as (two,):
        config = RouterConfig(pd_disaggregation=True, prefill=((one.url, 7),), decode=(two.url,), port=0)
        async with (
            start_router(config) as router,
            aiohttp.ClientSession() as client,
            client.post(router.url + "/generate", json={"text": "a"}) as response,
        ):
            message = (await response.json())["error"]["message"]
            assert response.status == 503 and "no prefill worker is alive" in message
            assert "--disaggregation-mode null" in message


async def test_a_router_without_workers_says_how_to_name_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with start_router(RouterConfig(port=0)):
            assert "no workers yet: name them by --prefill and --decode" in caplog.text


async def test_a_worker_given_in_the_other_role_serves_as_what_it_says() -> None:
    """It may have changed since the flags were written."""
    async with workers(2, mode="decode") as (one, two):
        config = RouterConfig(pd_disaggregation=True, prefill=((one.url, 7),), decode=(two.url,), port=0)
        async with start_router(config) as router:
            assert [w.url for w in router.table.alive(Role.DECODE)] == [one.url, two.url]
            assert not router.table.workers(Role.PREFILL)


async def test_running_requests_end_well_when_the_router_stops() -> None:
    go_on = asyncio.Event()
    async with workers(1, mode="null") as (worker,), aiohttp.ClientSession() as client:
        worker.behave = later(go_on)
        async with start_router(RouterConfig(worker_urls=(worker.url,), port=0)) as router:
            ask = asyncio.create_task(client.post(router.url + "/generate", json={"stream": True}))
            await until(lambda: worker.seen)
            asyncio.get_running_loop().call_later(0.05, go_on.set)
        assert events_of(await (await ask).read())[-1] == "[DONE]"
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(router.url + "/liveness")


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def scenario() -> None:
            async with start_router(RouterConfig(port=port)):
                raise AssertionError

        with pytest.raises(ConfigError, match=f"--port: 127.0.0.1:{port} is taken"):
            uvloop.run(scenario())


async def test_a_worker_that_is_named_twice_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="http://H:1 is already in the table; name each worker once"):
        async with start_router(RouterConfig(port=0, worker_urls=("http://h:1/", "http://H:1"))):
            raise AssertionError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_router_process_is_ready_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Also shows that it starts without torch, listens though no worker lives, and spares its collector what it has loaded."""
    ready = tmp_path / "ready.json"
    program = (
        "import gc, sys; from router.config import RouterConfig; from router.server import serve\n"
        f"serve(RouterConfig(port=0, worker_urls=('http://127.0.0.1:1',), ready_file={str(ready)!r}))\n"
        "assert 'torch' not in sys.modules and 'engine' not in sys.modules and gc.get_freeze_count() > 10_000"
    )

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
    try:
        await until(ready.exists)
        url = json.loads(ready.read_text())["router"]
        async with aiohttp.ClientSession() as client, client.get(url + "/readiness") as response:
            assert response.status == 503
            assert "no unified worker is alive" in (await response.json())["error"]["message"]
        process.send_signal(number)
        _, stderr = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0 and b"Traceback" not in stderr, stderr.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_workers_join_a_trainer_s_group_with_ranks_of_their_own() -> None:
    """In the order of /workers, each with as many as it has."""
    decodes = [DummyWorker("plain", "decode"), DummyWorker("joint", "decode", info={"enable_dp_attention": True})]
    async with cluster(decode=decodes, info={"tp_size": 2, "dp_size": 2}) as c:
        await until(lambda: c.state(c.decodes[1]).ranks.joint)
        asked = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 11, "group_name": "g"}
        status, _, answer = await c.post("/init_weights_update_group", asked)
        assert status == 200, answer
        seen = [worker.seen[-1].body for worker in (*c.prefills, *c.decodes)]
        assert seen == [{**asked, "rank_offset": offset} for offset in (1, 5, 9)]
        for wrong in ({**asked, "world_size": 12}, {**asked, "rank_offset": "x"}, {}):
            status, _, answer = await c.post("/init_weights_update_group", wrong)
            error = json.loads(answer)["error"]
            assert status == 400 and error["param"] == "world_size", error
        assert "with 10 ranks of 3 workers from rank 0 on it must be 10" in error["message"]
        assert [len(worker.seen) for worker in (*c.prefills, *c.decodes)] == [1, 1, 1]
        for path in (
            "/update_weights_from_tensor",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
            "/begin_weight_update",
            "/end_weight_update",
            "/update_weight_version",
        ):
            status, _, answer = await c.post(path, {"a": path})
            assert status == 200 and len(json.loads(answer)["workers"]) == 3
            assert all(worker.seen[-1].body == {"a": path} for worker in (*c.prefills, *c.decodes))
