"""The main process of a worker: serves HTTP, talks to the scheduler process, and ends in good order."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from engine.frontend.app import make_handle
from engine.frontend.client.scheduler_link import ENGINE_DEAD, SchedulerLink
from engine.frontend.draining import drain
from engine.frontend.errors import draining
from engine.frontend.first_tokens import compute_tokens
from engine.frontend.role_switch import RoleSwitch, RoleSwitchState
from engine.frontend.services import FrontendSpec, Services
from engine.frontend.setup import make_services
from engine.ipc import IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.messages import GetStep, Shutdown, ToFrontend, ToScheduler
from service.http.errors import ApiError
from service.http.listening import ListeningPort
from service.http.server import RequestLimits, serving
from service.process.collector import spare_what_lives
from service.process.stop_signals import StopSignals
from service.security.keys import KeyGate
from service.waiter import end_tasks

WATCH_INTERVAL_S = 0.1
HTTP_CLOSE_S = 1.0  # for answers that are being written when the server ends
SPARE_REQUESTS = 1024  # HTTP requests in progress beyond the samples that may be live


class WorkerDied(RuntimeError):
    """A process of the worker ended by itself; the text says which."""


class EngineProcesses(Protocol):
    def dead(self) -> str | None:
        """What died, or None."""

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
    """Serve until a stop signal (then None) or a role switch (then its state; call again with the same `port`).

    SIGTERM and a switch drain; SIGINT or a second signal end at once. `on_ready`: called after `SchedulerReady`.
    Raises ConfigError for a checkpoint that cannot be used, WorkerDied.
    """
    loop = asyncio.get_running_loop()
    with _sockets(ipc) as (push, heartbeat, pull):
        scheduler = SchedulerLink(_sender(push, heartbeat), loop.time)
        services = make_services(spec, scheduler=scheduler, gate=gate, dead=processes.dead)
        client = services.client
        pull.attach(loop, client.on_message)
        handle = make_handle(services, max_open=client.max_live + SPARE_REQUESTS)
        limits = RequestLimits(max_body_bytes=spec.server.max_body_bytes, size_flag="--max-body-bytes")
        async with serving(port, handle, limits, shutdown_timeout_s=HTTP_CLOSE_S):
            try:
                end = _SessionEnd(signals, spec.switch)
                await _until_over(services, end, on_ready=on_ready)
                await drain(
                    client,
                    signals=signals,
                    timeout_s=spec.server.drain_timeout_s,
                    dead=processes.dead,
                    switch_timeout_s=end.switch_timeout_s(spec.server.drain_timeout_s),
                )
                if (reason := processes.dead()) is not None:
                    raise WorkerDied(reason)
                if end.next_session() is None:
                    return None
                client.end(draining("the server is changing its role"))
                await asyncio.to_thread(processes.end)  # HTTP still answers probes meanwhile
                return end.next_session()
            finally:
                services.tokenizer_pool.shutdown(wait=False, cancel_futures=True)
                services.tracer.close()


@contextmanager
def _sockets(ipc: IpcPaths) -> Iterator[tuple[PushSocket, PushSocket, PullSocket[ToFrontend]]]:
    """To the scheduler (which receives `Shutdown` at the end), to its heartbeat, and from both."""
    push, heartbeat = PushSocket(ipc.to_scheduler), PushSocket(ipc.to_heartbeat)
    pull: PullSocket[ToFrontend] = PullSocket(ipc.to_frontend, ToFrontend)
    try:
        yield push, heartbeat, pull
    finally:
        with suppress(PeerStalled):
            push.send(Shutdown())
        for socket in (push, heartbeat, pull):
            socket.close()


def _sender(push: PushSocket, heartbeat: PushSocket) -> Callable[[ToScheduler | GetStep], None]:
    def send(message: ToScheduler | GetStep) -> None:
        try:
            (heartbeat if isinstance(message, GetStep) else push).send(message)
        except PeerStalled as e:
            raise ApiError(503, str(e), code="engine_stalled", retry_after_s=1) from None

    return send


@dataclass(frozen=True)
class _SessionEnd:
    """What ends a session: a stop signal, which takes precedence, or a role switch."""

    signals: StopSignals
    switch: RoleSwitch | None

    @property
    def is_requested(self) -> bool:
        return self.signals.requested.is_set() or (self.switch is not None and self.switch.to is not None)

    def next_session(self) -> RoleSwitchState | None:
        return None if self.switch is None or self.signals.requested.is_set() else self.switch.to

    def switch_timeout_s(self, default_s: float) -> float | None:
        """None: no switch was requested."""
        if self.switch is None or self.switch.to is None:
            return None
        return default_s if self.switch.timeout_s is None else self.switch.timeout_s


async def _until_over(s: Services, end: _SessionEnd, *, on_ready: Callable[[], None]) -> None:
    starting = asyncio.create_task(_warm_up(s))
    try:
        while not end.is_requested:
            reason = s.dead()
            if reason is not None:
                s.client.fail_all(ApiError(503, reason, code=ENGINE_DEAD, retry_after_s=1))
                raise WorkerDied(reason)
            if starting.done() and not s.warm.is_set():
                starting.result()
                s.warm.set()
                on_ready()
                spare_what_lives()
            with suppress(TimeoutError):
                await asyncio.wait_for(end.signals.requested.wait(), WATCH_INTERVAL_S)
    finally:
        await end_tasks([starting])


async def _warm_up(s: Services) -> None:
    """Wait for the scheduler, then compute a prompt and a token behind it. Raises WorkerDied where that fails."""
    await s.scheduler.ready.wait()
    if not s.spec.warms_up:
        return
    try:
        await compute_tokens(s, 2, name="warm-up-", timeout_s=None)  # the watchdog ends a step that hangs
    except ApiError as error:
        raise WorkerDied(f"the warm-up request failed ({error}); --skip-server-warmup leaves it out") from None
