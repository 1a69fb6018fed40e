"""Prefixes: their names, from bodies as clients write them, the table of who has them, and what a store of them spares."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.body import Api, parse_body
from router.choice.kv_view import WorkerCacheView
from router.choice.policies import Placement, cost_tokens
from router.choice.prefix_index import MAX_ANSWERS, MAX_KEYS, MAX_STORES, SWEEP, PrefixIndex, chain, keyed_prompt
from router.choice.where import DEFAULT_BYTES_S, fetch_s
from router.pool.reports import parse_load, parse_prefix_holder, parse_store
from router.pool.worker import LoadReport, SharedStore, Worker
from service.http.prefix_source import PREFIX_HEADER
from service.kv_events import BLOCK_BYTES, BLOCK_TOKENS, AllBlocksCleared, token_bytes, token_seed
from tests.router.attempts import make_request
from tests.router.choice.test_prefix_fetch import TOKEN_BYTES, TOKEN_S, Fleet, hints, info_of
from tests.router.dummies import depths


def keys(api: Api, **fields: Any) -> list[int]:
    return keyed_prompt(parse_body(api, json.dumps(fields).encode()))[0]


def chat(*texts: str, **fields: Any) -> list[int]:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return keys(Api.CHAT, messages=messages, **fields)


def test_the_next_turn_of_a_conversation_begins_with_the_keys_of_the_last() -> None:
    one, two = chat("q" * 2000), chat("q" * 2000, "a" * 1000, "more")
    assert len(one) == 3 and len(two) == 6
    assert two[:3] == one
    assert chat("r" + "q" * 2000)[:1] != one[:1]


@pytest.mark.parametrize(("api", "last"), [(Api.MESSAGES, "messages"), (Api.OLLAMA_GENERATE, "prompt")])
def test_two_requests_share_the_keys_of_their_system_prompt(api: Api, last: str) -> None:
    one, two, other = (
        keys(api, system=system, **{last: text})
        for system, text in (("s" * 2000, "q" * 999), ("s" * 2000, "r" * 999), ("t" * 2000, "q" * 999))
    )
    assert one[:3] == two[:3] and not set(one[3:]) & set(two[3:]) and not set(one) & set(other)


@pytest.mark.parametrize(
    "other",
    [{"tools": [{"type": "function"}]}, {"model": "m2"}, {"lora_path": "l"}, {"cache_salt": "s"}, {"extra_key": "s"}],
)
def test_what_stands_before_the_prompt_makes_another_prefix(other: dict[str, Any]) -> None:
    assert not set(chat("q" * 3000, model="m")) & set(chat("q" * 3000, **{"model": "m", **other}))


def test_ids_of_an_adapter_have_the_keys_of_its_name_in_events() -> None:
    """However a request names it; what is no adapter is the base model."""
    prompt = list(range(2 * BLOCK_TOKENS))

    def ids(api: Api, **fields: Any) -> list[int]:
        body = json.dumps({"input_ids" if api is Api.GENERATE else "prompt": prompt, **fields}).encode()
        return keyed_prompt(parse_body(api, body), {"law": "digest of law", "sql": "sql"})[0]

    def right(adapter: str) -> list[int]:
        return chain(token_seed(adapter), token_bytes(prompt))

    asked = [ids(Api.GENERATE, lora_path=path) for path in ("law", ["law", None])]
    asked += [ids(Api.COMPLETIONS, model=model) for model in ("law", "base:law", "org/base:law")]
    asked.append(ids(Api.COMPLETIONS, model="base", lora_path="law"))
    assert asked == [right("digest of law")] * 6
    assert ids(Api.GENERATE, lora_path="sql") == right("sql"), "of a server that tells no digest"
    assert ids(Api.GENERATE, lora_path="unheard") == right("unheard")
    plain = [ids(Api.GENERATE, lora_path=path) for path in ("", None, [None, "law"])]
    plain += [ids(Api.COMPLETIONS, model=model) for model in ("base", "org/base:7b", "")]
    assert plain == [right("")] * 6


def test_text_and_its_batch_and_ids_and_their_batch_have_the_same_prefix() -> None:
    text, ids = "t" * 3000, list(range(1000))
    assert keys(Api.GENERATE, text=text)[:5] == keys(Api.GENERATE, text=[text, "b"])[:5]
    assert keys(Api.COMPLETIONS, prompt=text) == keys(Api.COMPLETIONS, prompt=[text])[:5]
    expected = chain(token_seed(), token_bytes(ids))
    assert len(expected) == 1000 // BLOCK_TOKENS
    assert expected == keys(Api.GENERATE, input_ids=ids) == keys(Api.GENERATE, input_ids=[ids, [1]])
    assert expected == keys(Api.COMPLETIONS, prompt=ids) == keys(Api.EMBEDDINGS, input=ids)
    assert not set(expected) & set(keys(Api.GENERATE, input_ids=ids, lora_path="l"))


def test_namespaces_have_other_keys_and_one_that_is_written_otherwise_the_same() -> None:
    ids, text = list(range(1000)), "t" * 3000
    bodies: list[dict[str, Any]] = [{"input_ids": ids}, {"text": text}]
    for body in bodies:
        salted = [
            keys(Api.GENERATE, **body, **fields)
            for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab"})
        ]
        assert len({key for chained in salted for key in chained}) == sum(map(len, salted)) == 4 * len(salted[0])
        assert keys(Api.GENERATE, **body, extra_key="a") == keys(Api.GENERATE, **body, cache_salt=["a", "b"])
        assert keys(Api.GENERATE, **body, extra_key="", cache_salt=None) == salted[0]
    expected = chain(token_seed(namespace=("s",)), token_bytes(ids))
    assert (
        expected == keys(Api.COMPLETIONS, prompt=ids, cache_salt="s") == keys(Api.EMBEDDINGS, input=ids, extra_key="s")
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": ""},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [-1] * 500},
        {"input_ids": [2**40] * 500},
        {"input_ids": [1.5] * 500},
        {"input_ids": ["x"] * 10},
        {"text": 7},
        {"text": {"a": 1}},
        {"text": None, "input_ids": None},
    ],
)
def test_what_is_no_prompt_has_no_keys(fields: dict[str, Any]) -> None:
    assert keys(Api.GENERATE, **fields) == []


def test_a_short_prompt_has_no_keys_and_an_endless_one_a_bounded_number() -> None:
    assert keys(Api.GENERATE, text="t" * (BLOCK_BYTES - 3)) == []
    assert len(chain(b"", b"x" * (BLOCK_BYTES * MAX_KEYS + 5 * BLOCK_BYTES))) == MAX_KEYS


@settings(max_examples=50)
@given(st.binary(max_size=6000), st.integers(0, 6000), st.binary(min_size=1, max_size=8))
def test_keys_agree_exactly_as_far_as_the_bytes_do(data: bytes, at: int, other: bytes) -> None:
    at = min(at, len(data))
    changed = data[:at] + other + data[at + len(other) :]
    same = next(
        (i for i, (a, b) in enumerate(zip(data, changed, strict=False)) if a != b), min(len(data), len(changed))
    )
    mine, theirs = chain(b"s", data), chain(b"s", changed)
    shared = sum(a == b for a, b in zip(mine, theirs, strict=False))
    assert shared == min(same // BLOCK_BYTES, len(mine), len(theirs))


def path(name: str, length: int) -> list[bytes]:
    return [f"{name[: i + 1]}/{i}".encode() for i in range(length)]


def test_the_least_recently_used_goes_first_and_the_front_of_a_prefix_last() -> None:
    index = PrefixIndex(max_blocks=4)
    index.touch(0, path("aaa", 3))
    index.touch(0, path("b", 1))
    index.touch(0, path("c", 1))
    assert depths(index, path("aaa", 3)) == {0: 2}
    index.touch(0, path("aa", 2))
    index.touch(0, path("d", 1))
    assert depths(index, path("aa", 2)) == {0: 2} and depths(index, path("b", 1)) == {}
    assert index.num_blocks(0) == 4 == len(index)
    index.check()


def test_guesses_beyond_what_the_worker_holds_are_dropped_oldest_first() -> None:
    index = PrefixIndex(max_blocks=10)
    index.store_all(0, [b"told"])
    index.touch(0, path("aaa", 3))
    index.touch(0, path("bb", 2))
    index.shrink(0, 4)
    assert depths(index, path("bb", 2)) == {0: 2} and depths(index, path("aaa", 3)) == {0: 1}
    index.shrink(0, 0)
    assert index.num_blocks(0) == 1
    index.check()


def test_a_worker_that_left_is_unknown_at_once_and_its_entries_go_in_slices() -> None:
    index = PrefixIndex(max_blocks=10_000)
    many = [f"{i}".encode() for i in range(3 * SWEEP)]
    index.touch(0, many)
    index.touch(1, many[:1])
    index.forget(0)
    assert depths(index, many) == {1: 1}
    index.touch(2, many[:2])  # takes another bit: those of the one that left are still there
    assert depths(index, many) == {1: 1, 2: 2}
    sizes = []
    while len(index) > 2:
        sizes.append(len(index))
        index.touch(1, many[:1])
        index.check()
    assert len(sizes) >= 2 and max(a - b for a, b in itertools.pairwise(sizes)) <= SWEEP
    index.touch(3, many[:1])
    index.check()
    assert depths(index, many[:1]) == {1: 1, 2: 1, 3: 1}


class Model(RuleBasedStateMachine):
    """Against sets: whatever is done, the table says of a worker what was told of it, less what had to go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_blocks=6)
        self.may_have: dict[int, set[bytes]] = {}
        self.told: dict[int, set[bytes]] = {}

    @rule(worker=st.integers(0, 3), name=st.text("ab", min_size=1, max_size=5))
    def touch(self, worker: int, name: str) -> None:
        self.index.touch(worker, path(name, len(name)))
        self.may_have.setdefault(worker, set()).update(path(name, len(name)))
        assert depths(self.index, path(name, len(name)))[worker] == len(name)

    @rule(worker=st.integers(0, 3), name=st.text("ab", min_size=1, max_size=3))
    def store(self, worker: int, name: str) -> None:
        key = path(name, len(name))[-1]
        if len(self.told.setdefault(worker, set())) < 6:
            self.told[worker].add(key)
        self.index.store_all(worker, [key])

    @rule(worker=st.integers(0, 3), name=st.text("ab", min_size=1, max_size=3))
    def remove(self, worker: int, name: str) -> None:
        key = path(name, len(name))[-1]
        for known in (self.told, self.may_have):
            known.setdefault(worker, set()).discard(key)
        self.index.remove_all(worker, [key])

    @rule(worker=st.integers(0, 3), blocks=st.integers(0, 6))
    def shrink(self, worker: int, blocks: int) -> None:
        self.index.shrink(worker, blocks)
        assert self.index.num_blocks(worker) <= max(blocks, len(self.told.get(worker, ())))

    @rule(worker=st.integers(0, 3))
    def forget(self, worker: int) -> None:
        self.index.forget(worker)
        self.may_have.pop(worker, None)
        self.told.pop(worker, None)

    @rule(name=st.text("ab", min_size=1, max_size=5))
    def match(self, name: str) -> None:
        found = depths(self.index, path(name, len(name)))
        for worker in range(4):
            told = self.told.get(worker, set())
            known = [key in told or key in self.may_have.get(worker, ()) for key in path(name, len(name))]
            surely = [key in told for key in path(name, len(name))]
            assert _run(surely) <= found.get(worker, 0) <= _run(known)

    @invariant()
    def holds(self) -> None:
        self.index.check()


