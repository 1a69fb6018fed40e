"""Receives the workers' KV events (ZMQ) for the prefix index of a cache-aware policy: one task per worker that publishes.

Missed events, at the start as well, are requested at the worker's replay address; without one the known prefixes are dropped.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from router.choice.chooser import Chooser
from router.choice.kv_view import WorkerCacheView
from router.pool.reports import EventSource, parse_event_source
from router.pool.worker import Worker
from service.kv_events import END_SEQ, MAX_MESSAGE_BYTES, BadEvent, decode_events, read_message, read_seq, seq_bytes
from service.security.curve import guard_connector
from service.waiter import end_tasks

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
RECEIVE_HWM = 10_000  # messages that wait here; more are lost, and the gap is seen


@dataclass(eq=False, kw_only=True)
class KVEventFeed:
    """`secret`: the cluster's, for workers that ask for it."""

    chooser: Chooser
    secret: bytes | None
    enabled: bool = True
    _context: zmq.asyncio.Context | None = None
    _followers: dict[int, "_Follower"] = field(default_factory=dict)

    def on_info(self, worker: Worker, info: object) -> None:
        """Follow the events of a worker by its `/server_info`, or those at its new address."""
        index = self.chooser.cache_of(worker.role) if self.enabled else None
        source = parse_event_source(info, url_host=worker.url_host) if index is not None else None
        follower = self._followers.get(worker.worker_id)
        if index is None or (follower is not None and follower.source == source):
            return
        self._stop(worker)
        if source is None:
            return
        if source.curve and self.secret is None:
            log.warning("%s publishes KV events for members of its cluster; give --cluster-secret-file", worker.url)
            return
        if self._context is None:
            self._context = zmq.asyncio.Context()
        view, secret = WorkerCacheView(index, worker.worker_id), self.secret if source.curve else None
        follower = self._followers[worker.worker_id] = _Follower(self._context, source, view, secret)
        follower.task = asyncio.create_task(follower.run(), name=f"kv events {worker.url}")

    def on_gone(self, worker: Worker) -> None:
        self._stop(worker)
        self.chooser.forget(worker)

    def num_prefixes(self, worker: Worker) -> int | None:
        index = self.chooser.cache_of(worker.role)
        return None if index is None else index.num_blocks(worker.worker_id)

    def view_of(self, worker: Worker) -> WorkerCacheView | None:
        """The cache by the worker's events; None: it is not followed."""
        follower = self._followers.get(worker.worker_id)
        return None if follower is None else follower.view

    async def close(self) -> None:
        tasks = [follower.task for follower in self._followers.values() if follower.task is not None]
        self._followers.clear()
        await end_tasks(tasks)
        if self._context is not None:
            self._context.destroy(linger=0)

    def _stop(self, worker: Worker) -> None:
        follower = self._followers.pop(worker.worker_id, None)
        if follower is not None and follower.task is not None:
            follower.task.cancel()


@dataclass(slots=True)
class _Follower:
    context: zmq.asyncio.Context
    source: EventSource
    view: WorkerCacheView
    secret: bytes | None
    task: "asyncio.Task[None] | None" = None

    async def run(self) -> None:
        with self._socket(zmq.SUB, self.source.endpoint) as sub:
            sub.subscribe(self.source.topic.encode())
            await self._catch_up(0)
            while True:
                await self._read(await sub.recv_multipart())
                await asyncio.sleep(0)  # messages that have arrived come without a pause: let other tasks run

    async def _read(self, frames: list[bytes]) -> None:
        try:
            seq, events = read_message(frames)
        except BadEvent as error:
            log.warning("KV events of %s: %s; what is known of it is dropped", self.source.endpoint, error)
            self.view.lose()
            return
        missing = self.view.on_message(seq, events)
        if missing is not None:
            await self._catch_up(missing)
            self.view.skip_to(seq)
            self.view.on_message(seq, events)

    async def _catch_up(self, start: int) -> None:
        """Read messages from `start` on, as far as the worker still has them."""
        if self.source.replay_endpoint is None:
            return
        with self._socket(zmq.DEALER, self.source.replay_endpoint) as dealer:
            try:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    await dealer.send_multipart([b"", seq_bytes(start)])
                    while (frames := await dealer.recv_multipart())[1] != END_SEQ:
                        self.view.on_replay(read_seq(frames[1]), decode_events(frames[2]))
                        await asyncio.sleep(0)
            except (TimeoutError, BadEvent, IndexError) as error:
                log.warning("KV events of %s: no replay (%s)", self.source.replay_endpoint, str(error) or "too slow")

    def _socket(self, kind: int, endpoint: str) -> Any:
        sock: Any = self.context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.IPV6, "[" in endpoint)
        if self.secret is not None:
            guard_connector(sock, self.secret)
        sock.connect(endpoint)
        return sock
