"""Subscriber of workers' KV events (ZMQ), for the prefix index.

Missed events are requested at the replay address; without one the prefixes are dropped. The event
loop reads sockets in small portions (`_Turns`). Beyond `RECEIVE_HWM` messages per worker are lost,
which shows as a gap.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from router.choice.kv_view import WorkerCacheView
from router.choice.policies import Chooser
from router.pool.reports import EventSource, Info, parse_event_source
from router.pool.worker import MAX_WORKERS, Worker
from service.kv_events import (
    END_SEQ,
    MAX_MESSAGE_BYTES,
    AnyEvent,
    BadEvent,
    Decode,
    decode_events,
    decode_names,
    read_message,
    read_seq,
    seq_bytes,
)
from service.security.curve import guard_connector
from service.waiter import Waiter, end_tasks

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
RECEIVE_HWM = 256  # waiting messages of a worker
TURN_S = 0.002  # of the event loop at once
MAX_REPLAYS = 32  # at a time
SOCKETS_EACH = 4  # one, another during a replay, and those of gone workers, which close later


Message = tuple[int, Sequence[AnyEvent]]  # number, events


@dataclass(eq=False, kw_only=True)
class KVEventFeed:
    """Subscriptions by worker. `secret` is for CURVE."""

    chooser: Chooser
    secret: bytes | None
    enabled: bool = True
    _context: zmq.asyncio.Context | None = None
    _replays: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_REPLAYS))
    _turns: "_Turns" = field(default_factory=lambda: _Turns())
    _followers: dict[int, "_Follower"] = field(default_factory=dict)

    def on_info(self, worker: Worker, info: Info) -> None:
        index = self.chooser.index if self.enabled else None
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
            self._context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * MAX_WORKERS)  # the default of a thousand is too few
        view = WorkerCacheView(index, worker.worker_id, named=source.named)
        secret = self.secret if source.curve else None
        decode = decode_names if source.named else decode_events
        follower = _Follower(self._context, source, view, secret, self._replays, self._turns, decode)
        self._followers[worker.worker_id] = follower
        follower.task = asyncio.create_task(follower.run(), name=f"kv events {worker.url}")

    def on_gone(self, worker: Worker) -> None:
        self._stop(worker)
        self.chooser.forget(worker)

    def num_prefixes(self, worker: Worker) -> int | None:
        index = self.chooser.index
        return None if index is None else index.num_blocks(worker.worker_id)

    def view_of(self, worker: Worker) -> WorkerCacheView | None:
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
    replays: asyncio.Semaphore
    turns: "_Turns"
    decode: Decode
    task: "asyncio.Task[None] | None" = None

    async def run(self) -> None:
        with self._socket(zmq.SUB, self.source.endpoint, zmq.Socket) as sub:  # futures cost more than most messages
            sub.subscribe(self.source.topic.encode())
            await self._catch_up(0)
            reader = _Reader(sub, self._read, self.turns)
            try:
                while True:
                    seq, events = await reader.gap()
                    await self._catch_up(self.view.next)
                    self.view.skip_to(seq)
                    self.view.on_message(seq, events)
            finally:
                reader.close()

    def _read(self, frames: list[bytes]) -> "Message | None":
        try:
            seq, events = read_message(frames, self.decode)
        except BadEvent as error:
            log.warning("KV events of %s: %s; its prefixes are forgotten", self.source.endpoint, error)
            self.view.lose()
            return None
        return None if self.view.on_message(seq, events) is None else (seq, events)

    async def _catch_up(self, start: int) -> None:
        if self.source.replay_endpoint is None:
            return
        async with self.replays:
            await self._replay(start, self.source.replay_endpoint)

    async def _replay(self, start: int, endpoint: str) -> None:
        with self._socket(zmq.DEALER, endpoint, None) as dealer:
            try:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    await dealer.send_multipart([b"", seq_bytes(start)])
                    while (frames := await dealer.recv_multipart())[1] != END_SEQ:
                        self.view.on_replay(read_seq(frames[1]), self.decode(frames[2]))
                        await asyncio.sleep(0)
            except (TimeoutError, BadEvent, IndexError) as error:
                log.warning("KV events of %s: no replay (%s)", endpoint, str(error) or "too slow")

    def _socket(self, kind: int, endpoint: str, socket_class: Callable[..., Any] | None) -> Any:
        sock: Any = self.context.socket(kind, socket_class=socket_class)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.IPV6, "[" in endpoint)
        if self.secret is not None:
            guard_connector(sock, self.secret)
        sock.connect(endpoint)
        return sock


class _Reader:
    """Reads a socket in the event loop until `take` returns a message after a gap."""

    def __init__(self, sock: Any, take: Callable[[list[bytes]], Message | None], turns: "_Turns") -> None:
        self._sock, self._take, self._turns = sock, take, turns
        self._loop = asyncio.get_running_loop()
        self._waiter = Waiter()
        self._gap: Message | None = None
        self._reads = False
        self._file = sock.getsockopt(zmq.FD)

    async def gap(self) -> Message:
        self._reads = True
        self._loop.add_reader(self._file, self._turns.add, self)
        self._turns.add(self)  # the descriptor only signals later messages
        while self._gap is None:
            await self._waiter.wait()
        found, self._gap = self._gap, None
        return found

    def close(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._file)

    def read_one(self) -> bool:
        if not self._reads:
            return False
        try:
            frames = self._sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._gap = self._take(frames)
        if self._gap is None:
            return bool(self._sock.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # a third of the cost of an empty read
        self.close()
        self._waiter.wake()
        return False


class _Turns:
    """Round robin over readers; after `TURN_S` all rest as long."""

    def __init__(self) -> None:
        self._ready: dict[_Reader, None] = {}
        self._waits = False

    def add(self, reader: _Reader) -> None:
        self._ready[reader] = None
        if not self._waits:
            self._waits = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        self._waits = False
        begun_s = time.monotonic()
        while self._ready:
            reader = next(iter(self._ready))
            del self._ready[reader]
            if reader.read_one():
                self._ready[reader] = None
            if time.monotonic() - begun_s >= TURN_S:
                break
        if self._ready:
            self._waits = True
            asyncio.get_running_loop().call_later(time.monotonic() - begun_s, self._read)