def _run(flags: list[bool]) -> int:
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=30, stateful_step_count=30)


# ---- answers


def turns(*texts: str) -> tuple[list[int], Any]:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return keyed_prompt(parse_body(Api.CHAT, json.dumps({"messages": messages}).encode()))


@pytest.mark.parametrize("spaced", [1000, 1011])
def test_the_next_turn_finds_the_answer_of_the_last_where_it_was_generated(spaced: int) -> None:
    """Of text, so the router knows no tokens of it: the worker that answered holds prompt and answer."""
    index = PrefixIndex(max_blocks=100)
    first, data = turns("q" * spaced)
    index.touch(0, first)
    index.touch(1, first)
    index.note_answer(1, first, data, 300)
    keys, later = turns("q" * spaced, "a" * 1500, "more")
    assert [index.match(keys).depth(worker) for worker in (0, 1)] == [len(first)] * 2
    rest = (len(bytes(data)) - 1 - len(first) * BLOCK_BYTES) // 4
    assert index.behind(1, keys, len(first), later) == rest + 300 and rest > 0
    assert index.behind(0, keys, len(first), later) == 0, "it has computed the prompt alone"
    for other in (turns("q" * (spaced - 1), "a" * 1500, "more"), turns("q" * (spaced + 1), "a" * 1500, "more")):
        depth = index.match(other[0]).depth(1)
        assert depth == len(first) and index.behind(1, other[0], depth, other[1]) == 0, "another conversation"
    index.forget(1)
    index.touch(1, first)
    assert index.behind(1, keys, len(first), later) == 0


