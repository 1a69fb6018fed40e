"""ZMQ publisher of prefix cache events: a thread with two sockets and a bounded queue.

A full queue drops a batch with its number, so subscribers detect the gap. Sockets, frames and names
are vLLM's (service/kv_events.py). With a cluster secret both require it: events have tokens.
"""

import json
import logging
import queue
import threading
import time
from collections import deque
from typing import Any

import zmq

from engine.core.mem_cache.cache_events import PrefixEvents
from engine.flags.kv_events_config import FLAG, KVEventsConfig
from engine.loop.listeners import LoopListener
from service.flags import ConfigError
from service.kv_events import END_SEQ, VERSION, KVEvent, KVEventBatch, encode_batch, seq_bytes
from service.security.curve import ZapAuthenticator, guard_listener

log = logging.getLogger(__name__)

POLL_MS = 20  # maximum delay of replay requests and the end while idle
MAX_REQUEST_BYTES = 1024
LINGER_MS = 200


class ZmqPublisher(LoopListener):
    """Publisher, bound at once; `events` is None without prefix cache. Raises ConfigError."""

    def __init__(
        self,
        config: KVEventsConfig,
        *,
        events: PrefixEvents | None = None,
        secret: bytes | None = None,
        dp_rank: int | None = None,
    ) -> None:
        self._config = config
        self._events = events
        self._dp_rank = dp_rank
        self._queue: queue.Queue[tuple[int, KVEventBatch]] = queue.Queue(config.max_queue_size)
        self._next = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._authenticator = None if secret is None else ZapAuthenticator(self._context, secret)
        self._pub = self._replay = None
        try:
            self._pub = self._bound(zmq.PUB, config.endpoint, secret)
            if config.replay_endpoint is not None:
                self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, secret)
        except ConfigError:
            self._close_sockets()
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """JSON for /server_info: ports, secret, block naming."""
        assert self._pub is not None
        shown = {
            "publisher": self._config.publisher,
            "endpoint": _endpoint(self._pub),
            "replay_endpoint": None if self._replay is None else _endpoint(self._replay),
            "topic": self._config.topic,
            "curve": self._authenticator is not None,
            "prefix_names": VERSION if self._events is not None and self._events.named else None,
        }
        return json.dumps(shown)

    def on_planned(self, now_s: float) -> None:
        self._publish_changes()

    def on_rest(self, now_s: float) -> None:
        self._publish_changes()

    def _publish_changes(self) -> None:
        if self._events is not None and (changes := self._events.take()):
            self.publish(changes)

    def publish(self, events: list[KVEvent]) -> None:
        """Never blocks."""
        seq, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((seq, KVEventBatch(time.time(), events, self._dp_rank)))
        except queue.Full:
            log.warning("%s: %d batches wait to be sent; one is dropped", FLAG, self._config.max_queue_size)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._send_next()
                self._serve_others()
            while not self._queue.empty():
                self._send_next()
        finally:
            self._close_sockets()

    def _send_next(self) -> None:
        try:
            seq, batch = self._queue.get(timeout=POLL_MS / 1000)
        except queue.Empty:
            return
        assert self._pub is not None
        payload = encode_batch(batch)
        self._sent.append((seq, payload))
        self._pub.send_multipart([self._config.topic.encode(), seq_bytes(seq), payload])

    def _serve_others(self) -> None:
        if self._authenticator is not None:
            self._authenticator.answer()
        while self._replay is not None and self._replay.poll(0):
            self._answer(self._replay, self._replay.recv_multipart())

    def _answer(self, replay: Any, frames: list[bytes]) -> None:
        """Send missed batches, not waiting for a slow subscriber."""
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("%s: a replay request of another form; ignored", FLAG)
            return
        start = int.from_bytes(frames[2], "big")
        for seq, payload in list(self._sent):
            if seq >= start:
                replay.send_multipart([frames[0], b"", seq_bytes(seq), payload])
        replay.send_multipart([frames[0], b"", END_SEQ, b""])

    # ---- sockets

    def _bound(self, kind: int, endpoint: str, secret: bytes | None) -> Any:
        sock: Any = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, LINGER_MS)
        sock.setsockopt(zmq.SNDHWM, self._config.hwm)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        sock.setsockopt(zmq.IPV6, "[" in endpoint)
        if secret is not None:
            guard_listener(sock, secret)
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            sock.close(0)
            raise ConfigError(f"{FLAG}: cannot listen at {endpoint}: {error}") from error
        return sock

    def _close_sockets(self) -> None:
        for sock in (self._pub, self._replay):
            if sock is not None:
                sock.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()


def _endpoint(sock: Any) -> str:
    last: bytes = sock.getsockopt(zmq.LAST_ENDPOINT)
    return last.rstrip(b"\0").decode()
