"""Encoder workers: the choice of one for each image, the header that names them, their load, and their trouble, which fails no request."""

import json
from collections import Counter
from typing import Any

import pytest

from router.attempts.pair_attempt import PairAttempt
from router.body import TOKENS_PER_IMAGE
from router.choice.policies import Placement
from router.parts.encoders import SLACK_TOKENS, Encoders, choose_encoders
from router.pool.breaker import Check
from router.pool.reports import parse_encoder, parse_load
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from service.http.image_encoders import ENCODERS_HEADER, ImageEncoder, read_header
from service.images.bodies import data_url
from tests.images.hosts import PNG
from tests.router.attempts import Launched, make_request
from tests.router.behaviours import hang
from tests.router.dummies import SECRET as ROUTERS
from tests.router.dummies import Cluster, DummyWorker, always, answer_ok, cluster, table_of, until

SECRET = b"only this cluster knows it"
PATH = "/v1/chat/completions"
HEADER = ENCODERS_HEADER.lower()
IMAGES = [f"sha256:{i:x}" for i in range(200)]


def names(table: WorkerTable, digests: list[str], *, model: str = "") -> list[str]:
    chosen = choose_encoders(digests, table.pool(Role.ENCODE, model))
    return [chosen[digest].worker.url for digest in digests]


def owners(table: WorkerTable) -> list[str]:
    """Of each image, in a request of its own."""
    return [names(table, [digest])[0] for digest in IMAGES]


def test_an_image_goes_to_the_same_worker_in_every_router() -> None:
    one, other = table_of(4, role=Role.ENCODE), table_of(5, role=Role.ENCODE)
    other.remove("http://h4:1")
    assert owners(one) == owners(other) == owners(one)
    assert min(Counter(owners(one)).values()) > len(IMAGES) / 8


def test_a_worker_that_leaves_moves_its_own_images_alone() -> None:
    table = table_of(4, role=Role.ENCODE)
    before = owners(table)
    table.remove("http://h2:1")
    after = owners(table)
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "http://h2:1")
    assert "http://h2:1" not in after


@pytest.mark.parametrize("by", ["own", "report"])
def test_while_its_worker_is_busy_the_least_loaded_takes_an_image(by: str) -> None:
    table = table_of(3, role=Role.ENCODE)
    url = names(table, IMAGES[:1])[0]
    owner = table.find(url)
    busy, idle = [worker for worker in table.workers() if worker is not owner]
    table.loads.charge(busy, TOKENS_PER_IMAGE)

    def load(tokens: int) -> None:
        if by == "own":
            table.loads.charge(owner, tokens)
        else:
            table.loads.on_report(owner, LoadReport(waiting_tokens=owner.foreign_tokens + tokens))

    load(SLACK_TOKENS)
    assert names(table, IMAGES[:1]) == [url]
    load(1)
    choice = choose_encoders(IMAGES[:1], table.pool(Role.ENCODE, ""))[IMAGES[0]]
    assert choice.worker is idle and not choice.is_owner


def test_many_images_of_a_request_are_shared_out() -> None:
    table = table_of(4, role=Role.ENCODE)
    shares = Counter(names(table, IMAGES))
    assert len(shares) == 4 and (max(shares.values()) - min(shares.values())) * TOKENS_PER_IMAGE <= (
        SLACK_TOKENS + TOKENS_PER_IMAGE
    )
    assert len(set(names(table, IMAGES[:1] * 50))) == 1, "an image that comes again costs nothing"


def test_where_workers_are_is_read_strictly() -> None:
    at = ImageEncoder("10.0.0.1:5", "e")
    assert parse_encoder({"image_encoder": json.dumps({"control": "10.0.0.1:5", "incarnation": "e", "more": 1})}) == at
    for text in (None, 5, "", "[]", '{"control": "a:1"}', '{"control": 5, "incarnation": "e"}', "[" * 9000):
        assert parse_encoder({"image_encoder": text}) is None
    for long in ({"control": "a" * 301, "incarnation": "e"}, {"control": "a:1", "incarnation": "e" * 301}):
        assert parse_encoder({"image_encoder": json.dumps(long)}) is None


