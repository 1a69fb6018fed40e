"""KV events over real sockets: an engine publishes, and the router's feed follows many workers."""

import asyncio
import queue
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest

from engine.core.mem_cache.cache_events import CacheEvents
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import RadixCache
from engine.flags.kv_events_config import KVEventsConfig
from engine.loop.kv_events import ZmqPublisher
from router.choice.kv_feed import KVEventFeed, _Turns
from router.choice.kv_view import NamedBlocks, TokenBlocks
from router.choice.policies import make_chooser
from router.choice.prefix_index import PrefixIndex
from router.config import RouterConfig
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from service.flags import ConfigError
from service.kv_events import (
    BLOCK_TOKENS,
    BlockRemoved,
)
from service.process.start import allow_many_files
from tests.router.choice.test_kv_events import PROMPT, keys_of, stored
from tests.router.dummies import depths, until


def publisher(
    *, replay: bool = True, secret: bytes | None = None, events: CacheEvents | None = None, **settings: Any
) -> ZmqPublisher:
    replay_endpoint = "tcp://127.0.0.1:*" if replay else None
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint=replay_endpoint, **settings)
    return ZmqPublisher(config, secret=secret, events=events)


@asynccontextmanager
async def feed(*, secret: bytes | None = None) -> AsyncIterator[tuple[KVEventFeed, PrefixIndex, Worker]]:
    config = RouterConfig(pd_disaggregation=True, policy="cache_aware")
    chooser = make_chooser(config, draw=random.Random(0).randrange)
    index = chooser.index
    assert index is not None
    events = KVEventFeed(chooser=chooser, secret=secret)
    try:
        yield events, index, WorkerTable().add("http://127.0.0.1:1", role=Role.PREFILL)
    finally:
        await events.close()


def info_of(source: ZmqPublisher) -> dict[str, object]:
    return {"kv_events_config": source.describe()}


async def publish_until(source: ZmqPublisher, reached: Callable[[], object]) -> None:
    """Nothing announces that a subscription is there: publish empty batches until one arrives."""
    await until(lambda: source.publish([]) or reached())


@pytest.mark.parametrize("secret", [None, b"only this cluster knows it"])
async def test_a_late_subscriber_learns_all_and_a_second_life_is_noticed(secret: bytes | None) -> None:
    source = publisher(secret=secret)
    try:
        source.publish([stored(PROMPT)])
        async with feed(secret=secret) as (events, index, worker):
            events.on_info(worker, info_of(source))
            await until(lambda: depths(index, keys_of(PROMPT)) == {0: 4})
            view = events.view_of(worker)
            await publish_until(source, lambda: view is not None and view._last_live > 0)
            source.publish([BlockRemoved([hash((0, 4 * BLOCK_TOKENS))])])
            await until(lambda: depths(index, keys_of(PROMPT)) == {0: 3})
            events.on_gone(worker)
            assert depths(index, keys_of(PROMPT)) == {} and events.view_of(worker) is None
            source.close()
            source = publisher(secret=secret)
            source.publish([stored(PROMPT[: 2 * BLOCK_TOKENS])])
            events.on_info(worker, info_of(source))
            await until(lambda: depths(index, keys_of(PROMPT)) == {0: 2})
    finally:
        source.close()


@pytest.mark.parametrize(("page_size", "blocks"), [(16, NamedBlocks), (48, TokenBlocks)])
async def test_a_worker_says_whether_the_router_knows_its_names(page_size: int, blocks: type) -> None:
    recorded = CacheEvents(page_size=page_size)
    allocator = PageAllocator(num_pages=64, page_size=page_size)
    cache = RadixCache(allocator, parts=[recorded])
    cache.insert(PROMPT[: 3 * BLOCK_TOKENS], allocator.allocate(3 * BLOCK_TOKENS // page_size))
    with closing(publisher(events=recorded)) as source:
        source.on_planned(0.0)
        async with feed() as (events, index, worker):
            events.on_info(worker, info_of(source))
            await until(lambda: depths(index, keys_of(PROMPT)) == {0: 3})
            view = events.view_of(worker)
            assert view is not None and type(view._blocks) is blocks


async def test_without_replay_a_gap_drops_what_was_known() -> None:
    with closing(publisher(replay=False)) as source:
        async with feed() as (events, index, worker):
            events.on_info(worker, info_of(source))
            view = events.view_of(worker)
            assert view is not None
            await publish_until(source, lambda: view._last_live >= 0)
            source.publish([stored(PROMPT)])
            await until(lambda: depths(index, keys_of(PROMPT)) == {0: 4})
            gaps = view.num_gaps
            source._next += 3  # batches that the queue had no room for
            source.publish([])
            await until(lambda: view.num_gaps == gaps + 1)
            assert depths(index, keys_of(PROMPT)) == {} and not view.whole


async def test_strangers_learn_nothing_and_junk_on_the_replay_socket_changes_nothing() -> None:
    with closing(publisher(secret=b"only this cluster knows it")) as source:
        source.publish([stored(PROMPT)])
        async with feed(secret=b"another secret altogether") as (stranger, nothing, at):
            stranger.on_info(at, info_of(source))
            async with feed(secret=b"only this cluster knows it") as (events, index, worker):
                events.on_info(worker, info_of(source))
                await until(lambda: depths(index, keys_of(PROMPT)) == {0: 4})
            assert len(nothing) == 0 and stranger.view_of(at) is not None
        async with feed() as (outsider, _, at):
            outsider.on_info(at, info_of(source))
            assert outsider.view_of(at) is None


async def test_more_workers_are_followed_than_zmq_has_sockets_by_default() -> None:
    allow_many_files()
    with closing(publisher()) as source:
        source.publish([stored(PROMPT)])
        async with feed() as (events, _, _):
            table = WorkerTable()
            workers = [table.add(f"http://127.0.0.1:{number}", role=Role.PREFILL) for number in range(1, 1101)]
            for worker in workers:
                events.on_info(worker, info_of(source))
            views = [view for worker in workers if (view := events.view_of(worker)) is not None]
            await until(lambda: all(view.num_tokens for view in views))
            assert len(views) == 1100


async def test_a_flood_of_events_leaves_the_event_loop_time_for_others() -> None:
    """Each reader has its turn, and other callbacks come in between."""
    turns, reads = _Turns(), dict.fromkeys(range(50), 0)

    class Endless:
        def __init__(self, number: int) -> None:
            self.number = number

        def read_one(self) -> bool:
            reads[self.number] += 1
            return not over

    over, others = False, 0
    for number in reads:
        turns.add(Endless(number))  # type: ignore[arg-type]
    while min(reads.values()) < 100 or others < 3:  # a turn without an end would never let this go on
        await asyncio.sleep(0)
        others += 1
    over = True
    assert max(reads.values()) - min(reads.values()) <= 1
    await until(lambda: not turns._ready)


def test_a_full_queue_drops_batches_and_their_numbers(caplog: pytest.LogCaptureFixture) -> None:
    source = publisher(max_queue_size=1)
    source._queue.put_nowait = _full  # type: ignore[method-assign]
    source.publish([])
    source.close()
    assert source._next == 1 and "dropped" in caplog.text


def _full(item: object) -> None:
    raise queue.Full


def test_a_port_that_is_taken_is_named() -> None:
    with closing(publisher()) as source:
        taken = msgspec.json.decode(source.describe())["endpoint"]
        with pytest.raises(ConfigError, match="--kv-events-config: cannot listen at "):
            ZmqPublisher(KVEventsConfig(endpoint=taken))
