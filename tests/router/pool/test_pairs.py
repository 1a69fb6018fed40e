"""Workers whose KV layouts differ get no request together."""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from router.choice.policies import make_chooser
from router.config import ChoiceFlags
from router.history.forecast import Forecast
from router.pool.breaker import Check
from router.pool.health_log import MISFITS_EVERY_S, HealthLog
from router.pool.pairs import groups_of, misfits_of
from router.pool.worker import PAIR, Role, Worker
from router.pool.workers import WorkerTable, missing_roles, silent_roles
from router.requests.picking import Picker
from router.requests.route_choice import RouteChooser
from service.kv_layout import Layout, write_layout
from tests.router.attempts import make_request
from tests.router.dummies import CHAT, Cluster, DummyWorker, cluster, table_of, until

A = Layout(14, "nixl", "m", 16, "bfloat16")
B = msgspec.structs.replace(A, page_size=32)
LAYOUTS = {"a": A, "b": B, "-": None}
READY = "/readiness"


def table_with(prefill: str, decode: str) -> WorkerTable:
    """A table of workers with a layout for each letter."""
    table = table_of(roles=[Role.PREFILL] * len(prefill) + [Role.DECODE] * len(decode))
    for worker, letter in zip(table.workers(), prefill + decode, strict=True):
        table.on_layout(worker, LAYOUTS[letter])
    return table


def ids(pools: Sequence[Sequence[Worker]]) -> list[list[int]]:
    return [[w.worker_id for w in pool] for pool in pools]


@pytest.mark.parametrize(
    ("prefill", "decode", "groups"),
    [
        ("aa", "a", [[[0, 1], [2]]]),
        ("--", "-", [[[0, 1], [2]]]),
        ("a", "b", []),
        ("-", "b", [[[0], [1]]]),
        ("a", "ab", [[[0], [1]]]),
        ("ab", "ba", [[[0], [3]], [[1], [2]]]),
        ("ab", "a-", [[[0], [2, 3]], [[1], [3]]]),
        ("a-", "b", [[[1], [2]]]),
        ("a", "", []),
    ],
)
def test_a_group_holds_what_fits(prefill: str, decode: str, groups: list[list[list[int]]]) -> None:
    table = table_with(prefill, decode)
    pools = [table.workers(role) for role in PAIR]
    assert [ids(group) for group in groups_of(pools)] == groups
    assert [ids(group) for group in table.routes(PAIR, "")] == groups
    assert missing_roles(table, [PAIR]) == ([] if groups else [role for role in PAIR if decode or role is Role.DECODE])
    assert [ids(group) for group in table.routes((Role.PREFILL,), "")] == [[list(range(len(prefill)))]], "embeddings"
    inside = {worker_id for group in groups for pool in group for worker_id in pool}
    if prefill and decode:
        assert set(table.misfits) == {w.worker_id for w in table.workers()} - inside
    table.check()


def test_the_reason_names_both_workers_and_the_remedy() -> None:
    table = table_with("a", "b")
    text = (
        "page_size differs: prefill worker http://h0:1 has 16, decode worker http://h1:1 has 32; "
        "start both workers with one --page-size"
    )
    assert table.misfits == {0: text, 1: text}
    table.on_check(table.workers()[1], Check.REFUSED, now_s=1.0)
    assert table.misfits == {}, "a worker without any peer is not at odds with one"


def test_workers_of_other_models_do_not_fit_and_models_have_routes_of_their_own() -> None:
    table = table_with("ab", "ba")
    for worker, name in zip(table.workers(), ("m", "n", "n", "m"), strict=True):
        table.on_models(worker, (name,))
    assert ids(table.routes(PAIR, "m")[0]) == [[0], [3]] and not table.misfits
    table.remove("http://h3:1")
    assert missing_roles(table, [PAIR], "m") == [Role.DECODE] and missing_roles(table, [PAIR]) == []
    assert (
        table.misfits[0] == "model differs: prefill worker http://h0:1 serves 'm', decode worker http://h2:1 serves 'n'"
    )


def test_misfits_compare_one_worker_of_each_layout() -> None:
    """All against all would be millions of pairs."""
    table = table_with("a" * 500, "b" * 500)
    pools = [table.workers(role) for role in PAIR]
    found = misfits_of(*pools)
    assert len(found) == 1000 and all("http://h500:1" in found[i] for i in range(500))


def test_a_pair_of_a_silent_worker_or_an_open_circuit_gives_way_to_another_layout() -> None:
    table = table_with("ab", "ab")
    workers = table.workers()
    table.on_silence(workers[2], True)
    assert silent_roles(table, [PAIR]) == [], "the other pair answers"
    table.on_silence(workers[3], True)
    assert silent_roles(table, [PAIR]) == [Role.DECODE]
    assert table.has_others(workers[0]) is False, "b's decode worker is silent"
    table.on_silence(workers[3], False)
    assert table.has_others(workers[2]), "the other pair may compute it anew"


def test_a_misfit_that_comes_later_repeats_no_line(caplog: pytest.LogCaptureFixture) -> None:
    table = table_with("a", "b")
    lines = HealthLog(table)
    lines.on_round(1.0)
    late = table.add("http://late:1", role=Role.DECODE)
    table.on_layout(late, B)
    table.on_check(late, Check.OK, now_s=1.0)
    lines.on_round(1.0 + MISFITS_EVERY_S)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "http://h1:1" in said[0] and "http://late:1" in said[1]


