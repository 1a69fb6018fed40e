"""A router names the worker that has more of a prompt's prefix, of whatever role, where a fetch is cheaper than to compute it."""

import json
from typing import Any

import pytest

from router.attempts.request import RequestRefused, Slo
from router.choice.policies import CacheAware, LeastLoad, Placement, RoutingHints, make_chooser
from router.choice.prefix_index import PrefixIndex
from router.choice.where import FETCH_BASE_S
from router.config import ChoiceFlags
from router.history.forecast import MIN_POINTS, Forecast
from router.parts.admission import look_in_time, objectives_of
from router.parts.prefix import PrefixHeaders
from router.pool.breaker import Health
from router.pool.reports import parse_prefix_holder
from router.pool.worker import PrefixHolder, Role, Worker
from router.requests.route_choice import Choice, RouteChooser
from service.http.prefix_source import PREFIX_HEADER, PURPOSE, PrefixSourceHeader, read_header, write_header
from service.kv_events import BLOCK_TOKENS
from service.security.keys import sign
from tests.router.attempts import Launched, make_request
from tests.router.dummies import no_draw

SECRET = b"only this cluster knows it"
KEYS = [bytes([i]) * 20 for i in range(10)]
TOKEN_BYTES = 100
TOKEN_S = 1e-4  # of a computed token


def info_of(name: str, **changed: object) -> dict[str, object]:
    named = {"control": f"{name}:1", "incarnation": name, "token_bytes": TOKEN_BYTES, **changed}
    return {"prefix_source": json.dumps(named)}


def hints(num_keys: int = len(KEYS)) -> RoutingHints:
    return RoutingHints(prompt_tokens=num_keys * BLOCK_TOKENS + 50, output_tokens=100, keys=KEYS[:num_keys])


class Fleet:
    """Prefill workers p0.. that exchange prefixes, all of which answer; a decode worker d0 that does, too."""

    def __init__(self, count: int = 3) -> None:
        self.launched = Launched()
        self.prefill = [self.launched.worker(Role.PREFILL, f"http://p{i}") for i in range(count)]
        self.decode = self.launched.worker(Role.DECODE, "http://d0")
        for worker in (*self.prefill, self.decode):
            worker.health = Health.UP
            worker.prefix = parse_prefix_holder(info_of(worker.url.removeprefix("http://")))
        chooser = make_chooser(ChoiceFlags(policy="cache_aware"), draw=lambda n: 0)
        assert chooser.index is not None
        self.index: PrefixIndex = chooser.index
        self.forecast = Forecast()
        for worker in self.prefill:
            for i in range(MIN_POINTS):
                self.forecast.line(worker, whole=False).add(100.0 * i, TOKEN_S * 100.0 * i, 0.0)
        table = self.launched.table
        self.routes = RouteChooser(
            policies=chooser.policies, forecast=self.forecast, worker_of=table.get, index=self.index
        )
        self.prefixes = PrefixHeaders(worker_of=table.get, secret=SECRET)
        self.launched.launcher.parts = (self.prefixes.prepare,)

    def has(self, worker: Worker, num_keys: int) -> None:
        self.index.touch(worker.worker_id, KEYS[:num_keys])

    def choose(self, *among: int, num_keys: int = len(KEYS)) -> Choice:
        """A choice among these prefill workers."""
        return self.routes.choose([[[self.prefill[at] for at in among], [self.decode]]], hints(num_keys), 0.0)

    def named(self, chosen: int, *, num_keys: int = len(KEYS)) -> tuple[str, int] | None:
        """(the worker, the tokens) of the source for a request that can only go to `chosen`."""
        source = self.choose(chosen, num_keys=num_keys).placements[0].source
        self.index.forget(self.prefill[chosen].worker_id)
        worker = None if source is None else self.launched.table.get(source.worker_id)
        return None if worker is None or source is None else (worker.url, source.tokens)


