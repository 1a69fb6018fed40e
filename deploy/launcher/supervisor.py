"""Runs processes, and restarts those that die.

They end after a drain on SIGTERM, at once on SIGINT, SIGHUP or a second signal, else by the guard.
The router drains first, as it needs the workers. Without it the others end, too.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy.launcher.display import Display, ProcessProgress
from deploy.launcher.plan import ProcessSpec
from deploy.launcher.probe import is_healthy
from deploy.launcher.process import Child, Guard
from service.process.stop_signals import StopSignals

POLL_S = 0.05
WATCH_S = 0.2
PROBE_TIMEOUT_S = 2.0
KILL_AFTER_S = 3.5  # all must end within 5 s, also on a busy machine
DRAIN_MARGIN_S = 4.0  # after its drain a process hands requests back and ends its children

MAX_DOUBLINGS = 30

OnReady = Callable[[Sequence[Child]], Awaitable[None]]


# ---- Pauses before dead processes start again. Pure.


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Pauses of `first_s`, doubled by each death up to `longest_s`; reset by `stable_s` of health.

    The front starts `front_tries` times in a row.
    """

    always: bool = True
    first_s: float = 1.0
    longest_s: float = 30.0
    stable_s: float = 60.0
    front_tries: int = 5


class Restarts:
    """Deaths of one process in a row; times in seconds."""

    def __init__(self, policy: RestartPolicy, *, is_front: bool) -> None:
        self._policy = policy
        self._is_front = is_front
        self._deaths = 0
        self._healthy_at_s: float | None = None

    def became_healthy(self, now_s: float) -> None:
        self._healthy_at_s = now_s

    def pause_s(self, status: int | None, now_s: float) -> float | None:
        """None: it stays dead."""
        policy = self._policy
        if status == 0 or not policy.always:  # 0: it drained after a signal
            return None
        if self._healthy_at_s is not None and now_s - self._healthy_at_s >= policy.stable_s:
            self._deaths = 0
        self._healthy_at_s = None
        self._deaths += 1
        if self._is_front and self._deaths > policy.front_tries:
            return None
        return min(policy.first_s * 2.0 ** min(self._deaths - 1, MAX_DOUBLINGS), policy.longest_s)


# ---- Processes that end together, as one's death may break what they share.


class FailureDomain:
    """`renew` makes `what` they share anew, blocking, and returns a note, or "".

    Only the first death ends the others, also if several die by themselves.
    """

    def __init__(self, names: Collection[str], *, what: str, renew: Callable[[], str] = lambda: "") -> None:
        self.names, self.what, self._renew = frozenset(names), what, renew
        self._lock = asyncio.Lock()
        self._children: dict[str, Child] = {}
        self._ended: set[int] = set()  # pids of those that died, or will, for another

    def add(self, child: Child) -> None:
        self._children[child.spec.name] = child

    async def start(self, begin: Callable[[], Child]) -> Child:
        async with self._lock:
            child = begin()
            self.add(child)
            return child

    async def end_others(self, dead: Child, report: Callable[[str], None]) -> None:
        async with self._lock:
            if dead.pid in self._ended:
                self._ended.remove(dead.pid)
                return
            for other in self._children.values():
                if other is dead:
                    continue
                self._ended.add(other.pid)
                if other.alive:
                    report(f"{other.spec.name} ends, too: it shares {self.what} with {dead.spec.name}")
                    other.kill()
            if note := await asyncio.to_thread(self._renew):
                report(note)


# ---- supervisor


class StartFailed(Exception):
    """A process ended, or was not healthy in time."""