def test_answers_are_bounded_and_those_of_short_prompts_are_not_kept() -> None:
    index = PrefixIndex(max_blocks=100)
    for i in range(MAX_ANSWERS + 10):
        index.note_answer(0, [i], b"", 1)
    index.note_answer(0, [], b"short", 1)
    index.note_answer(0, ["long"], b"x" * (2 * BLOCK_BYTES), 1)
    assert len(index._answers) == MAX_ANSWERS and (0, "long") not in index._answers and (0, 0) not in index._answers


# ---- stores that workers share

HOUSE = "mooncake://house:1/a"
STORE = SharedStore("house:1/a", TOKEN_BYTES, 1.0)
BLOCKS = [bytes([i]) * 20 for i in range(10)]


def depth(index: PrefixIndex, holder: int) -> int:
    return index.match(BLOCKS).depth(holder)


def held_at(index: PrefixIndex, worker_id: int) -> int:
    found = index.store_of(worker_id)
    assert found is not None
    return found[0]


def test_a_store_keeps_what_its_workers_have_held() -> None:
    index = PrefixIndex(max_blocks=8)
    for worker_id in (1, 2):
        index.share(worker_id, STORE)
    index.share(3, replace(STORE, place="town"))
    index.touch(1, BLOCKS[:3])
    index.store_all(2, BLOCKS[:5])
    index.touch(3, BLOCKS[:7])
    index.note_answer(2, BLOCKS[:5], b"", 40)
    index.remove_all(2, BLOCKS)
    index.forget(1)
    index.check()
    store = held_at(index, 1)
    assert store == held_at(index, 2) != held_at(index, 3)
    assert depth(index, 1) == depth(index, 2) == 0
    assert depth(index, store) == 5 and depth(index, held_at(index, 3)) == 7
    assert index.behind(store, BLOCKS, 5, b"\0" * 9999) == 40
    index.share(1, None)
    index.touch(1, BLOCKS[:8])
    assert depth(index, 1) == 8 and depth(index, store) == 5, "it has no store any more"


