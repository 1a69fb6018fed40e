"""Several models behind one router: who serves what, and where a request goes."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from router.pool.breaker import Health
from router.pool.worker import Role
from router.pool.workers import Catalogue, UnknownModel, WorkerTable, parse_event_names, parse_models, serves
from tests.router.dummies import CHAT, Cluster, DummyWorker, cluster, until


def test_one_model_is_the_workers_affair() -> None:
    one = Catalogue.of([("a", "/models/a"), (), ("a", "lora")])
    assert one.bases == ("a",) and one.names == ("a", "/models/a", "lora") and not one.several
    assert one.meant("") == "" and one.meant("unheard") == ""
    assert one.meant("lora") == "lora", "only some have it"


def test_of_several_the_request_says_which() -> None:
    two = Catalogue.of([("a", "lora"), ("b",)])
    assert two.meant("b") == "b" and two.meant("lora") == "lora"
    with pytest.raises(UnknownModel, match="'c' is not served here; there are: a, lora, b"):
        two.meant("c")
    assert two.meant("") == "a" and two.meant("", ["b"]) == "b", "who names none gets the first that can answer"
    assert serves((), "x") and serves(("a",), "a") and not serves(("a",), "b")


@pytest.mark.parametrize(
    ("info", "listed", "names"),
    [
        ({"served_model_name": "a", "model_path": "/m/a"}, None, ("a", "/m/a")),
        ({"model_path": "/m/a", "served_model_name": None}, None, ("/m/a",)),
        ({"served_model_name": "a"}, {"data": [{"id": "a"}, {"id": "lora"}, {"id": 7}, 3]}, ("a", "lora")),
        (None, {"data": [{"id": "a"}]}, ("a",)),
        ({"served_model_name": 5}, {"data": {}}, ()),
        ([], [], ()),
    ],
)
def test_what_workers_say_of_their_models(info: object, listed: object, names: tuple[str, ...]) -> None:
    assert parse_models(info, listed) == names


async def name_models(c: Cluster) -> None:
    """Of each pair of workers of a role the first serves "a", the other one "b"."""
    for worker, name in zip((*c.prefills, *c.decodes), "abab", strict=False):
        worker.info["served_model_name"] = name
    c.router.monitor.refresh()
    await known(c, "a", "b")


async def known(c: Cluster, *names: str) -> None:
    await until(lambda: set(c.router.table.models.names) == set(names))


def seen(worker: DummyWorker) -> list[Any]:
    return [s.body.get("model") for s in worker.seen]


async def test_each_model_has_its_pools() -> None:
    async with cluster(prefill=2, decode=2) as c:
        await name_models(c)
        for model in ("a", "b", "b", "a", "b"):
            status, _, answer = await c.post("/v1/chat/completions", {**CHAT, "model": model})
            assert status == 200, answer
        assert seen(c.prefills[0]) == seen(c.decodes[0]) == ["a", "a"]
        assert seen(c.prefills[1]) == seen(c.decodes[1]) == ["b", "b", "b"]
        status, _, answer = await c.post("/v1/chat/completions", {**CHAT, "model": "c"})
        error = json.loads(answer)["error"]
        assert status == 404 and error["code"] == "model_not_found" and error["param"] == "model"
        assert "there are: a, b" in error["message"]
        await c.post("/generate", {"text": "x"})  # names none: both legs go to one model's workers
        assert len(c.prefills[0].seen) == len(c.decodes[0].seen) == 3


async def test_a_model_without_workers_is_a_503_of_its_own_and_the_other_is_served() -> None:
    async with cluster(prefill=2, decode=2) as c:
        await name_models(c)
        await c.decodes[0].stop()
        await until(lambda: c.router.table.workers()[2].health is Health.DOWN)
        status, headers, answer = await c.post("/v1/chat/completions", {**CHAT, "model": "a"})
        assert status == 503 and "Retry-After" in headers
        assert "no decode worker for model 'a' is alive" in json.loads(answer)["error"]["message"]
        assert (await c.post("/v1/chat/completions", {**CHAT, "model": "b"}))[0] == 200
        assert (await c.post("/generate", {"text": "x"}))[0] == 200, "who names none gets what is there"
        assert len(c.decodes[1].seen) == 2


async def test_all_models_are_listed_and_each_is_described_by_one_that_serves_it() -> None:
    async with cluster(unified=2) as c:
        for worker, name in zip(c.decodes, ("a", "b"), strict=True):
            worker.info["served_model_name"] = worker.name = name
        c.router.monitor.refresh()
        await known(c, "a", "b")
        assert [row["id"] for row in (await c.get("/v1/models"))[1]["data"]] == ["a", "b"]
        assert (await c.get("/v1/models/b"))[1]["from"] == "b"
        status, answer = await c.get("/v1/models/c")
        assert status == 404 and "there are: a, b" in answer["error"]["message"]


async def test_an_adapter_leads_to_the_workers_that_have_it() -> None:
    async with cluster(unified=3) as c:
        for worker in c.decodes:
            worker.info |= {"served_model_name": "base", "enable_lora": True}
            worker.name = "base"  # in /v1/models
        c.decodes[1].name = "lora"
        c.router.monitor.refresh()
        await known(c, "base", "lora")
        for _ in range(3):
            assert (await c.post("/v1/chat/completions", {**CHAT, "model": "lora"}))[0] == 200
        assert [len(w.seen) for w in c.decodes] == [0, 3, 0]
        await asyncio.gather(*(c.post("/v1/chat/completions", {**CHAT, "model": "base"}) for _ in range(3)))
        assert all(len(w.seen) > 0 for w in c.decodes)
        # Loaded through the router, a name is known at once: workers are asked anew, not ten seconds later.
        c.decodes[2].name = "lora2"
        assert (await c.post("/load_lora_adapter", {"lora_name": "lora2"}))[0] == 200
        await known(c, "base", "lora", "lora2")


async def test_an_adapter_is_loaded_and_unloaded_at_the_workers_of_its_model_alone() -> None:
    async with cluster(prefill=2, decode=2) as c:
        await name_models(c)
        load = {"lora_name": "tuned", "lora_path": "/x"}
        status, _, answer = await c.post("/load_lora_adapter", load)
        error = json.loads(answer)["error"]
        assert status == 400 and error["param"] == "model" and "there are: a, b" in error["message"]
        status, _, answer = await c.post("/load_lora_adapter", {**load, "model": "c"})
        assert status == 404 and "there are: a, b" in json.loads(answer)["error"]["message"]
        assert not any(w.seen for w in (*c.prefills, *c.decodes))
        for worker in (c.prefills[1], c.decodes[1]):
            worker.info["enable_lora"], worker.name = True, "tuned"  # in /v1/models, once it is loaded
        status, _, answer = await c.post("/load_lora_adapter", {**load, "model": "b"})
        assert status == 200, answer
        for worker in (c.prefills[1], c.decodes[1]):
            assert [s.body for s in worker.seen] == [load]
        await known(c, "a", "b", "tuned")
        assert (await c.post("/unload_lora_adapter", {"lora_name": "tuned"}))[0] == 200
        assert (await c.post("/unload_lora_adapter", {"lora_name": "other"}))[0] == 404
        assert not c.prefills[0].seen and not c.decodes[0].seen
        assert [len(w.seen) for w in (c.prefills[1], c.decodes[1])] == [2, 2]


async def test_an_adapter_of_a_model_whose_workers_are_dead_is_a_503() -> None:
    async with cluster(unified=2) as c:
        await name_models(c)
        await c.decodes[0].stop()
        await until(lambda: c.router.table.workers()[0].health is Health.DOWN)
        status, _, answer = await c.post("/load_lora_adapter", {"lora_name": "x", "lora_path": "/x", "model": "a"})
        assert status == 503 and "for model 'a' is alive" in json.loads(answer)["error"]["message"]
        assert not c.decodes[1].seen


def test_an_adapter_has_a_name_in_events_while_its_workers_agree() -> None:
    rows = [{"id": "a", "parent": None}, {"id": "law", "parent": "a"}, {"id": "sql", "parent": "a"}]
    one = parse_event_names({"adapters": {"law": "digest", "gone": "x"}}, {"data": rows})
    assert one == {"law": "digest", "sql": "sql"}
    assert parse_event_names(None, {"data": rows[:2]}) == parse_event_names({"adapters": 5}, {"data": rows[:2]})
    table = WorkerTable()
    workers = [table.add(f"http://w{i}:1", role=Role.UNIFIED) for i in range(3)]
    for worker in workers:
        table.on_models(worker, ("a", "law", "sql"), one)
    assert table.models.event_names == one
    table.on_models(workers[1], ("a", "law", "sql"), {**one, "law": "loaded again, from other weights"})
    assert table.models.event_names == {"law": "law", "sql": "sql"}
    table.on_models(workers[1], ("a",))
    assert table.models.event_names == one


def test_which_workers_an_adapter_belongs_to() -> None:
    nobody, one, two = Catalogue(), Catalogue.of([("a", "tuned")]), Catalogue.of([("a", "tuned"), ("b",)])
    assert nobody.of_adapter(model="any", adapter="x", loads=True) == ""
    assert (
        one.of_adapter(model=None, adapter="x", loads=True)
        == one.of_adapter(model=None, adapter="x", loads=False)
        == ""
    )
    assert one.of_adapter(model="a", adapter="x", loads=True) == "a"
    assert two.of_adapter(model=None, adapter="tuned", loads=False) == "a", "all workers of the model that has it"
    both = Catalogue.of([("a", "tuned"), ("b", "tuned"), ("c",)])
    with pytest.raises(ValueError, match=r"there are: a, b$"):
        both.of_adapter(model=None, adapter="tuned", loads=False)
    with pytest.raises(ValueError, match="model: must be"):
        two.of_adapter(model=7, adapter="x", loads=True)
    with pytest.raises(UnknownModel, match="'x' is not served here; there are: a, tuned, b"):
        two.of_adapter(model=None, adapter="x", loads=False)


async def test_a_web_server_that_is_no_worker_never_gets_a_request() -> None:
    """It answers 200 to everything, as many do."""

    async def page(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    server = web.ServerRunner(web.Server(page))
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    try:
        async with cluster(unified=1) as c:
            assert (await c.post("/workers", {"url": url}))[0] == 201
            stranger = c.router.table.workers()[1]
            await until(lambda: stranger.checks.error != "not checked yet")
            assert stranger.health is Health.STARTING and "is this URL a worker's?" in stranger.checks.error
            for _ in range(4):
                assert (await c.post("/generate", {"text": "x"}))[0] == 200
            assert len(c.decodes[0].seen) == 4
    finally:
        await server.cleanup()