@dataclass(eq=False)
class Supervisor:
    """`on_again`: called with all processes at each restart."""

    specs: Sequence[ProcessSpec]
    _: KW_ONLY
    log_dir: Path
    display: Display
    start_timeout_s: float
    drain_timeout_s: float = 0.0
    restarts: InitVar[RestartPolicy]
    on_again: Callable[[Sequence[Child]], None]
    domains: InitVar[Sequence[FailureDomain]] = ()

    def __post_init__(self, restarts: RestartPolicy, domains: Sequence[FailureDomain]) -> None:
        alone = [FailureDomain([spec.name], what="") for spec in self.specs]
        self._domains = {name: domain for domain in (*alone, *domains) for name in domain.names}
        self._guard = Guard()
        self._children: list[Child] = []
        self._restarts = [Restarts(restarts, is_front=is_front(spec, self.specs)) for spec in self.specs]
        self._healthy_s: dict[str, float] = {}
        self._started_at = 0.0
        self._signals = StopSignals()
        self._stop, self._at_once = self._signals.requested, self._signals.at_once

    async def run(self, on_ready: OnReady) -> int:
        """Run until a signal (0), or until the front or all others stay dead (1)."""
        with self._signals.caught(on_hangup=self._signals.on_sigint):
            try:
                self._start()
                await self._until_healthy()
                if not self._stop.is_set():
                    await on_ready(self._children)
                return await self._watch()
            except StartFailed as error:
                self.display.message(f"tandem up: error: {error}")
                return 1
            finally:
                await self._end_all()
                self._guard.close()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        for spec in self.specs:
            child = self._start_one(spec)
            self._children.append(child)
            self._domains[spec.name].add(child)

    def _start_one(self, spec: ProcessSpec, *, again: bool = False) -> Child:
        try:
            return Child.start(spec, log_dir=self.log_dir, watcher=self._guard, env=os.environ, again=again)
        except OSError as error:
            raise StartFailed(f"{spec.name}: cannot start {spec.argv[0]}: {error.strerror or error}") from None

    async def _until_healthy(self) -> None:
        probes = [asyncio.create_task(self._probe(child)) for child in self._children]
        try:
            while not self._stop.is_set() and len(self._healthy_s) < len(self._children):
                self._check_start()
                self.display.update(self._progress())
                await self._pause(POLL_S)
            self.display.update(self._progress())
        finally:
            self.display.finish()
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)

    def _check_start(self) -> None:
        for child in self._children:
            if not child.alive:
                raise StartFailed(_why_ended(child))
        if self._elapsed_s() > self.start_timeout_s:
            late = [child for child in self._children if child.spec.name not in self._healthy_s]
            names = ", ".join(child.spec.name for child in late)
            raise StartFailed(
                f"{names} not healthy after {self.start_timeout_s:g} s (--start-timeout); "
                f"last said: {late[0].last_line()} (log: {late[0].log_path})"
            )

    async def _probe(self, child: Child) -> None:
        if await self._becomes_healthy(child, child.spec.health_path):
            self._healthy_s[child.spec.name] = self._elapsed_s()

    def _progress(self) -> list[ProcessProgress]:
        elapsed_s = self._elapsed_s()
        return [
            ProcessProgress(
                name=child.spec.name,
                text=child.last_line(),
                elapsed_s=elapsed_s,
                healthy_s=self._healthy_s.get(child.spec.name),
            )
            for child in self._children
        ]

    async def _watch(self) -> int:
        keepers = {asyncio.create_task(self._keep(i)) for i in range(len(self.specs))}
        stop = asyncio.create_task(self._stop.wait())
        try:
            living = set(keepers)
            while living and not self._stop.is_set():
                waited: set[asyncio.Task[Any]] = {stop, *living}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                ended = {keeper for keeper in living if keeper.done()}
                living -= ended
                for child in sorted((keeper.result() for keeper in ended), key=self._is_front):
                    if self._is_front(child):
                        self.display.message(f"tandem up: error: {_why_ended(child)}; it stays dead, so all ends")
                        return 1
                    self.display.message(f"tandem up: {_why_ended(child)}; the others go on")
            return 0 if self._stop.is_set() else 1
        finally:
            for task in (stop, *keepers):
                task.cancel()
            await asyncio.gather(stop, *keepers, return_exceptions=True)

    def _is_front(self, child: Child) -> bool:
        return is_front(child.spec, self.specs)

    async def _keep(self, i: int) -> Child:
        child, restarts = self._children[i], self._restarts[i]
        if child.spec.name in self._healthy_s:
            restarts.became_healthy(self._started_at + self._healthy_s[child.spec.name])
        while True:
            while child.alive:
                await asyncio.sleep(WATCH_S)
            pause_s = restarts.pause_s(child.exit_status(), time.monotonic())
            if pause_s is None:
                return child
            self.display.message(f"tandem up: {_why_ended(child)}; it starts again in {pause_s:g} s")
            domain = self._domains[child.spec.name]
            await domain.end_others(child, lambda text: self.display.message(f"tandem up: {text}"))
            await asyncio.sleep(pause_s)
            started_at_s = time.monotonic()
            child = self._children[i] = await domain.start(partial(self._start_one, child.spec, again=True))
            self.on_again(self._children)
            if await self._becomes_healthy(child, child.spec.alive_path):
                now_s = time.monotonic()
                restarts.became_healthy(now_s)
                took = f"after {now_s - started_at_s:.1f} s"
                self.display.message(f"tandem up: {child.spec.name} is healthy again {took} (pid {child.pid})")

    async def _becomes_healthy(self, child: Child, path: str) -> bool:
        """False if it died before."""
        while child.alive:
            if await asyncio.to_thread(is_healthy, child.spec.url + path, timeout_s=PROBE_TIMEOUT_S):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _end_all(self) -> None:
        routers = [child for child in self._children if child.spec.role == "router"]
        for stage in (routers, [child for child in self._children if child not in routers]):
            if not self._at_once.is_set() and self._stop.is_set():
                await self._drain(stage)
        deadline_s = time.monotonic() + KILL_AFTER_S
        for child in self._children:
            child.hurry() if self.drain_timeout_s else child.drain()
        await self._until_ended(self._children, deadline_s)
        for child in self._children:
            child.kill()

    async def _drain(self, children: Sequence[Child]) -> None:
        for child in children:
            child.drain()
        deadline_s = time.monotonic() + self.drain_timeout_s + (DRAIN_MARGIN_S if self.drain_timeout_s else 0.0)
        await self._until_ended(children, deadline_s, until=self._at_once)

    async def _until_ended(
        self, children: Sequence[Child], deadline_s: float, *, until: asyncio.Event | None = None
    ) -> None:
        while any([child.alive for child in children]) and time.monotonic() < deadline_s:
            if until is not None and until.is_set():
                return
            await asyncio.sleep(POLL_S)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)


def is_front(spec: ProcessSpec, specs: Sequence[ProcessSpec]) -> bool:
    """Clients reach it: the router, or one worker without a router."""
    return spec.role == "router" or len(specs) == 1


def _why_ended(child: Child) -> str:
    status = child.exit_status()
    how = f"exit status {status}" if status is None or status >= 0 else f"signal {signal.Signals(-status).name}"
    return f"{child.spec.name} ended ({how}): {child.last_error()} (log: {child.log_path})"
