"""KV events from an engine's cache to the router's prefix index: the schema, what the router makes of it."""

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.mem_cache.cache_events import CacheEvents
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import TRUNK, Branch, RadixCache
from engine.flags.kv_events_config import KVEventsConfig, parse_kv_events_config
from engine.images import key_ids
from router.choice.kv_view import WorkerCacheView
from router.choice.prefix_index import PrefixIndex, chain
from router.pool.reports import EventSource, parse_event_source
from service.flags import ConfigError
from service.kv_events import (
    BLOCK_TOKENS,
    VERSION,
    AllBlocksCleared,
    BadEvent,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    NamesRemoved,
    NamesStored,
    _decode_leniently,
    decode_events,
    decode_names,
    encode_batch,
    open_chain,
    page_names,
    read_message,
    seq_bytes,
    token_bytes,
    token_seed,
)
from tests.core.mem_cache.images import image
from tests.router.dummies import depths

STORED = BlockStored([1, 2], None, [7] * 32, 16, None, "GPU")
PROMPT = list(range(4 * BLOCK_TOKENS))


def keys_of(tokens: list[int], namespace: tuple[str, ...] = (), *, adapter: str = "") -> list[int]:
    return chain(token_seed(adapter, namespace), token_bytes(tokens))


def stored(tokens: list[int], *, at: int = 0, size: int = BLOCK_TOKENS) -> BlockStored:
    """A prompt's blocks from token `at` on, named by where they end and what the prompt begins with."""
    names = [hash((tokens[0], end)) for end in range(size, len(tokens) + 1, size)]
    first = at // size
    return BlockStored(names[first:], names[first - 1] if first else None, tokens[at:], size, None)


def test_what_we_send_is_what_vllm_and_sglang_send() -> None:
    salted = msgspec.structs.replace(STORED, extra_keys=[("salt",), ("salt",)])
    batch = KVEventBatch(1.5, [STORED, salted, BlockRemoved([3], "GPU"), AllBlocksCleared()])
    head: list[Any] = ["BlockStored", [1, 2], None, [7] * 32, 16, None, "GPU"]
    assert msgspec.msgpack.decode(encode_batch(batch)) == [
        1.5,
        [[*head, None, None], [*head, None, [["salt"], ["salt"]]], ["BlockRemoved", [3], "GPU"], ["AllBlocksCleared"]],
        None,
    ]
    number, events = read_message([b"topic", seq_bytes(9), encode_batch(batch)])
    assert (number, events[0], events[2:]) == (9, STORED, batch.events[2:])
    assert events[1] == msgspec.structs.replace(salted, extra_keys=[["salt"], ["salt"]])


def test_other_dialects_are_read() -> None:
    stored = {"block_hashes": [b"x"], "parent_block_hash": None, "token_ids": [1], "block_size": 1, "lora_id": None}
    newer = {"ts": 1.0, "events": [{"type": "BlockStored", **stored, "lora_name": None}, {"type": "SomethingNew"}]}
    assert decode_events(msgspec.msgpack.encode(newer)) == [BlockStored([b"x"], None, [1], 1, None)]
    longer = [1.0, [["BlockRemoved", [5], "CPU", "more", 1], ["Unheard", 1]], 3, "more"]
    assert decode_events(msgspec.msgpack.encode(longer)) == [BlockRemoved([5], "CPU")]


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\xc1", msgspec.msgpack.encode(5), msgspec.msgpack.encode([1.0])),
        msgspec.msgpack.encode([1.0, [["BlockStored", 1]]]),
        *(msgspec.msgpack.encode([1.0, [["BlockRemoved", [1.5]]]]), msgspec.msgpack.encode([1.0, [[]]])),
        *(msgspec.msgpack.encode([1.0, [[["x"]]]]), msgspec.msgpack.encode({"ts": 1}), b"\x91" * 5000),
    ],
)
def test_junk_is_no_batch(payload: bytes) -> None:
    for decode in (decode_events, decode_names):
        with pytest.raises(BadEvent):
            decode(payload)
    with pytest.raises(BadEvent):
        read_message([b"", payload, payload])
    with pytest.raises(BadEvent):
        read_message([payload])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "give JSON"),
        ('{"port": 1}', "port"),
        ('{"endpoint": "udp://a:1"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://a:b"}', "tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://:1"}', "tcp://HOST:PORT"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"buffer_steps": 0}', "buffer_steps"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-events-config: .*{message}"):
        parse_kv_events_config(text)


