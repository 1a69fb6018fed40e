"""HTTP probes of one worker, and detection of its silence.

A frozen process refuses no connection. Silence before a failed check only makes requests prefer
other workers. Streaming workers are never silent. Without heartbeats busy, silent workers are
probed every quarter of the limit.

    last byte ---- probe ---- probe ---- probe ---- limit: its requests move
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

BEATS = 4  # probes per silence limit
ROUNDING_S = 0.001  # precision of timers
MAX_ANSWER_BYTES = 4 << 20
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True, kw_only=True)
class Prober:
    """Probes. `on_silence(worker, silent)` is called repeatedly."""

    session: aiohttp.ClientSession
    credentials: Credentials
    timeout_s: float
    silence_s: float
    on_silence: Callable[[Worker, bool], None]

    @property
    def beat_s(self) -> float:
        return self.silence_s / BEATS

    async def get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises one of `FAILURES`."""
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
        """Return the first JSON answer, or an error of a failed path."""
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