def test_a_store_is_bounded_as_a_worker_is_and_there_are_few() -> None:
    index = PrefixIndex(max_blocks=4)
    index.share(1, STORE)
    store = held_at(index, 1)
    index.touch(1, BLOCKS[6:])
    index.touch(1, BLOCKS[:3])
    assert index.num_blocks(store) == 4 and depth(index, store) == 3
    for at in range(MAX_STORES):
        index.share(2, replace(STORE, place=f"{at}"))
    assert index.num_blocks(store) == 0, "the one that was named longest ago is forgotten"
    index.check()


def test_a_store_holds_as_much_as_its_workers_give() -> None:
    index = PrefixIndex(max_blocks=8)
    gives = replace(STORE, tokens=2 * BLOCK_TOKENS)
    for worker_id in (1, 2, 2):
        index.share(worker_id, gives)
    store = held_at(index, 1)
    index.touch(1, BLOCKS[:8])
    assert index.num_blocks(1) == 8 and index.num_blocks(store) == depth(index, store) == 4
    index.share(2, None)
    index.touch(1, BLOCKS[:8])
    assert index.num_blocks(store) == 2
    index.share(1, STORE)
    index.touch(1, BLOCKS[:8])
    assert index.num_blocks(store) == 8, "memory of other processes"
    index.check()


