"""SIGTERM at a simulated process: it drains by production code, leaves in order, exits; and what must hold of that.

A worker as engine/frontend/server.py and disagg/processes/scheduler_process.py end one: drain, close HTTP, `Shutdown` to the scheduler,
leave the bootstrap server, close the manager, exit. The waits of `close` methods are virtual here; their steps are production's.
"""

import asyncio
from typing import Protocol

from engine.frontend.server import HTTP_CLOSE_S, STATE_TIMEOUT_S, drain
from engine.messages import Shutdown
from router.server import SHUTDOWN_TIMEOUT_S
from tools.simulation.routers.router import Router
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Process, Violation
from transfer_backends.control_thread import CLOSE_S
from transfer_backends.prefill.manager import PrefillManager

STEP_S = 0.01
SLACK_S = 2.0  # turns of loops, of registrars, delays


class Ending(Protocol):
    """`sigterm` for the first and for every further signal."""

    def sigterm(self) -> None: ...


class WorkerEnding:
    def __init__(self, worker: Worker, *, timeout_s: float) -> None:
        self._worker = worker
        self._timeout_s = timeout_s
        self._process = worker.process

    def sigterm(self) -> None:
        frontend = self._worker.frontend
        first = not frontend.signals.requested.is_set()
        frontend.aio.run(frontend.signals.on_sigterm)
        if first:
            self._worker.on_stopped = self._close
            frontend.aio.run(lambda: _watch(frontend.aio.create_task(self._drain()), self._process))
            longest_s = self._timeout_s + STATE_TIMEOUT_S + HTTP_CLOSE_S + 2 * CLOSE_S + SLACK_S
            _demand_end(self._process, longest_s)

    async def _drain(self) -> None:
        frontend, process = self._worker.frontend, self._process
        told_s = frontend.aio.time()
        await drain(frontend.client, signals=frontend.signals, timeout_s=self._timeout_s, dead=lambda: None)
        if not frontend.signals.at_once.is_set() and frontend.aio.time() < told_s + self._timeout_s:
            self._demand_no_moves()
        self._worker.around.network.unlisten(f"{process.node}:80", process)
        deadline_s = frontend.aio.time() + HTTP_CLOSE_S
        while frontend.num_handlers and frontend.aio.time() < deadline_s:
            await asyncio.sleep(STEP_S)
        if frontend.client.num_live:
            raise Violation(f"{process.name}: drained, and {frontend.client.num_live} requests have no answer")
        self._worker._to_scheduler(Shutdown())

    def _demand_no_moves(self) -> None:
        """Who has waited for rest has given away what others get."""
        if left := len(self._worker.handovers_out()):
            raise Violation(f"{self._process.name}: drained, and {left} workers still get KV")

    def _close(self) -> None:
        """The scheduler process, after its loop has ended."""
        worker = self._worker
        if worker.role_name == "prefill":
            worker.registrar.close()
            self._demand_left()
        for manager in worker.managers.values():
            manager.control.abort_all()
        worker.sender.wake_sender()
        self._wait(self._process.clock() + CLOSE_S)

    def _demand_left(self) -> None:
        """Who ends in good order is not looked up any more."""
        worker, name = self._worker, self._process.name
        for server in (worker.bootstrap, worker.around.bootstrap_of(worker.registrar._server)):
            reached = server is not None and not server.process.frozen and worker._reach(worker.registrar._server)
            if server is not None and reached and name in server.registry._workers:
                raise Violation(f"{name}: ends without leaving its bootstrap server")

    def _wait(self, deadline_s: float) -> None:
        managers = self._worker.managers.values()
        is_quiet = all(manager.control.is_quiet for manager in managers)
        if not is_quiet and self._process.clock() < deadline_s:
            self._process.after(STEP_S, "closing", self._wait, deadline_s)
            return
        for manager in managers:
            control = manager.control
            if not manager.driver.busy if isinstance(manager, PrefillManager) else control.is_quiet:
                control.send_bye()
            control.turn(0)
            control.port.close()
        self._process.exit()


class RouterEnding:
    def __init__(self, router: Router, *, timeout_s: float) -> None:
        self._router = router
        self._timeout_s = timeout_s

    def sigterm(self) -> None:
        router = self._router
        first = not router.signals.requested.is_set()
        router.aio.run(router.signals.on_sigterm)
        if first:
            router.aio.run(lambda: _watch(router.aio.create_task(self._drain()), router.process))
            _demand_end(router.process, self._timeout_s + SHUTDOWN_TIMEOUT_S + SLACK_S)

    async def _drain(self) -> None:
        """As router/server.py ends."""
        router = self._router
        await router.live.drain(timeout_s=self._timeout_s, at_once=router.signals.at_once)
        if not all(request.handed_back for request in router.live.requests):
            raise Violation(f"{router.process.name}: drained, and a request was neither finished nor handed back")
        router.network.unlisten(f"{router.process.node}:80", router.process)
        deadline_s = router.aio.time() + SHUTDOWN_TIMEOUT_S
        while router.live.requests and router.aio.time() < deadline_s:
            await asyncio.sleep(STEP_S)
        if router.live.requests:
            raise Violation(f"{router.process.name}: drained, and {len(router.live)} requests have no answer")
        router.dispatcher.launcher.close()
        await router.moves.close()
        await router.monitor.close()
        if left := router.leftovers():
            raise Violation(f"a router ends with {left}")
        router.process.after(0, "exit", router.process.exit)


def ending_of(part: object, *, timeout_s: float) -> Ending:
    """One for all signals of a life: a second call joins the first."""
    if isinstance(part, Worker):
        return WorkerEnding(part, timeout_s=timeout_s)
    assert isinstance(part, Router), part
    return RouterEnding(part, timeout_s=timeout_s)


def _watch(task: "asyncio.Task[None]", process: Process) -> None:
    """What goes wrong in it ends the run."""

    def on_done(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            process.after(0, "the end failed", task.result)

    task.add_done_callback(on_done)


def _demand_end(process: Process, longest_s: float) -> None:
    """Whatever happens to it: who was told to end has ended in bounded time."""
    told_s = process.world.now_s

    def judge() -> None:
        if process.alive and not process.frozen and process.thawed_s < told_s:
            raise Violation(f"{process.name} has not ended {longest_s:.1f} s after SIGTERM")

    process.world.after(longest_s, "judge an end", judge)
