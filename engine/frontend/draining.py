"""The end of a worker: how requests are finished or handed back before HTTP closes (lifecycle/stop_signals.py: when).

While it drains, a worker takes nothing new (503, code "draining"), says so on /health, and lets what runs go on: of a
prefill worker that is also the transfers that decode still waits for, of a decode worker its rooms. What has not ended
in time gets the same 503, which a router takes as a call to try elsewhere. Must not know HTTP or how children run.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from engine.frontend.client import EngineClient
from engine.frontend.errors import ApiError, draining
from engine.messages import StateReply
from lifecycle.stop_signals import StopSignals

log = logging.getLogger(__name__)

POLL_S = 0.02
STATE_TIMEOUT_S = 2.0


async def drain(
    client: EngineClient, *, signals: StopSignals, timeout_s: float, dead: Callable[[], str | None]
) -> None:
    """Returns when all has ended, by itself or handed back. `dead`: what of the worker has died (None: nothing)."""
    client.close(draining("the server is draining: it takes no new requests"))
    client.announce_drain()
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s

    def may_wait() -> bool:
        return loop.time() < deadline_s and not signals.at_once.is_set() and dead() is None

    if client.num_live:
        log.info("draining: %d requests run, for up to %g s (--drain-timeout)", client.num_live, timeout_s)
    while client.num_live and may_wait():
        await _pause(signals)
    if client.num_live:
        await _hand_back(client, dead() or f"not ended within {timeout_s:g} s")
    elif client.ready.is_set():
        await _until_at_rest(client, signals=signals, may_wait=may_wait)


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