def test_a_cleared_worker_has_cleared_its_store() -> None:
    """A flush deletes the pages of all workers; a gap in the events does not."""
    index = PrefixIndex(max_blocks=8)
    index.share(1, STORE)
    view = WorkerCacheView(index, 1)
    index.touch(1, BLOCKS[:6])
    view.lose()
    assert depth(index, 1) == 0 < depth(index, held_at(index, 1))
    view.on_message(0, [AllBlocksCleared()])
    assert depth(index, held_at(index, 1)) == 0


def stored(text: object = f"{HOUSE}?token_bytes={TOKEN_BYTES}&wait_s=1.0", **other: object) -> dict[str, object]:
    return {"hicache_storage": text, **other}


def test_a_store_is_read_from_server_info() -> None:
    assert parse_store(stored()) == parse_store(stored(enable_lora=True)) == STORE
    url = f"{HOUSE}?token_bytes={TOKEN_BYTES}&wait_s=1.0&tokens=640"
    assert parse_store(stored(url)) == replace(STORE, tokens=640)


@pytest.mark.parametrize(
    "said",
    [
        {},
        stored(None),
        stored(3),
        stored("file:///tmp/disk"),
        stored(HOUSE),
        stored("mooncake://[::1?token_bytes=1&wait_s=1"),
        stored(f"{HOUSE}?token_bytes=0&wait_s=1"),
        stored(f"{HOUSE}?token_bytes=9&wait_s=0.0"),
        stored(f"{HOUSE}?token_bytes=9&wait_s=nan"),
        stored(f"{HOUSE}?token_bytes=x&wait_s=1"),
        stored(HOUSE + "a" * 2000 + "?token_bytes=9&wait_s=1"),
        stored(f"{HOUSE}?token_bytes=9&wait_s=1&tokens=x"),
    ],
)
def test_what_says_no_shared_store_that_requests_wait_for_is_none(said: dict[str, object]) -> None:
    assert parse_store(said) is None


def test_the_rate_of_reads_is_reported() -> None:
    rows = [{"num_running_reqs": 1, "memory": {"storage_read_gb_s": rate}} for rate in (0.2, 0.4)]
    report = parse_load(rows)
    assert report is not None and report.store_gb_s == pytest.approx(0.3)


# ---- what reading a store costs


class Sharing(Fleet):
    """Workers with one store that give each other nothing."""

    def __init__(self, *, store: SharedStore | None = STORE) -> None:
        super().__init__(2)
        for worker in (*self.prefill, self.decode):
            worker.prefix = None
            self.index.share(worker.worker_id, store)

    def had(self, worker: Worker, num_keys: int) -> None:
        self.has(worker, num_keys)
        self.index.forget(worker.worker_id)

    def first(self, *among: int) -> Placement:
        return self.choose(*among).placements[0]


def test_another_worker_s_pages_are_read_from_the_store_they_share() -> None:
    fleet = Sharing()
    fleet.had(fleet.prefill[1], 8)
    first = fleet.first(0)
    assert first.cached_tokens == 0 and first.source is not None and first.source.from_store
    assert first.source.missing == first.source.tokens == 8 * BLOCK_TOKENS == first.known_tokens
    assert first.source.seconds == pytest.approx(fetch_s(8 * BLOCK_TOKENS * TOKEN_BYTES, DEFAULT_BYTES_S))
    assert cost_tokens(first, hints()) == 2 * BLOCK_TOKENS + 50, "what is read is no queue of prompts"
    alone = Sharing(store=None)
    alone.had(alone.prefill[1], 8)
    assert alone.first(0).source is None


