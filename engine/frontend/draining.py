"""Drains a worker: running requests finish or are handed back before HTTP closes.

Others get 503 with code "draining", so routers try another worker. Also waits for transfers to and
from peers.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.frontend.client.engine_client import EngineClient
from engine.frontend.client.other_frontends import OtherFrontends
from engine.frontend.errors import draining
from engine.messages import StateReply
from service.http.errors import ApiError
from service.process.stop_signals import StopSignals, pause, wait_while

log = logging.getLogger(__name__)

STATE_TIMEOUT_S = 2.0


async def drain(
    client: EngineClient,
    *,
    signals: StopSignals,
    timeout_s: float,
    dead: Callable[[], str | None],
    switch_timeout_s: float | None = None,
    others: OtherFrontends | None = None,
) -> None:
    """Return once all requests, also of the `others`, have ended or were handed back.

    `timeout_s` counts from the first stop signal, `switch_timeout_s` without one from now.
    """
    closed = draining("the server is draining: it takes no new requests")
    client.close(closed)
    if others is not None:
        await others.close_to_requests(closed, fails_live=False)
    client.leaders.announce_drain()
    loop = asyncio.get_running_loop()
    patience = Patience(timeout_s, switch_timeout_s)

    def may_wait() -> bool:
        lasts = patience.lasts(loop.time(), ends=signals.requested.is_set())
        return lasts and not signals.at_once.is_set() and dead() is None

    if may_wait() and client.num_live:
        log.info("draining: %d requests run", client.num_live)
    await wait_while(lambda: client.num_live > 0 and may_wait(), at_once=signals.at_once)
    if client.num_live:
        await _hand_back(client, others, dead() or "not ended in time")
    elif client.leaders.ready.is_set():
        await _until_at_rest(client, signals=signals, may_wait=may_wait)


class Patience:
    """Time limit of requests: `switch_timeout_s`, or `end_timeout_s` at a process's end. Pure."""

    def __init__(self, end_timeout_s: float, switch_timeout_s: float | None) -> None:
        self._end_timeout_s, self._switch_timeout_s = end_timeout_s, switch_timeout_s
        self._deadline_s: float | None = None

    def lasts(self, now_s: float, *, ends: bool) -> bool:
        if self._switch_timeout_s is not None and ends:
            self._switch_timeout_s = self._deadline_s = None
        if self._deadline_s is None:
            given_s = self._end_timeout_s if self._switch_timeout_s is None else self._switch_timeout_s
            self._deadline_s = now_s + given_s
        return now_s < self._deadline_s


async def _hand_back(client: EngineClient, others: OtherFrontends | None, why: str) -> None:
    log.warning("draining: %d requests are handed back: %s", client.num_live, why)
    error = draining(f"the server is draining and hands this request back ({why}); try another one")
    client.fail_all(error)
    if others is not None:
        await others.close_to_requests(error, fails_live=True)
    await asyncio.sleep(0)


async def _until_at_rest(client: EngineClient, *, signals: StopSignals, may_wait: Callable[[], bool]) -> None:
    """Wait until the scheduler is idle, so that peers see transfers and quarantine end."""
    while may_wait():
        try:
            states = await client.leaders.states(timeout_s=STATE_TIMEOUT_S)
        except ApiError:
            return
        if all(map(at_rest, states)):
            return
        await pause(signals.at_once)


def at_rest(state: StateReply) -> bool:
    return state.running == 0 and not any(state.queues.values())
