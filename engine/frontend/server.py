"""Main process of a worker: serves HTTP, talks to the scheduler, ends in order."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from engine.frontend.apis.admin.health import compute_tokens
from engine.frontend.app import HTTP_CLOSE_S, SPARE_REQUESTS, make_app, make_handle
from engine.frontend.assembly import connected
from engine.frontend.client.engine_client import EngineClient
from engine.frontend.client.other_frontends import NO_OTHERS, OtherFrontends
from engine.frontend.client.scheduler_link import ENGINE_DEAD
from engine.frontend.role_switch import RoleSwitch, RoleSwitchState
from engine.frontend.services import Services
from engine.frontend.spec import FrontendSpec, limits_of, main_slot
from engine.ipc import MAIN_FRONTEND, IpcPaths
from engine.messages import StateReply
from service.http.errors import ApiError, draining
from service.http.listening import ListeningPort
from service.http.server import serving
from service.process.stop_signals import StopSignals, pause, wait_while
from service.security.keys import KeyGate
from service.waiter import end_tasks

# ---- drain

log = logging.getLogger(__name__)

STATE_TIMEOUT_S = 2.0


async def drain(
    client: EngineClient,
    *,
    signals: StopSignals,
    timeout_s: float,
    dead: Callable[[], str | None],
    switch_timeout_s: float | None = None,
    others: OtherFrontends = NO_OTHERS,
) -> None:
    """Return once all requests, also of the `others`, have ended or were handed back.

    `timeout_s` counts from the first stop signal, `switch_timeout_s` without one from now.

    Others get 503 with code "draining", so routers try another worker. Also waits for transfers to
    and from peers.
    """
    closed = draining("the server is draining: it takes no new requests")
    client.close(closed)
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


async def _hand_back(client: EngineClient, others: OtherFrontends, why: str) -> None:
    log.warning("draining: %d requests are handed back: %s", client.num_live, why)
    error = draining(f"the server is draining and hands this request back ({why}); try another one")
    client.fail_all(error)
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


# ---- server

WATCH_INTERVAL_S = 1.0  # polling for ranks or frontends that cannot continue together


class WorkerDied(RuntimeError):
    """The text names the process."""


class EngineProcesses(Protocol):
    def dead(self) -> str | None:
        """The dead process, if any."""

    def watched(self, on_end: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `on_end` in the running loop if one ends within the block."""

    def end(self) -> None:
        """Blocks."""


async def run_frontend(
    spec: FrontendSpec,
    *,
    ipc: IpcPaths,
    processes: EngineProcesses,
    signals: StopSignals,
    gate: KeyGate,
    port: ListeningPort,
    on_ready: Callable[[], None] = lambda: None,
) -> RoleSwitchState | None:
    """Serve until a stop signal (returns None) or a role switch (its state; call again).

    SIGTERM and a switch drain; SIGINT or a second signal end at once. Raises ConfigError for an
    unusable checkpoint, WorkerDied.
    """
    async with AsyncExitStack() as stack:
        slot = main_slot(spec, ipc, stack)
        services = stack.enter_context(connected(spec, ipc=ipc, dead=processes.dead, gate=gate, slot=slot))
        client, dead = services.client, services.dead
        app = make_app(services, make_handle(services, max_open=client.max_live + SPARE_REQUESTS))
        limits = limits_of(spec.server)
        if slot.others.num:
            forwarded = serving(ipc.http_socket(MAIN_FRONTEND), app, limits, shutdown_timeout_s=HTTP_CLOSE_S)
            await stack.enter_async_context(forwarded)
        async with serving(port, app, limits, shutdown_timeout_s=HTTP_CLOSE_S):
            try:
                end = SessionEnd(signals, spec.switch)
                await until_over(services, end, processes, on_ready=on_ready)
                await drain(
                    client,
                    signals=signals,
                    timeout_s=spec.server.drain_timeout_s,
                    dead=dead,
                    switch_timeout_s=end.switch_timeout_s(spec.server.drain_timeout_s),
                    others=slot.others,
                )
                if (reason := dead()) is not None:
                    raise WorkerDied(reason)
                if end.next_session() is None:
                    return None
                client.end(draining("the server is changing its role"))
                await asyncio.to_thread(processes.end)  # HTTP still answers probes
                return end.next_session()
            finally:
                services.beating.end()
                services.close()


@dataclass(frozen=True)
class SessionEnd:
    signals: StopSignals
    switch: RoleSwitch | None

    @property
    def is_requested(self) -> bool:
        return self.signals.requested.is_set() or (self.switch is not None and self.switch.to is not None)

    def next_session(self) -> RoleSwitchState | None:
        return None if self.switch is None or self.signals.requested.is_set() else self.switch.to

    def switch_timeout_s(self, default_s: float) -> float | None:
        if self.switch is None or self.switch.to is None:
            return None
        return default_s if self.switch.timeout_s is None else self.switch.timeout_s


async def until_over(s: Services, end: SessionEnd, processes: EngineProcesses, *, on_ready: Callable[[], None]) -> None:
    """Warm up, and wait for the end. Raises WorkerDied after all requests have failed."""
    news = asyncio.Event()
    starting, requested = asyncio.create_task(_warm_up(s)), asyncio.create_task(end.signals.requested.wait())
    starting.add_done_callback(lambda _: news.set())
    requested.add_done_callback(lambda _: news.set())
    if end.switch is not None:
        end.switch.on_request = news.set
    try:
        with processes.watched(news.set):
            await _follow(s, end, news, starting, on_ready=on_ready)
    finally:
        await end_tasks((starting, requested))


async def _follow(
    s: Services, end: SessionEnd, news: asyncio.Event, starting: "asyncio.Task[None]", *, on_ready: Callable[[], None]
) -> None:
    """Raises WorkerDied."""
    watch_s = WATCH_INTERVAL_S if s.others.num or s.leaders.num_ranks > 1 else None
    while not end.is_requested:
        news.clear()
        if (reason := s.dead()) is not None:
            error = ApiError(503, reason, code=ENGINE_DEAD, retry_after_s=1)
            s.client.fail_all(error)
            await s.others.close_to_requests(error, fails_live=True)
            raise WorkerDied(reason)
        if starting.done() and not s.warm.is_set():
            starting.result()
            s.warm.set()
            on_ready()
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), watch_s)


async def _warm_up(s: Services) -> None:
    """Raises WorkerDied."""
    await s.leaders.ready.wait()
    await s.others.until_ready()
    if not s.spec.warms_up:
        return
    try:
        await compute_tokens(s, 2, name="warm-up-", timeout_s=None)  # the watchdog ends a step that hangs
    except ApiError as error:
        raise WorkerDied(f"the warm-up request failed ({error}); --skip-server-warmup leaves it out") from None
