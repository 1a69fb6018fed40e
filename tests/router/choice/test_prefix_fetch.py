"""A router tells prefill workers which other one has a prompt's prefix, and has hot ones copied to a second worker."""

import json
from typing import Any

import pytest

from router.choice.policies import Placement, RoutingHints
from router.choice.prefix_index import PrefixIndex
from router.parts.prefix import (
    HALF_LIFE_S,
    HOT_HITS,
    MAX_AT_ONCE,
    MAX_KEPT,
    PAUSE_S,
    PrefixCopies,
    PrefixHeaders,
    PrefixSources,
    Replication,
)
from router.pool.breaker import Health
from router.pool.reports import PrefixHolder, parse_prefix_holder
from router.pool.worker import Role
from service.http.prefix_source import PREFIX_HEADER, PURPOSE, PrefixSourceHeader, read_header, write_header
from service.kv_events import BLOCK_TOKENS
from service.security.keys import sign
from tests.router.attempts import Launched, make_request

SECRET = b"only this cluster knows it"
KEYS = [bytes([i]) * 20 for i in range(10)]
TOKEN_BYTES = 100


def info_of(name: str, **changed: object) -> dict[str, object]:
    named = {"control": f"{name}:1", "incarnation": name, "token_bytes": TOKEN_BYTES, **changed}
    return {"prefix_source": json.dumps(named)}


def hints(num_keys: int = len(KEYS)) -> RoutingHints:
    return RoutingHints(prompt_tokens=num_keys * BLOCK_TOKENS + 50, keys=KEYS[:num_keys])


