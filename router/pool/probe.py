"""Asks one worker at a time over HTTP, and notices its silence meanwhile.

A process that is frozen, or behind a cut cable, refuses no connection. Its silence is noticed sooner than a failed check, and means less:
new requests go elsewhere if they can, until the first answer. A worker that streams is never silent. One that sends heartbeats (heartbeats.py)
is probed when they are late. Of the others, a busy and silent worker is probed every quarter of the limit, at any check interval; an idle
one is not.

    last byte ---- a beat: asked ---- a beat ---- a beat ---- a beat: the limit, its requests move
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import msgspec

from router.client.credentials import Credentials
from router.pool.active_calls import last_sign_s
from router.pool.worker import Worker
from service.waiter import loop_time_s

BEATS = 4  # in the limit of a silence
ROUNDING_S = 0.001  # timers are no more exact than this
MAX_ANSWER_BYTES = 4 << 20
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True, kw_only=True)
class Prober:
    """`silence_s`: 0: no limit. `on_silence(worker, silent)` is called repeatedly, with False for each answer."""

    session: aiohttp.ClientSession
    credentials: Credentials
    timeout_s: float
    silence_s: float
    on_silence: Callable[[Worker, bool], None]

    @property
    def beat_s(self) -> float:
        return self.silence_s / BEATS

    async def get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """(status, body). Raises one of `FAILURES`."""
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
            worker.heard_s = loop_time_s()
            self.on_silence(worker, False)
            return status, body
        finally:
            if silence is not None:
                silence.close()

    async def first_json(self, worker: Worker, paths: tuple[str, ...]) -> tuple[Any, str]:
        """(the first JSON answer of `paths`, ""); (None, "") without one; (None, why) if a path got no answer."""
        error = ""
        for path in paths:
            try:
                status, body = await self.get(worker, path)
                if status == 200:
                    return msgspec.json.decode(body), ""
            except (ValueError, RecursionError):
                continue
            except FAILURES as err:
                error = f"{path}: {str(err) or type(err).__name__}"
        return None, error


class SilenceTimer:
    """Calls `report(silent)` after `limit_s` without bytes, and repeatedly until `close`, which must follow.

    `received_s()`: when bytes came last (the loop's time). `beat_s`: how long before its begin a silence may have begun.
    A loop that was held up has not read what came meanwhile: it looks again.
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
        silent = quiet_s >= self._limit_s - ROUNDING_S  # or the rest would be too short for any clock to pass
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
