"""Heartbeats of one worker (service/http/heartbeats.py) over a long stream, in place of checks.

    closed --open--> opened --BEATS in a row--> trusted --LATE--> late --limit--> silent
       ^   stream ends, or checks                    ^              |                |
       |   are answered although late                +--- a beat ---+----------------+

A late worker is checked over HTTP, so a lost stream costs nothing. A worker without heartbeats is
checked at intervals.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import msgspec

from router.client.credentials import Credentials
from router.client.upstream import HttpReply, Upstream, nothing
from router.pool.active_calls import last_sign_s
from router.pool.worker import Worker
from service.http.heartbeats import PATH, Beat, HeartbeatReader, NoHeartbeats
from service.waiter import loop_time_s

# ---- probes

BEATS = 4  # probes per silence limit
ROUNDING_S = 0.001  # precision of timers
MAX_ANSWER_BYTES = 4 << 20
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True, kw_only=True)
class Prober:
    """HTTP probes of one worker, and detection of its silence.

    `on_silence(worker, silent)` is called repeatedly. Silence before a failed check only makes
    requests prefer other workers. Streaming workers are never silent. Without heartbeats busy,
    silent workers are probed every quarter of the limit.

        last byte ---- probe ---- probe ---- probe ---- limit: its requests move
    """

    session: aiohttp.ClientSession
    credentials: Credentials
    timeout_s: float
    silence_s: float
    on_silence: Callable[[Worker, bool], None]

    @property
    def beat_s(self) -> float:
        return self.silence_s / BEATS

    def why(self, path: str, error: Exception) -> str:
        """`error`: one of `FAILURES`."""
        late = f"no answer in {self.timeout_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
        return f"{path}: {str(error) or late}"

    async def get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """Status and body. Raises one of `FAILURES`."""
        silence, timeout = None, aiohttp.ClientTimeout(total=self.timeout_s)
        if self.silence_s:
            report = partial(self.on_silence, worker)
            silence = SilenceTimer(
                limit_s=self.silence_s, beat_s=self.beat_s, received_s=partial(last_sign_s, worker), report=report
            )
        try:
            async with self.session.get(
                worker.url + path, timeout=timeout, headers=self.credentials.own(), allow_redirects=False
            ) as response:
                status, body = response.status, await _read_bounded(response)
            worker.checks.heard_s = loop_time_s()
            self.on_silence(worker, False)
            return status, body
        finally:
            if silence is not None:
                silence.close()

    async def first_json(self, worker: Worker, paths: tuple[str, ...]) -> tuple[Any, str]:
        error = ""
        for path in paths:
            try:
                status, body = await self.get(worker, path)
                if status == 200:
                    return msgspec.json.decode(body), ""
            except (ValueError, RecursionError):
                continue
            except FAILURES as err:
                error = self.why(path, err)
        return None, error


class SilenceTimer:
    """Calls `report(silent)` after `limit_s` without bytes, repeatedly until `close`.

    The silence may have started `beat_s` before. A loop that was blocked reads first.
    """

    __slots__ = ("_due_s", "_limit_s", "_loop", "_received_s", "_report", "_sent_s", "_timer")

    def __init__(
        self, *, limit_s: float, received_s: Callable[[], float], report: Callable[[bool], None], beat_s: float = 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time() - beat_s
        self._limit_s = limit_s
        self._received_s = received_s
        self._report = report
        self._wait(limit_s - beat_s)

    def close(self) -> None:
        self._timer.cancel()

    def _on_timer(self) -> None:
        now_s = self._loop.time()
        if now_s - self._due_s > self._limit_s / BEATS:
            return self._wait(self._limit_s / BEATS)
        quiet_s = now_s - max(self._sent_s, self._received_s())
        silent = quiet_s >= self._limit_s - ROUNDING_S  # the rest would be below the clock's precision
        self._report(silent)
        return self._wait(self._limit_s - (0.0 if silent else quiet_s))

    def _wait(self, seconds: float) -> None:
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._on_timer)


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        parts.append(chunk)
    return b"".join(parts)


# ---- heartbeats

LATE = 0.75  # fraction of the limit
OPEN_S = 86400.0  # lifetime of a stream


@dataclass(eq=False, kw_only=True)
class Heartbeats:
    """`silence_s` is the limit, unless beats are too rare; `every_s()` the requested interval.
    `on_silence` is called repeatedly. `ask` requests a check: a late beat, the begin or end of a
    problem, or the end of silence, rest or stream.
    """

    worker: Worker
    upstream: Upstream
    headers: Callable[[], Mapping[str, str]]
    silence_s: float
    every_s: Callable[[], float]
    on_silence: Callable[[Worker, bool], None]
    ask: Callable[[], None]
    is_late: bool = False
    _reply: HttpReply | None = None
    _reader: HeartbeatReader = field(default_factory=HeartbeatReader)
    _asked_s: float = 0.0  # requested interval
    _beat: Beat | None = None  # latest one
    _beat_s: float = -math.inf  # its arrival
    _in_a_row: int = 0
    _ran: bool = True
    rests: bool = False  # idle since the last `took_rest`
    _unknown: bool = False  # route missing in this process
    _late: SilenceTimer | None = None
    _silence: SilenceTimer | None = None  # set while late

    @property
    def trusted(self) -> bool:
        """Missing beats mean a silent worker."""
        return self._late is not None

    @property
    def fine(self) -> bool:
        return self.trusted and not self.is_late and self._beat is not None and self._beat.fine

    def took_rest(self) -> bool:
        """Return whether it was idle since the last call."""
        ran, self._ran = self._ran, False
        self.rests = self.fine and not ran
        return self.rests

    def open(self, *, is_new: bool) -> None:
        """`is_new`: perhaps another process."""
        self._unknown = self._unknown and not is_new
        if self._reply is not None or self._unknown:
            return
        self._asked_s, self._reader = self.every_s(), HeartbeatReader()
        self._in_a_row, self._beat_s, self._ran = 0, -math.inf, True
        path = f"{PATH}?every={self._asked_s:g}"
        self._reply = self.upstream.get(self.worker.url, path, headers=self.headers(), timeout_s=OPEN_S)
        self._reply.listener = self._on_reply

    def close(self) -> None:
        reply, self._reply = self._reply, None
        if self._late is not None:
            self._late.close()
        self._end_silence()
        self._late, self.is_late, self._beat, self.worker.beats, self.rests = None, False, None, False, False
        if reply is not None:
            reply.listener = nothing
            reply.close()

    def on_answer(self) -> None:
        """Close the stream if beats are missing despite answered checks."""
        if self.is_late and loop_time_s() - self._beat_s >= 2 * self._limit_s:
            self.close()

    @property
    def _limit_s(self) -> float:
        return max(self.silence_s, BEATS * self._reader.every_s)

    def _on_reply(self) -> None:
        reply = self._reply
        assert reply is not None
        if reply.status not in (0, 200):
            self._unknown = reply.status < 500
            return self.close()
        try:
            if beats := self._reader.read(reply.take()):
                self._on_beats(beats)
        except NoHeartbeats:
            self._unknown = True
        if self._reader.every_s > self._asked_s + ROUNDING_S:  # too rare for the limit
            self._unknown = True
        if self._unknown:
            return self.close()
        if reply.complete or reply.error is not None:
            was_open = self._reader.every_s > 0
            self.close()
            if was_open:
                self.ask()
        return None

    def _on_beats(self, beats: Sequence[Beat]) -> None:
        """Beats that arrive together, perhaps delayed, count as one."""
        beat, now_s, before, was_late = beats[-1], loop_time_s(), self._beat, self.is_late
        in_time = now_s - self._beat_s <= self._limit_s
        self._in_a_row = self._in_a_row + 1 if in_time else 1
        self._beat, self._beat_s, self.is_late = beat, now_s, False
        self.worker.checks.heard_s = now_s
        self._ran = self._ran or not all(one.rests for one in beats)
        if not self.trusted:
            if self._in_a_row >= BEATS:
                limit_s = LATE * self._limit_s
                self._late = SilenceTimer(limit_s=limit_s, received_s=lambda: self._beat_s, report=self._on_late)
                self.worker.beats = True
            return
        self.worker.process.busy_s = beat.busy_s
        if was_late:
            self._end_silence()
            self.on_silence(self.worker, False)
        runs_again, self.rests = self.rests and self._ran, self.rests and not self._ran
        if was_late or runs_again or (before is not None and before.fine != beat.fine):
            self.ask()

    def _on_late(self, late: bool) -> None:
        if not late or self.is_late:
            return
        self.is_late = True
        self._silence = SilenceTimer(
            limit_s=self._limit_s,
            beat_s=LATE * self._limit_s,
            received_s=partial(last_sign_s, self.worker),
            report=partial(self.on_silence, self.worker),
        )
        self.ask()

    def _end_silence(self) -> None:
        if self._silence is not None:
            self._silence.close()
            self._silence = None