class Fleet:
    """Prefill workers p0.. that exchange prefixes, all of which answer; a decode worker d0."""

    def __init__(self, count: int = 3, *, bytes_a_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.launched = Launched(clock=lambda: self.now_s)
        self.upstream = self.launched.upstream
        self.index = PrefixIndex(max_blocks=1000)
        self.sources = PrefixSources(self.index)
        self.prefill = [self.launched.worker(Role.PREFILL, f"http://p{i}") for i in range(count)]
        self.decode = self.launched.worker(Role.DECODE, "http://d0")
        for i, worker in enumerate(self.prefill):
            worker.health = Health.UP
            self.sources.on_info(worker, info_of(f"p{i}"))
        self.replication = Replication(bytes_a_s=bytes_a_s)
        self.prefixes = PrefixHeaders(sources=self.sources, secret=SECRET)
        self.launched.launcher.parts = (self.prefixes.prepare,)
        self.copies = PrefixCopies(
            launcher=self.launched.launcher, prefixes=self.prefixes, replication=self.replication
        )

    def has(self, place: int, num_keys: int) -> None:
        self.index.touch(self.prefill[place].worker_id, KEYS[:num_keys])

    def named(self, chosen: int, *, cached: int = 0, num_keys: int = len(KEYS)) -> tuple[str, int] | None:
        """(the worker, the tokens) of the source for a request that goes to `chosen`."""
        holder = self.sources.better(Placement(self.prefill[chosen], cached), hints(num_keys))
        return None if holder is None else (holder.at.incarnation, holder.header().num_tokens)

    def send(self, chosen: int, num_keys: int = len(KEYS), *, cached: int = 0) -> Any:
        """A request with this prompt, as the dispatcher sends it after the policy's choice."""
        request = make_request(now_s=self.now_s)
        request.hints = hints(num_keys)
        placements = [Placement(self.prefill[chosen], cached), Placement(self.decode)]
        self.has(chosen, num_keys)
        attempt = self.launched.launcher.begin(request, placements)
        self.copies.on_sent(request, attempt, self.now_s)
        return attempt

    def sent_to(self, url: str) -> list[PrefixSourceHeader | None]:
        """The sources that its requests have named; None: none."""
        found = [headers.get(PREFIX_HEADER) for to, headers, _ in self.upstream.sent if to == url]
        return [None if value is None else read_header(value, SECRET) for value in found]


def test_the_worker_with_most_of_the_prompt_is_named() -> None:
    fleet = Fleet()
    assert fleet.named(0) is None
    fleet.has(1, 4)
    fleet.has(2, 7)
    assert fleet.named(0) == ("p2", 7 * BLOCK_TOKENS)
    assert fleet.named(2, cached=7 * BLOCK_TOKENS) is None
    assert fleet.named(0, cached=6 * BLOCK_TOKENS) == ("p2", 7 * BLOCK_TOKENS)
    assert fleet.named(0, cached=6 * BLOCK_TOKENS + 1) is None, "less than a block more"
    assert fleet.named(0, num_keys=0) is None


def test_of_equal_ones_that_with_least_to_do_is_named() -> None:
    fleet = Fleet()
    fleet.has(1, 4)
    fleet.has(2, 4)
    fleet.launched.table.loads.charge(fleet.prefill[1], 10)
    assert fleet.named(0) == ("p2", 4 * BLOCK_TOKENS)


@pytest.mark.parametrize(
    "why", ["down", "silent", "leaving", "other model", "no flag", "gone", "no flag at the chosen worker"]
)
def test_a_worker_that_cannot_send_it_is_not_named(why: str) -> None:
    fleet = Fleet(2)
    fleet.has(1, 4)
    worker = fleet.prefill[1]
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
            fleet.sources.on_info(worker, {})
        case "gone":
            fleet.sources.on_gone(worker)
        case "no flag at the chosen worker":
            fleet.sources.on_info(fleet.prefill[0], {})
    assert fleet.named(0) is None


def test_only_the_prefill_worker_gets_the_source() -> None:
    fleet = Fleet()
    fleet.has(1, 4)
    fleet.send(0)
    assert fleet.sent_to("http://p0") == [PrefixSourceHeader(control="p1:1", incarnation="p1", num_tokens=512)]
    assert fleet.sent_to("http://d0") == [None] and fleet.prefixes.num_named == 1
    fleet.send(0, cached=len(KEYS) * BLOCK_TOKENS)
    assert fleet.sent_to("http://p0")[1] is None


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
    source = PrefixSourceHeader(control="a:1", incarnation="i", num_tokens=7, copy=True)
    signed = write_header(source, SECRET)
    assert read_header(signed, SECRET) == source
    assert read_header(signed, None) is None, "without a secret no router is known"
    for wrong in (signed.replace("7", "8"), write_header(source, b"other"), "", "-", "\ud800"):
        assert read_header(wrong, SECRET) is None
    for junk in ('{"control": "a:1"}', "[]", "", "{", '{"control":"a","incarnation":"i","num_tokens":0}'):
        assert read_header(f"{sign(junk.encode(), SECRET, purpose=PURPOSE)} {junk}", SECRET) is None


def test_a_prefix_is_hot_after_some_hits_that_fade() -> None:
    policy = Replication(bytes_a_s=1.0)
    assert [policy.note(b"k", 0.0) for _ in range(int(HOT_HITS))] == [False] * (int(HOT_HITS) - 1) + [True]
    assert not policy.note(b"k", 5 * HALF_LIFE_S)
    assert not any(policy.note(b"slow", i * 2 * HALF_LIFE_S) for i in range(50))
    for i in range(2 * MAX_KEPT):
        policy.note(b"%d" % i, 1e6)
    assert len(policy._hits) == MAX_KEPT


def test_copies_are_bounded_in_number_and_bytes() -> None:
    policy = Replication(bytes_a_s=100.0)
    assert policy.begin(b"a", 1000, 0.0)
    assert not policy.begin(b"b", 1, 9.0), "the first is not paid yet"
    assert policy.begin(b"b", 1, 10.0)
    assert not policy.begin(b"c", 1, 11.0) and policy.num_running == MAX_AT_ONCE
    policy.end(good=True)
    assert policy.begin(b"c", 1, 12.0)
    policy.end(good=False)
    assert not policy.begin(b"c", 1, 13.0), "it was tried lately"
    assert policy.begin(b"c", 1, 12.0 + PAUSE_S)
    assert (policy.num_copied, policy.num_failed) == (1, 1)


def hot(fleet: Fleet) -> None:
    """p0 alone has the prefix, and one request after the other asks for it."""
    fleet.has(0, 6)
    for _ in range(int(HOT_HITS)):
        fleet.send(0, 6, cached=6 * BLOCK_TOKENS)


def test_a_hot_prefix_that_one_worker_has_is_copied_to_the_least_loaded_other_one() -> None:
    fleet = Fleet(bytes_a_s=1e6)
    fleet.launched.table.loads.charge(fleet.prefill[1], 10)
    hot(fleet)
    wanted = PrefixSourceHeader(control="p0:1", incarnation="p0", num_tokens=6 * BLOCK_TOKENS, copy=True)
    assert fleet.sent_to("http://p2") == [wanted] and fleet.sent_to("http://p1") == []
    body = next(body for url, _, body in fleet.upstream.sent if url == "http://p2")
    assert body["bootstrap_room"] and body["text"]
    num_rooms = fleet.launched.rooms.num_live
    fleet.upstream.replies[-1].answer(200)
    assert fleet.launched.rooms.num_live == num_rooms - 1
    assert (fleet.replication.num_copied, fleet.replication.num_running) == (1, 0)
    assert fleet.index.match(KEYS).depth(fleet.prefill[2].worker_id) == 6
    hot(fleet)
    assert len(fleet.sent_to("http://p2")) == 1, "two have it"


def test_a_copy_that_fails_is_not_believed() -> None:
    fleet = Fleet(2, bytes_a_s=1e6)
    hot(fleet)
    fleet.upstream.replies[-1].answer(409)
    assert fleet.replication.num_failed == 1
    assert fleet.index.match(KEYS).depth(fleet.prefill[1].worker_id) == 0
    fleet.now_s = PAUSE_S
    hot(fleet)
    fleet.copies.close()
    assert fleet.replication.num_failed == 2 and fleet.replication.num_running == 0


def test_nothing_is_copied_where_there_is_no_second_worker() -> None:
    fleet = Fleet(2, bytes_a_s=1e6)
    fleet.prefill[1].health = Health.DOWN
    hot(fleet)
    assert fleet.sent_to("http://p1") == []
    alone = Fleet(1, bytes_a_s=1e6)
    hot(alone)
    assert alone.replication.num_running == 0
