"""What a worker keeps of its streams for clients that come again, and which of it must be found there.

Stands in for the handlers of engine/frontend/apis/shared/retained.py; what is kept, for how long and for whom is production code.
"""

import msgspec

from engine.frontend.apis.shared.retained import head_of, keep_of, log_of
from engine.frontend.client.generation import Generation
from service.http.errors import ApiError, decode_body
from service.http.reconnect import KEEP_HEADER, MAX_KEPT_BYTES, RetainedQuestion, StreamLog, StreamLogs
from service.http.resume import Begun, Resume
from service.http.routes import REQUEST_ID_HEADER
from service.process.stop_signals import StopSignals
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request
from tools.simulation.options import SECRET
from tools.simulation.world import Process, Violation


class KeptStreams:
    """Those of one life of a worker."""

    def __init__(self, process: Process, aio: VirtualLoop, signals: StopSignals, *, most_bytes: int) -> None:
        self._process = process
        self._aio = aio
        self._signals = signals
        self._tags = process.world.rng(f"tags/{process.name}")
        self._most_bytes = most_bytes
        self._logs = StreamLogs(most_bytes=most_bytes)
        self._windows_s: dict[str, float] = {}  # of all that were ever begun here, by tag
        self._ended_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def open(self, request: Request, generation: Generation, begun: Begun, resume: Resume | None) -> StreamLog | None:
        if KEEP_HEADER not in request.headers:
            return None
        log = log_of(
            generation,
            keep=keep_of(request.headers[KEEP_HEADER], SECRET),
            tag=f"{self._tags.getrandbits(64):016x}",
            request_id=request.headers[REQUEST_ID_HEADER],
            head=head_of(begun, resume),
        )
        self._logs.open(log)
        self._windows_s[log.tag] = log.keep.window_s
        return log

    def end(self, log: StreamLog) -> None:
        self._ended_s[log.tag] = now_s = self._aio.time()
        self._logs.ended(log, now_s)
        self._aio.call_later(log.keep.window_s, lambda: self._logs.forget_old(self._aio.time()))

    async def answer(self, request: Request, reply: Reply) -> None:
        rest = self._logs.rest(decode_body(request.body, RetainedQuestion), self._aio.time())
        if rest is None:
            raise ApiError(404, "no such stream is kept here")
        reply.whole(200, msgspec.json.encode(rest))

    # ---- what must hold

    def check(self) -> None:
        logs = self._logs
        ended = [log for log in logs._streams.values() if log.has_ended]
        if {log.tag for log in ended} != logs._due_s.keys() or sum(log.num_bytes for log in ended) != logs._ended_bytes:
            raise Violation(f"{self._process.name}: kept streams are counted wrong")
        if logs._ended_bytes > self._most_bytes:
            raise Violation(f"{self._process.name}: keeps {logs._ended_bytes} bytes of streams that have ended")

    @property
    def node(self) -> str:
        return self._process.node

    def began(self, tag: str) -> bool:
        return tag in self._windows_s

    def why_gone(self, tag: str) -> str:
        """Return why a stream that began here is kept no more; "": it must be."""
        if not self._process.alive or self._signals.requested.is_set():
            return "its worker is dead, or ends"
        if self._ended_s.get(tag, self._aio.time()) + self._windows_s[tag] <= self._aio.time():
            return "its window is over"
        if self._most_bytes < MAX_KEPT_BYTES:
            return "others may have taken its place"
        return ""