class Fleet:
    """A pair, a unified worker and encoder workers, all up, without sockets."""

    def __init__(self, count: int = 2) -> None:
        self.launched = Launched()
        self.table = self.launched.table
        self.upstream = self.launched.upstream
        self.pair = self.up(Role.PREFILL, "http://p0"), self.up(Role.DECODE, "http://d0")
        self.alone = self.up(Role.UNIFIED, "http://u0")
        self.encoders = Encoders(table=self.table, secret=SECRET)
        for worker in (*self.pair, self.alone):
            self.encoders.on_info(worker, {"feature_fetch": True})
        self.workers = [self.up(Role.ENCODE, f"http://e{i}") for i in range(count)]
        for worker in self.workers:
            self.meet(worker)

    def up(self, role: Role, url: str) -> Worker:
        worker = self.launched.worker(role, url)
        self.table.on_check(worker, Check.OK, now_s=0.0)
        return worker

    def meet(self, worker: Worker) -> None:
        named = {"control": worker.url.removeprefix("http://"), "incarnation": "i"}
        self.encoders.on_info(worker, {"image_encoder": json.dumps(named)})

    def send(self, images: list[str], *, alone: bool = False) -> PairAttempt:
        request = make_request()
        request.parts = (self.encoders.part_of(images),) if images else ()
        placements = [Placement(worker) for worker in ((self.alone,) if alone else self.pair)]
        request.headers = {"x": "y"}
        return self.launched.launcher.begin(request, placements)

    def named_to(self, worker: Worker) -> list[str | None] | None:
        """The encoder workers that the last request there names; None: it has no header."""
        headers = [headers for url, headers, _ in self.upstream.sent if url == worker.url][-1]
        assert headers["x"] == "y"
        if ENCODERS_HEADER not in headers:
            return None
        encoders = read_header(headers[ENCODERS_HEADER], SECRET)
        assert encoders is not None
        return [None if one is None else f"http://{one.control}" for one in encoders]

    def loads(self) -> list[tuple[int, int]]:
        return [(worker.inflight_requests, worker.inflight_tokens) for worker in self.workers]


def test_only_the_worker_that_computes_the_prompt_gets_the_source() -> None:
    fleet = Fleet(4)
    wanted = [IMAGES[3], IMAGES[0], IMAGES[3]]
    where = [fleet.send([image]) and fleet.named_to(fleet.pair[0]) for image in wanted]
    fleet.send(wanted)
    assert fleet.named_to(fleet.pair[0]) == [place for (place,) in where if place]
    assert fleet.named_to(fleet.pair[1]) is None
    fleet.send(wanted, alone=True)
    assert fleet.named_to(fleet.alone) == fleet.named_to(fleet.pair[0])
    fleet.send([])
    assert fleet.named_to(fleet.pair[0]) is None


@pytest.mark.parametrize("why", ["none", "down", "silent", "leaving", "no flag"])
def test_without_a_healthy_one_nothing_is_named(why: str) -> None:
    fleet = Fleet(0 if why == "none" else 2)
    for worker in fleet.workers:
        if why == "down":
            fleet.table.on_check(worker, Check.REFUSED, now_s=1.0)
        elif why == "silent":
            fleet.table.on_silence(worker, True)
        elif why == "no flag":
            fleet.encoders.on_info(fleet.pair[0], {"feature_fetch": False})
        else:
            fleet.table.retire(worker.url)
    fleet.send(IMAGES[:2])
    assert fleet.named_to(fleet.pair[0]) is None and fleet.encoders.num_images == {"none": 2}
    assert fleet.loads() == [(0, 0)] * len(fleet.workers)


@pytest.mark.parametrize("why", ["down", "silent"])
def test_an_attempt_names_those_that_are_well_now(why: str) -> None:
    fleet = Fleet(2)
    sick, well = fleet.workers
    fleet.send(IMAGES[:20])
    assert {*(fleet.named_to(fleet.pair[0]) or ())} == {sick.url, well.url}
    if why == "down":
        fleet.table.on_check(sick, Check.REFUSED, now_s=1.0)
    else:
        fleet.table.on_silence(sick, True)
    fleet.send(IMAGES[:20])
    assert fleet.named_to(fleet.pair[0]) == [well.url] * 20