def test_the_worker_with_most_of_the_prompt_is_named() -> None:
    fleet = Fleet()
    fleet.index.touch(fleet.decode.worker_id, [b"another"])
    assert fleet.named(0, num_keys=9) is None
    fleet.index.forget(fleet.decode.worker_id)
    fleet.has(fleet.prefill[1], 4)
    fleet.has(fleet.prefill[2], 7)
    assert fleet.named(0) == ("http://p2", 7 * BLOCK_TOKENS)
    fleet.index.forget(fleet.decode.worker_id)
    fleet.has(fleet.prefill[0], 7)
    assert fleet.named(0) is None, "it has as much itself"
    assert fleet.named(0, num_keys=0) is None


def test_a_worker_is_in_time_by_the_pages_that_it_can_fetch() -> None:
    fleet, ask = Fleet(), hints()
    computed_s = TOKEN_S * (ask.prompt_tokens - 9 * BLOCK_TOKENS)
    pages = fleet.routes.with_pages

    def look(ttft_s: float, **more: Any) -> Worker:
        objectives = objectives_of(Slo(ttft_s=ttft_s), Role.PREFILL, ask, fleet.forecast)
        return look_in_time(LeastLoad(no_draw), [fleet.prefill[0]], ask, objectives, now_s=0.0, **more).worker

    with pytest.raises(RequestRefused):
        look(computed_s + 2 * FETCH_BASE_S, with_pages=pages)
    fleet.has(fleet.prefill[1], 9)
    assert look(computed_s + 2 * FETCH_BASE_S, with_pages=pages) is fleet.prefill[0]
    with pytest.raises(RequestRefused):
        look(computed_s + 2 * FETCH_BASE_S)
    with pytest.raises(RequestRefused):
        look(computed_s + FETCH_BASE_S / 2, with_pages=pages)


def test_what_is_less_than_a_block_more_is_not_fetched() -> None:
    """An answer behind equal prompts."""
    fleet = Fleet()
    for worker in fleet.prefill[:2]:
        fleet.has(worker, 4)
    fleet.index.note_answer(fleet.prefill[1].worker_id, KEYS[:4], b"", BLOCK_TOKENS - 1)
    assert fleet.named(0) is None
    fleet.index.forget(fleet.decode.worker_id)
    fleet.has(fleet.prefill[0], 4)
    fleet.index.note_answer(fleet.prefill[1].worker_id, KEYS[:4], b"", BLOCK_TOKENS)
    assert fleet.named(0) == ("http://p1", 5 * BLOCK_TOKENS)


def test_a_decode_worker_gives_what_it_has_generated() -> None:
    fleet = Fleet()
    fleet.has(fleet.decode, 9)
    assert fleet.named(0) == ("http://d0", 9 * BLOCK_TOKENS)


def test_of_equal_ones_that_with_least_to_do_is_named() -> None:
    fleet = Fleet()
    fleet.has(fleet.prefill[1], 4)
    fleet.has(fleet.prefill[2], 4)
    fleet.launched.table.loads.charge(fleet.prefill[1], 10)
    assert fleet.named(0) == ("http://p2", 4 * BLOCK_TOKENS)


def test_pages_are_fetched_only_where_that_is_cheaper() -> None:
    """A slow wire, or a holder that is free: it computes the rest itself."""
    fleet = Fleet()
    fleet.has(fleet.prefill[1], 7)
    assert fleet.choose(0, 1).placements[0].worker is fleet.prefill[1]
    fleet.launched.table.loads.charge(fleet.prefill[1], 5000)
    first = fleet.choose(0, 1).placements[0]
    assert first.worker is not fleet.prefill[1] and first.source is not None
    for worker in (fleet.prefill[0], fleet.decode):
        fleet.index.forget(worker.worker_id)
    fleet.prefill[1].prefix = PrefixHolder("p1:1", "p1", token_bytes=1 << 30)
    first = fleet.choose(0).placements[0]
    assert first.worker is fleet.prefill[0] and first.source is None


