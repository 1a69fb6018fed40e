"""The end of a worker: how requests are finished or handed back before HTTP closes (service/process/stop_signals.py: when).

While it drains, a worker takes nothing new (503, code "draining"), says so on /health, and lets what runs go on: of a
prefill worker that is also the transfers that decode still waits for, of a decode worker its rooms. What has not ended
in time gets the same 503, which a router takes as a call to try elsewhere. Must not know HTTP or how children run.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from engine.frontend.client.engine_client import EngineClient
from engine.frontend.errors import draining
from engine.messages import StateReply
from service.http.errors import ApiError
from service.process.stop_signals import StopSignals

log = logging.getLogger(__name__)

POLL_S = 0.02
STATE_TIMEOUT_S = 2.0


async def drain(
    client: EngineClient,
    *,
    signals: StopSignals,
    timeout_s: float,
    dead: Callable[[], str | None],
    switch_timeout_s: float | None = None,
) -> None:
    """Returns when all has ended, by itself or handed back. `dead`: what of the worker has died (None: nothing).

    `timeout_s`: from the moment that the signals ask; `switch_timeout_s`: as long as they do not.
    """
    client.close(draining("the server is draining: it takes no new requests"))
    client.announce_drain()
    loop = asyncio.get_running_loop()
    patience = Patience(timeout_s, switch_timeout_s)

    def may_wait() -> bool:
        return (
            patience.lasts(loop.time(), ends=signals.asked.is_set()) and not signals.at_once.is_set() and dead() is None
        )

    if may_wait() and client.num_live:
        log.info("draining: %d requests run", client.num_live)
    while client.num_live and may_wait():
        await _pause(signals)
    if client.num_live:
        await _hand_back(client, dead() or "not ended in time")
    elif client.ready.is_set():
        await _until_at_rest(client, signals=signals, may_wait=may_wait)


class Patience:
    """How long running requests may go on. Pure: told the time, and whether the process is to end.

    A worker that drains to change its role has `switch_timeout_s`; once it is to end, `end_timeout_s` from then.
    """

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


async def _hand_back(client: EngineClient, why: str) -> None:
    log.warning("draining: %d requests are handed back: %s", client.num_live, why)
    client.fail_all(draining(f"the server is draining and hands this request back ({why}); try another one"))
    await asyncio.sleep(0)


async def _until_at_rest(client: EngineClient, *, signals: StopSignals, may_wait: Callable[[], bool]) -> None:
    """Answered is not over: transfers and quarantined pages of aborted requests end first, so that peers see it."""
    while may_wait():
        try:
            state = await client.state(timeout_s=STATE_TIMEOUT_S)
        except ApiError:
            return
        if at_rest(state):
            return
        await _pause(signals)


def at_rest(state: StateReply) -> bool:
    return state.running == 0 and not any(state.queues.values())


async def _pause(signals: StopSignals) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(signals.at_once.wait(), POLL_S)