def test_a_worker_is_named_none_that_it_avoids() -> None:
    fleet = Fleet(2)
    late, well = fleet.workers

    def avoid(*workers: Worker) -> None:
        controls = [worker.url.removeprefix("http://") for worker in workers]
        rows = [
            {"num_running_reqs": 0, "disaggregation": {"avoided_encoders": part}} for part in ([], 5, [7, *controls])
        ]
        fleet.table.loads.on_report(fleet.pair[0], parse_load(rows))

    avoid(late)
    fleet.send(IMAGES[:20])
    assert fleet.named_to(fleet.pair[0]) == [well.url] * 20
    fleet.send(IMAGES[:20], alone=True)
    assert len({*(fleet.named_to(fleet.alone) or ())}) == 2, "another one may reach it"
    avoid(late, well)
    fleet.send(IMAGES[:20])
    assert fleet.named_to(fleet.pair[0]) is None
    avoid()
    fleet.send(IMAGES[:20])
    assert len({*(fleet.named_to(fleet.pair[0]) or ())}) == 2


def test_one_that_was_restarted_is_named_once_it_was_asked() -> None:
    fleet = Fleet(1)
    fleet.encoders.on_gone(fleet.workers[0])
    fleet.send(IMAGES[:2])
    assert fleet.named_to(fleet.pair[0]) == [None, None]
    fleet.meet(fleet.workers[0])
    fleet.send(IMAGES[:2])
    assert fleet.named_to(fleet.pair[0]) == [fleet.workers[0].url] * 2


def test_of_several_models_its_own_encoders_are_named_of_one_model_all() -> None:
    fleet = Fleet(2)
    fleet.table.on_models(fleet.workers[0], ("vision", "/models/v"))
    for worker in (*fleet.pair, fleet.workers[1]):
        fleet.table.on_models(worker, ("m", "/models/m"))
    assert fleet.table.models.bases == ("m",), "a client cannot ask for an encoder's model"
    fleet.send(IMAGES[:20])
    assert len({*(fleet.named_to(fleet.pair[0]) or ())}) == 2
    fleet.table.on_models(fleet.alone, ("vision", "/models/v"))
    fleet.send(IMAGES[:20])
    assert fleet.named_to(fleet.pair[0]) == [fleet.workers[1].url] * 20
    fleet.send(IMAGES[:20], alone=True)
    assert fleet.named_to(fleet.alone) == [fleet.workers[0].url] * 20


@pytest.mark.parametrize(
    ("alone", "end"), [(False, "prefill"), (False, "answer"), (False, "end"), (True, "answer"), (True, "end")]
)
def test_their_load_is_given_back_with_the_prompt(alone: bool, end: str) -> None:
    fleet = Fleet(1)
    attempt = fleet.send([IMAGES[0], IMAGES[1], IMAGES[0]], alone=alone)
    assert fleet.loads() == [(1, 2 * TOKENS_PER_IMAGE)]
    first, last = fleet.upstream.replies[0], fleet.upstream.replies[-1]
    if end == "prefill":
        first.answer(200)
    elif end == "answer":
        last.answer(200, complete=not alone, events=alone)
        attempt.begin_answer()
    else:
        attempt.end()
    assert fleet.loads() == [(0, 0)]
    attempt.end()
    if not alone:
        first.answer(200)
    fleet.launched.check()


def chat(*images: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(PNG + image)}} for image in images]
    return {"model": "m", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]}


def last_named(worker: DummyWorker) -> list[str | None] | None:
    value = worker.seen[-1].headers.get(HEADER)
    encoders = None if value is None else read_header(value, ROUTERS.encode())
    return None if encoders is None else [one and one.incarnation for one in encoders]


async def ask(c: Cluster, *images: bytes) -> None:
    status, _, text = await c.post(PATH, chat(*images))
    assert status == 200, text