def test_configs_that_switch_it_off() -> None:
    assert parse_kv_events_config(None) is None
    here = KVEventsConfig(endpoint="tcp://[::1]:5557", replay_endpoint="tcp://*:6000")
    assert here.of_rank(0) == here and KVEventsConfig(endpoint="tcp://*:*").of_rank(3).endpoint == "tcp://*:*"
    assert (here.of_rank(2).endpoint, here.of_rank(2).replay_endpoint) == ("tcp://[::1]:5559", "tcp://*:6002")
    assert parse_kv_events_config('{"publisher": "null"}') is None
    assert parse_kv_events_config('{"enable_kv_cache_events": false}') is None
    assert parse_kv_events_config("{}") == KVEventsConfig()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"endpoint": "tcp://*:5557"}, EventSource("tcp://w:5557", None, "", False)),
        ('{"endpoint":"tcp://1.2.3.4:1","topic":"t"}', EventSource("tcp://w:1", None, "t", False)),
        (
            {"endpoint": "tcp://[::]:1", "replay_endpoint": "tcp://*:2", "curve": True},
            EventSource("tcp://w:1", "tcp://w:2", "", True),
        ),
        ({"endpoint": "ipc:///etc/passwd"}, None),
        ({"endpoint": "tcp://*:99999"}, None),
        ({"endpoint": "tcp://*:*"}, None),
        ({"endpoint": "tcp://*:1", "publisher": "null"}, None),
        ({"endpoint": "tcp://*:1", "topic": 5}, None),
        ("{", None),
        (None, None),
        ([], None),
        ({"endpoint": "tcp://*:1", "prefix_names": VERSION}, EventSource("tcp://w:1", None, "", False, named=True)),
        ({"endpoint": "tcp://*:1", "prefix_names": VERSION + 1}, EventSource("tcp://w:1", None, "", False)),
    ],
)
def test_where_a_worker_publishes_its_host_is_its_own(config: object, expected: EventSource | None) -> None:
    assert parse_event_source({"kv_events_config": config}, url_host="w") == expected


def view(max_blocks: int = 100, *, named: bool = False) -> tuple[WorkerCacheView, PrefixIndex]:
    index = PrefixIndex(max_blocks=max_blocks)
    return WorkerCacheView(index, 0, named=named), index


