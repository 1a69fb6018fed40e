"""Heartbeat streams for routers (service/http/heartbeats.py)."""

import time
from collections.abc import Sequence

from aiohttp import web

from engine.frontend.errors import not_ready
from engine.frontend.services import SERVICES, Services
from engine.stamps import Stamped
from service.http.errors import ApiError, bad_field
from service.http.heartbeats import ASK, EVERY_S, IDLE, LINES, LONGEST_S, TYPE, first_line, live_line, wait_s
from service.http.stream import open_stream

MOST_STREAMS = 256  # router processes
_HEADERS = {"Content-Type": TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def heartbeats(request: web.BaseRequest) -> web.StreamResponse:
    """Raises ApiError: 400 for `every`, 503 if not ready or too many."""
    s, every_s = request[SERVICES], _every_s(request)
    if s.stamps is None or not s.leaders.ready.is_set() or not s.stamps.read():
        raise not_ready("the model is still loading")
    if s.beating.num >= MOST_STREAMS:
        raise ApiError(503, f"{MOST_STREAMS} streams of heartbeats are open", code="queue_full", retry_after_s=1)
    with s.beating.taken() as pause:
        out = await open_stream(request, headers=_HEADERS)
        await out.write(first_line(every_s))
        lines = HeartbeatLines()
        while await pause(wait_s(time.monotonic(), every_s, phase=LINES)):
            if line := lines.next(
                s.stamps.read(), now_s=time.monotonic(), num_live=s.client.num_live, fine=_is_fine(s)
            ):
                await out.write(line)
        await out.write_eof()
    return out


class HeartbeatLines:
    def __init__(self) -> None:
        self._stamped: dict[str, float] = {}
        self._num_steps = 0

    def next(self, stamps: Sequence[Stamped], *, now_s: float, num_live: int, fine: bool) -> bytes:
        """Return a line once all processes stamped again. `fine`: /health is 200."""
        stamped = {stamp.name: stamp.at_s for stamp in stamps}
        if any(self._stamped.get(name) == at_s for name, at_s in stamped.items()):
            return b""
        self._stamped = stamped
        num_steps, self._num_steps = self._num_steps, sum(stamp.num_steps for stamp in stamps)
        if not fine:
            return ASK
        if not num_live and num_steps == self._num_steps:
            return IDLE
        return live_line(max((now_s - since_s for stamp in stamps if (since_s := stamp.busy_since_s)), default=0.0))


def _is_fine(s: Services) -> bool:
    return s.client.closed is None and s.warm.is_set() and not s.leaders.released


def _every_s(request: web.BaseRequest) -> float:
    text = request.query.get("every", f"{EVERY_S:g}")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST_S:
        raise bad_field("every", f"must be seconds, more than 0 and at most {LONGEST_S:g}, got {text[:40]!r}")
    return max(value, EVERY_S)