@pytest.mark.parametrize("unified", [0, 1])
async def test_equal_images_of_requests_go_to_one_worker(unified: int) -> None:
    async with cluster(unified=unified, encode=3) as c:
        compute = c.decodes[0] if unified else c.prefills[0]
        await ask(c, b"a", b"b", b"a")
        first = last_named(compute)
        assert first is not None and first[0] == first[2] and all(first)
        await ask(c, b"b", b"a")
        assert last_named(compute) == [first[1], first[0]]
        if not unified:
            assert HEADER not in c.decodes[0].seen[-1].headers
        assert all(not worker.seen for worker in c.encoders), "a router sends them no request"
        await c.post(PATH, {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        assert HEADER not in compute.seen[-1].headers
        await c.settled()
        assert 'tandem_router_images_total{encoder="owner"} 5.0' in await c.metrics()


async def test_a_retry_names_those_that_live() -> None:
    async with cluster(encode=2) as c:
        sick, prefill, images = c.encoders[0], c.prefills[0], [b"%d" % i for i in range(8)]

        async def dies_with_it(worker: DummyWorker, request: Any, body: dict[str, Any]) -> Any:
            await sick.stop()
            await until(lambda: not c.state(sick).answers)
            c.decodes[0].behave = prefill.behave = answer_ok
            return await always(503, {"error": {"message": "it ends"}})(worker, request, body)

        prefill.behave, c.decodes[0].behave = dies_with_it, hang
        await ask(c, *images)
        before, after = [seen.headers[HEADER] for seen in prefill.seen]
        assert {one and one.incarnation for one in read_header(before, ROUTERS.encode()) or ()} == {
            w.name for w in c.encoders
        }
        assert last_named(prefill) == [c.encoders[1].name] * 8 and before != after


async def test_without_any_requests_go_on_and_one_that_comes_back_is_used() -> None:
    async with cluster(encode=1) as c:
        worker = c.encoders[0]
        await worker.stop()
        await until(lambda: not c.state(worker).answers)
        await ask(c, b"a")
        assert last_named(c.prefills[0]) is None
        await worker.start()
        await until(lambda: c.state(worker).answers)
        await ask(c, b"a")
        assert last_named(c.prefills[0]) == [worker.name]
        assert (await c.get("/readiness?workers=all"))[0] == 200
        worker.healthy = False
        await until(lambda: not c.state(worker).answers)
        status, answer = await c.get("/readiness?workers=all")
        assert status == 503 and f"encode {worker.url} is down" in answer["error"]["message"]
        assert (await c.get("/readiness"))[0] == 200


async def test_operators_see_add_and_remove_them() -> None:
    async with cluster(encode=1) as c:
        worker = c.encoders[0]
        worker.load = {"num_waiting_uncached_tokens": 700, "num_waiting_reqs": 2, "num_used_tokens": 9}
        await until(lambda: c.state(worker).report)
        shown = (await c.get("/workers"))[1]["workers"][-1]
        assert (shown["role"], shown["url"], shown["load"]) == ("encode", worker.url, 700)
        assert f'tandem_router_worker_up{{role="encode",url="{worker.url}"}} 1.0' in await c.metrics()
        assert await c.remove(worker) == 200
        await ask(c, b"a")
        assert HEADER not in c.prefills[0].seen[-1].headers
        assert (await c.post("/workers", {"url": worker.url, "role": "encode"}))[0] == 201
        await until(lambda: c.state(worker).answers)
        await ask(c, b"a")
        assert last_named(c.prefills[0]) == [worker.name]
        status, _, text = await c.post("/workers/role", {"url": worker.url, "role": "prefill"})
        assert status == 409 and b"only prefill and decode workers change their role" in text
        status, _, text = await c.post("/workers/role", {"url": c.prefills[0].url, "role": "encode"})
        assert status == 400 and b"must be one of prefill, decode" in text


async def test_calls_to_all_workers_leave_them_out_where_they_have_no_part() -> None:
    async with cluster(encode=1) as c:
        for path, body in (
            ("/flush_cache", {}),
            ("/update_weights_from_disk", {"model_path": "/m"}),
            ("/start_expert_distribution_record", {}),
            ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ):
            status, _, text = await c.post(path, body)
            assert status == 200
            called = [worker["role"] for worker in json.loads(text)["workers"]]
            assert (called == ["prefill", "decode", "encode"]) == (
                path in ("/flush_cache", "/update_weights_from_disk")
            )


async def test_one_that_does_not_say_where_it_is_asked_gets_no_image() -> None:
    async with cluster(info={"feature_fetch": True}) as c:
        other = DummyWorker("old", "encode")
        await other.start()
        try:
            assert (await c.post("/workers", {"url": other.url, "role": "encode"}))[0] == 201
            await until(lambda: "image_encoder" in c.state(other).checks.error)
            await ask(c, b"a")
            assert HEADER not in c.prefills[0].seen[-1].headers
            wrong = {"url": c.prefills[0].url.replace("127.0.0.1", "localhost"), "role": "encode"}
            assert (await c.post("/workers", wrong))[0] == 201
            (worker,) = [w for w in c.router.table.workers() if w.url == wrong["url"]]
            await until(lambda: "was given as one of role encode" in worker.checks.error)
        finally:
            await other.stop()