@pytest.mark.parametrize("size", [1, 16, 48, 64, 128, 200, 512])
def test_pages_of_any_size_make_the_keys_that_requests_have(size: int) -> None:
    whole = len(PROMPT) // size * size
    told, index = view()
    half = whole // size // 2 * size
    assert told.on_message(0, [stored(PROMPT[:half], size=size)] if half else []) is None
    assert depths(index, keys_of(PROMPT)) == ({0: half // BLOCK_TOKENS} if half >= BLOCK_TOKENS else {})
    told.on_message(1, [stored(PROMPT[:whole], at=half, size=size)])
    assert depths(index, keys_of(PROMPT)) == {0: whole // BLOCK_TOKENS}
    assert told.num_tokens == whole
    told.on_message(2, [BlockRemoved([hash((0, whole))])])
    assert depths(index, keys_of(PROMPT)).get(0, 0) == (whole - size) // BLOCK_TOKENS
    index.check()


def test_adapters_without_name_unknown_parents_and_nonsense_are_no_prefix() -> None:
    told, index = view()
    good = stored(PROMPT)
    told.on_message(0, [msgspec.structs.replace(good, lora_id=1), BlockRemoved([99])])
    told.on_message(1, [msgspec.structs.replace(good, parent_block_hash=5, block_hashes=[9, 8, 7, 6])])
    told.on_message(2, [msgspec.structs.replace(good, token_ids=[1]), msgspec.structs.replace(good, block_size=0)])
    told.on_message(3, [BlockStored([77], None, [-1] * BLOCK_TOKENS, BLOCK_TOKENS, None)])
    assert len(index) == 0
    told.on_message(4, [msgspec.structs.replace(good, lora_name="x", extra_keys="s", block_hashes=[21, 22, 23, 24])])
    assert depths(index, keys_of(PROMPT)) == {} and depths(index, keys_of(PROMPT, adapter="x")) == {0: 4}
    assert told.num_tokens == 13 * BLOCK_TOKENS


def test_named_blocks_need_neither_their_parents_nor_pages_inside_a_block() -> None:
    told, index = view(named=True)
    names = [name for name, _ in page_names(open_chain(token_seed()), (), PROMPT, 16)]
    whole = NamesStored(names, None, msgspec.Raw(), 16, None)
    told.on_message(0, [msgspec.structs.replace(whole, block_hashes=names[16:], parent_block_hash=names[15])])
    assert depths(index, keys_of(PROMPT)) == {} and told.num_tokens == 2 * BLOCK_TOKENS
    told.on_message(1, [msgspec.structs.replace(whole, block_hashes=names[:16])])
    assert depths(index, keys_of(PROMPT)) == {0: 4} and len(index) == 4
    told.on_message(2, [NamesRemoved(names[30:])])
    assert depths(index, keys_of(PROMPT)) == {0: 3} and told.num_tokens == 4 * BLOCK_TOKENS - 32
    told.on_message(3, [AllBlocksCleared()])
    assert depths(index, keys_of(PROMPT)) == {} and index.num_blocks(0) == 0
    told.on_message(4, [whole, NamesRemoved(names), NamesRemoved(names)])  # more than there are
    assert told.num_tokens == 0
    index.check()


def test_text_is_guessed_no_further_than_the_worker_has_room() -> None:
    told, index = view()
    told.on_message(0, [stored(PROMPT)])
    index.touch(0, [b"old"])
    index.touch(0, [b"new"])
    told.on_message(1, [stored([9] * 2 * BLOCK_TOKENS)])
    assert depths(index, [b"old"]) == {0: 1}
    told.on_message(2, [BlockRemoved([hash((9, 2 * BLOCK_TOKENS))])])  # 5 blocks, all of ids: no room for text
    assert depths(index, [b"old"]) == {} == depths(index, [b"new"])
    told.on_message(3, [AllBlocksCleared()])
    assert index.num_blocks(0) == 0 == told.num_tokens


def test_gaps_replays_and_restarts() -> None:
    told, index = view()
    first, second = stored(PROMPT[: 2 * BLOCK_TOKENS]), stored(PROMPT, at=2 * BLOCK_TOKENS)
    assert told.on_message(0, [first]) is None
    assert told.on_message(2, [AllBlocksCleared()]) == 1  # 1 is missing
    told.on_replay(1, [second])
    assert depths(index, keys_of(PROMPT)) == {0: 4} and told.whole
    assert told.on_message(2, []) is None and told.on_message(3, []) is None
    told.on_replay(2, [AllBlocksCleared()])  # known already
    assert depths(index, keys_of(PROMPT)) == {0: 4}
    assert told.on_message(7, [second]) == 4
    told.skip_to(7)  # nobody has 4 to 6: all is doubtful
    assert depths(index, keys_of(PROMPT)) == {} and not told.whole and told.num_gaps == 1
    assert told.on_message(7, [second]) is None and depths(index, keys_of(PROMPT)) == {}
    assert told.on_message(0, [first]) is None  # a new life
    assert depths(index, keys_of(PROMPT)) == {0: 2} and told.whole


def test_a_replay_that_does_not_reach_back_far_enough() -> None:
    told, index = view()
    told.on_replay(5, [stored(PROMPT)])
    assert depths(index, keys_of(PROMPT)) == {0: 4} and not told.whole
    assert told.on_message(5, [AllBlocksCleared()]) is None  # the same again, live
    assert told.on_message(6, []) is None
    assert depths(index, keys_of(PROMPT)) == {0: 4}


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([1, 16, 32]))
def test_the_index_agrees_with_the_engines_tree_after_any_story(seed: int, page_size: int) -> None:
    """Inserts, splits, evictions, adapters that come and go, and flushes of a real radix cache, through the wire's bytes: by tokens, and by names."""
    rng = random.Random(seed)
    allocator = PageAllocator(num_pages=60 * 16 // page_size, page_size=page_size)
    events = CacheEvents(page_size=page_size)
    cache = RadixCache(allocator, parts=[events])
    views = [view(10_000), view(10_000, named=True)]
    prompts: list[list[int]] = []
    for seq in range(12):
        base = rng.choice(prompts)[: rng.randrange(700)] if prompts and rng.random() < 0.6 else []
        tokens = [*base, *(rng.randrange(3) for _ in range(rng.randrange(600)))]
        tokens = tokens[: min(len(tokens), 60 * 16) // page_size * page_size]
        prompts.append(tokens)
        branch = rng.choice([TRUNK, TRUNK, Branch("x"), Branch("", ("a",)), Branch("", ("a", "b"))])
        num_pages = len(tokens) // page_size
        if (short := num_pages - allocator.num_free) > 0:
            cache.evict(short)
        pages = allocator.allocate(num_pages)
        inserted = cache.insert(tokens, pages, branch=branch)
        allocator.free(pages[: inserted.existing])
        if rng.random() < 0.1:
            cache.forget("x")
        if rng.random() < 0.1:
            cache.flush()
        if rng.random() < 0.7:
            cache.evict(rng.randrange(1 + num_pages))
        batch = KVEventBatch(0.0, events.take())
        cache.check()
        for (told, index), decode in zip(views, (decode_events, decode_names), strict=False):
            assert told.on_message(seq, decode(encode_batch(batch))) is None
            assert told.num_tokens == cache.num_pages * page_size
            others = Branch("x"), Branch("y"), Branch("", ("a",)), Branch("", ("a", "b")), Branch("", ("ab",))
            for prompt, of_one in itertools.product(prompts, (TRUNK, *others)):
                cached = len(cache.match(prompt, branch=of_one).pages) * page_size
                keys = keys_of(prompt, of_one.namespace, adapter=of_one.variant)
                assert depths(index, keys).get(0, 0) == cached // BLOCK_TOKENS
            index.check()


def test_a_batch_is_read_alike_by_its_types_and_leniently() -> None:
    batch = KVEventBatch(1.0, [stored(PROMPT), BlockRemoved([1, b"2"]), AllBlocksCleared()])
    assert decode_events(encode_batch(batch)) == _decode_leniently(encode_batch(batch)) == batch.events


@pytest.mark.parametrize(("named", "text_blocks"), [(True, 2), (False, 2), (False, 0)])
def test_a_router_finds_text_before_the_first_image_and_counts_what_follows(named: bool, text_blocks: int) -> None:
    """No request brings ids of an image, so none is found behind its first token, and none by its placeholders."""
    allocator, events = PageAllocator(num_pages=80, page_size=16), CacheEvents(page_size=16)
    cache, text = RadixCache(allocator, parts=[events]), PROMPT[: text_blocks * BLOCK_TOKENS]
    tokens = [*text, *[5] * BLOCK_TOKENS, *range(BLOCK_TOKENS)]
    for number in (1, 2):
        keyed = key_ids([image(number, at=len(text), rows=8, columns=16)], tokens, 0)
        held = allocator.allocate(len(tokens) // 16)
        allocator.free(held[: cache.insert(keyed, held).existing])
    seen, index = view(named=named)
    payload = encode_batch(KVEventBatch(0.0, events.take()))
    seen.on_message(0, decode_names(payload) if named else decode_events(payload))
    assert seen.num_tokens == 2 * len(tokens) - len(text) and seen.whole
    assert [depths(index, keys_of(prompt)).get(0, 0) for prompt in (text, tokens)] == [text_blocks] * 2