@pytest.mark.parametrize(
    "why", ["down", "silent", "leaving", "other model", "no flag", "gone", "no flag at the chosen worker"]
)
def test_a_worker_that_cannot_send_it_is_not_named(why: str) -> None:
    fleet = Fleet(2)
    worker = fleet.prefill[1]
    fleet.has(worker, 4)
    match why:
        case "down":
            worker.health = Health.DOWN
        case "silent":
            worker.silent = True
        case "leaving":
            worker.leaving = True
        case "other model":
            worker.models = ("another",)
        case "no flag":
            worker.prefix = None
        case "gone":
            fleet.launched.table.remove(worker.url)
        case "no flag at the chosen worker":
            fleet.prefill[0].prefix = None
    assert fleet.named(0) is None


def test_a_source_may_have_loaded_other_adapters() -> None:
    fleet = Fleet(2)
    fleet.prefill[0].models, fleet.prefill[1].models = ("m", "one"), ("m", "two", "one")
    fleet.has(fleet.prefill[1], 4)
    assert fleet.named(0) == ("http://p1", 4 * BLOCK_TOKENS)


def test_only_the_computing_worker_gets_the_source() -> None:
    fleet = Fleet()
    fleet.has(fleet.prefill[1], 4)
    request: Any = make_request()
    request.hints = hints()
    fleet.launched.launcher.begin(request, fleet.choose(0).placements)
    sent = {to: headers.get(PREFIX_HEADER) for to, headers, _ in fleet.launched.upstream.sent}
    assert sent["http://d0"] is None and fleet.prefixes.num_named == 1
    wanted = PrefixSourceHeader(control="p1:1", incarnation="p1", num_tokens=4 * BLOCK_TOKENS)
    assert read_header(sent["http://p0"] or "", SECRET) == wanted


def test_a_holder_beyond_the_policy_s_choice_is_a_candidate() -> None:
    """The policy balances loads; the price finds the worker that has nearly all of the prompt."""
    fleet = Fleet()
    fleet.has(fleet.prefill[2], 10)
    policy = fleet.routes.policies[Role.PREFILL]
    assert isinstance(policy, CacheAware)
    found = [(Placement(fleet.prefill[0]), Placement(fleet.decode))]
    choice = fleet.routes.take([[fleet.prefill, [fleet.decode]]], found, hints(), 0.0, None)
    assert choice.placements[0].worker is fleet.prefill[2]
    strict = fleet.routes.take([[fleet.prefill, [fleet.decode]]], found, hints(), 0.0, None, strict=True)
    assert strict.placements[0].worker is fleet.prefill[0]


JUNK = [
    None,
    3,
    [],
    {},
    {"control": 3},
    {"control": "a", "incarnation": None},
    {"control": "a" * 999, "incarnation": ""},
]


@pytest.mark.parametrize("named", JUNK)
def test_what_no_worker_says_names_no_source(named: object) -> None:
    assert parse_prefix_holder({"prefix_source": named}) is None
    assert parse_prefix_holder({"prefix_source": json.dumps(named)}) is None


def test_a_holder_is_read_from_server_info() -> None:
    assert parse_prefix_holder(info_of("p")) == PrefixHolder("p:1", "p", TOKEN_BYTES)
    assert parse_prefix_holder(info_of("p", token_bytes=-1)) == PrefixHolder("p:1", "p", 0)


def test_a_header_is_read_with_the_secret_that_signed_it() -> None:
    source = PrefixSourceHeader(control="a:1", incarnation="i", num_tokens=7)
    signed = write_header(source, SECRET)
    assert read_header(signed, SECRET) == source
    assert read_header(signed, None) is None, "without a secret no router is known"
    for wrong in (signed.replace("7", "8"), write_header(source, b"other"), "", "-", "\ud800"):
        assert read_header(wrong, SECRET) is None
    for junk in ('{"control": "a:1"}', "[]", "", "{", '{"control":"a","incarnation":"i","num_tokens":0}'):
        assert read_header(f"{sign(junk.encode(), SECRET, purpose=PURPOSE)} {junk}", SECRET) is None