def picker(table: WorkerTable) -> Picker:
    policies = make_chooser(ChoiceFlags(policy="least_load"), draw=lambda count: 0).policies
    look: Any = None
    return Picker(
        table=table,
        routes=RouteChooser(policies=policies, forecast=Forecast()),
        look_in_time=look,
        wait_s=0.0,
        silence_s=0.0,
        clock=lambda: 0.0,
    )


def test_an_answer_moves_with_its_kv_to_a_worker_of_its_layout() -> None:
    table = table_with("a", "aba")
    _, left, other, alike = table.workers()
    table.loads.charge(alike, 1000)
    request = make_request()
    request.ways = (PAIR,)
    found = picker(table).pick_for_rest(request, but=left)
    assert found is not None and found.worker is alike
    table.on_check(alike, Check.REFUSED, now_s=1.0)
    assert picker(table).pick_for_rest(request, but=left) is None and other.answers


def test_load_decides_between_layouts() -> None:
    table = table_with("ab", "ab")
    request = make_request()
    request.ways = (PAIR,)

    def chosen() -> list[int]:
        return [placement.worker.worker_id for placement in picker(table).pick(request) or ()]

    assert chosen() == [0, 2]
    table.loads.charge(table.workers()[2], 100)
    assert chosen() == [1, 3]
    table.loads.charge(table.workers()[1], 5000)
    assert chosen() == [0, 2]


async def asks(c: Cluster, count: int) -> list[int]:
    return [(await c.post("/v1/chat/completions", CHAT))[0] for _ in range(count)]


def naming(*layouts: Layout | None, mode: str) -> list[DummyWorker]:
    found = [DummyWorker(f"{mode}{i}", mode) for i in range(len(layouts))]
    for worker, layout in zip(found, layouts, strict=True):
        worker.info = {} if layout is None else {"kv_layout": write_layout(layout)}
    return found


def at_odds(prefill: Sequence[Layout | None], decode: Sequence[Layout | None], **flags: Any) -> Any:
    """A cluster whose workers name these layouts."""
    return cluster(prefill=naming(*prefill, mode="prefill"), decode=naming(*decode, mode="decode"), **flags)


async def test_a_pair_that_does_not_fit_is_not_ready_and_one_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with at_odds([A], [B]) as c:
            prefill, decode = c.prefills[0], c.decodes[0]
            why = f"page_size differs: prefill worker {prefill.url} has 16, decode worker {decode.url} has 32"
            for path in (READY, "/health", "/ping"):
                status, answer = await c.get(path)
                assert status == 503 and why in answer["error"]["message"], answer
            listed = (await c.get("/workers"))[1]["workers"]
            assert all(w["is_healthy"] and why in w["incompatible"] for w in listed)
            cards = (await c.get("/dashboard/state"))[1]["workers"]
            assert [w["health"] for w in cards] == ["incompatible"] * 2 and why in cards[0]["error"]
            assert await asks(c, 3) == [503] * 3 and not prefill.seen and not decode.seen
            await until(lambda: prefill.num_checks > 6)
            assert caplog.text.count(why) == 1 and "--page-size" in caplog.text
            decode.info = {"kv_layout": write_layout(A)}
            decode.incarnation = "again"  # restarted with the right flag
            await until(lambda: not c.router.table.misfits)
            assert (await c.get(READY))[0] == 200 and await asks(c, 1) == [200]
            assert (await c.get("/workers"))[1]["workers"][0]["incompatible"] is None
            await until(lambda: f"decode worker {decode.url} has a peer that fits" in caplog.text)


async def test_requests_go_only_to_the_pairs_that_fit() -> None:
    async with at_odds([A, A], [A, B]) as c:
        status, ready = await c.get("/health")
        assert status == 200 and ready["incompatible"] == [c.decodes[1].url]
        status, waits = await c.get(f"{READY}?workers=all")
        assert status == 503 and "page_size differs" in waits["error"]["message"]
        assert await asks(c, 6) == [200] * 6
        assert len(c.decodes[0].seen) == 6 and not c.decodes[1].seen


@pytest.mark.parametrize("slo", [False, True])
async def test_both_versions_of_a_rolling_update_serve_each_with_its_own(slo: bool) -> None:
    async with at_odds([A, B], [B, A]) as c:
        headers = {"x-slo-ttft-ms": "60000"} if slo else {}
        for _ in range(12):
            assert (await c.post("/v1/chat/completions", CHAT, headers=headers))[0] == 200
        rooms = [{seen.body["bootstrap_room"] for seen in w.seen} for w in (*c.prefills, *c.decodes)]
        assert rooms[0] == rooms[3] and rooms[1] == rooms[2] and min(map(len, rooms)) > 2
        assert "incompatible" not in (await c.get("/health"))[1]


async def test_a_failed_pair_is_retried_with_the_other_version() -> None:
    async with at_odds([A, B], [A, B], retry_backoff_s=0.0) as c:
        await c.decodes[0].stop()
        assert await asks(c, 4) == [200] * 4
        assert len(c.decodes[1].seen) == 4 and all(seen for seen in c.prefills[1].seen)


async def test_workers_that_name_no_layout_fit_all() -> None:
    async with at_odds([None], [A, B, None]) as c:
        assert (await c.get(READY))[0] == 200 and await asks(c, 9) == [200] * 9
        assert all(w.seen for w in c.decodes)


async def test_a_unified_worker_serves_beside_a_pair_that_does_not_fit() -> None:
    async with at_odds([A], [B], unified_beside=1) as c:
        status, ready = await c.get("/health")
        assert status == 200 and len(ready["incompatible"]) == 2
        assert await asks(c, 4) == [200] * 4
        assert len(c.alone[0].seen) == 4 and not c.prefills[0].seen