def test_what_the_worker_has_itself_is_not_read() -> None:
    for others, missing in ((6, 0), (8, 2 * BLOCK_TOKENS)):
        fleet = Sharing()
        fleet.has(fleet.prefill[0], 6)
        fleet.had(fleet.decode, others)
        first = fleet.first(0)
        assert first.cached_tokens == 6 * BLOCK_TOKENS
        assert (0 if first.source is None else first.source.missing) == missing


def test_the_price_counts_what_comes_in_time_at_the_measured_rate() -> None:
    """The worker waits a second for pages, then it computes the rest."""
    rate = 4 * BLOCK_TOKENS * TOKEN_BYTES
    for slower in (1, 8):
        fleet = Sharing()
        fleet.had(fleet.prefill[1], 8)
        fleet.launched.table.loads.on_report(fleet.prefill[0], LoadReport(store_gb_s=rate / slower / 1e9))
        source = fleet.first(0).source
        if slower == 8:
            assert source is None, "less than a block"
        else:
            assert source is not None and source.missing == pytest.approx(4 * BLOCK_TOKENS, abs=1)
            assert source.seconds == pytest.approx(1.0, abs=0.01)


def test_a_slow_store_sends_the_prompt_to_who_holds_it() -> None:
    """Reading takes longer than the queue at the holder; a fast one spares it."""
    for gb_s, best in ((0.0002, 1), (5.0, 0)):
        fleet = Sharing()
        fleet.has(fleet.prefill[1], 10)
        fleet.launched.table.loads.charge(fleet.prefill[1], 2000)  # 0.2 s
        for worker in fleet.prefill:
            fleet.launched.table.loads.on_report(worker, LoadReport(store_gb_s=gb_s))
        first = fleet.first(0, 1)
        assert first.worker is fleet.prefill[best] and (first.source is not None) == (best == 0)


@pytest.mark.parametrize("token_bytes, from_store", [(TOKEN_BYTES // 10, False), (10 * TOKEN_BYTES, True)])
def test_of_a_peer_and_the_store_the_cheaper_gives_the_pages(token_bytes: int, from_store: bool) -> None:
    fleet = Sharing()
    for worker in fleet.prefill:
        worker.prefix = parse_prefix_holder(info_of("p", token_bytes=token_bytes))
    fleet.has(fleet.prefill[1], 8)
    choice = fleet.choose(0)
    source = choice.placements[0].source
    assert source is not None and source.from_store is from_store and choice.decision is not None
    assert choice.decision.chosen.source == source
    assert choice.decision.price.transfer_s == pytest.approx(source.seconds)
    request: Any = make_request()
    request.hints = hints()
    fleet.launched.launcher.begin(request, choice.placements)
    named = [to for to, headers, _ in fleet.launched.upstream.sent if PREFIX_HEADER in headers]
    assert named == ([] if from_store else ["http://p0"]), "a worker reads its store by itself"


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_read_teaches_nothing_of_what_is_computed(whole: bool) -> None:
    """Neither its tokens nor its time, at a worker alone or of a pair."""
    fleet = Sharing()
    fleet.had(fleet.prefill[1], 8)
    pools = [[fleet.decode]] if whole else [[fleet.prefill[0]], [fleet.decode]]
    request: Any = make_request()
    request.hints = hints()
    placements = fleet.routes.choose([pools], request.hints, 0.0).placements
    source = placements[0].source
    assert source is not None
    attempt = fleet.launched.launcher.begin(request, placements)
    line = fleet.forecast.line(placements[0].worker, whole=whole)
    num_points = line.num_points
    fleet.forecast.on_sent(request, attempt, 0.0)
    fleet.launched.upstream.replies[-1].answer(200, events=True, complete=False)
    tokens = 2 * BLOCK_TOKENS + 50
    fleet.forecast.on_first_byte(request, attempt, source.seconds + TOKEN_S * tokens)
    assert line.num_points == num_points + 1
    if whole:
        assert (line.mean_x, line.mean_y) == pytest.approx((tokens, TOKEN_S * tokens))
    else:
        assert line.slope == pytest.approx(TOKEN_S) and line.at(tokens) == pytest.approx(TOKEN_S * tokens)
