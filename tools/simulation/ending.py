"""SIGTERM at a simulated process: it drains by production code, leaves in order, exits; and what must hold of that.

A worker as engine/frontend/server.py and disagg/processes/scheduler_process.py end one: drain, close HTTP, `Shutdown` to the scheduler,
leave the bootstrap server, close the manager, exit. The waits of `close` methods are virtual here; their steps are production's.
"""

import asyncio

from engine.frontend.server import HTTP_CLOSE_S, STATE_TIMEOUT_S, drain
from engine.messages import Shutdown
from router.server import SHUTDOWN_TIMEOUT_S
from service.process.stop_signals import StopSignals
from tools.simulation.aio import VirtualLoop
from tools.simulation.routers.router import Router
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Process, Violation
from transfer_backends.control_thread import CLOSE_S
from transfer_backends.prefill.manager import PrefillManager

STEP_S = 0.01
SLACK_S = 2.0  # turns of loops, of registrars, delays


class Ending:
    """`sigterm` for the first and for every further signal. `more_s`: beyond `timeout_s`, until the process has ended."""

    def __init__(
        self, process: Process, aio: VirtualLoop, signals: StopSignals, *, timeout_s: float, more_s: float
    ) -> None:
        self._process, self._aio, self._signals = process, aio, signals
        self._timeout_s, self._longest_s = timeout_s, timeout_s + more_s + SLACK_S

    def sigterm(self) -> None:
        first = not self._signals.requested.is_set()
        self._aio.run(self._signals.on_sigterm)
        if first:
            self._aio.run(lambda: self._watch(self._aio.create_task(self._drain())))
            self._demand_end()

    async def _drain(self) -> None:
        raise NotImplementedError

    def _watch(self, task: "asyncio.Task[None]") -> None:
        """What goes wrong in it ends the run."""

        def on_done(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and task.exception() is not None:
                self._process.after(0, "the end failed", task.result)

        task.add_done_callback(on_done)

    def _demand_end(self) -> None:
        """Whatever happens to it: who was told to end has ended in bounded time."""
        process, told_s = self._process, self._process.world.now_s

        def judge() -> None:
            if process.alive and not process.frozen and process.thawed_s < told_s:
                raise Violation(f"{process.name} has not ended {self._longest_s:.1f} s after SIGTERM")

        process.world.after(self._longest_s, "judge an end", judge)


class WorkerEnding(Ending):
    def __init__(self, worker: Worker, *, timeout_s: float) -> None:
        frontend, more_s = worker.frontend, STATE_TIMEOUT_S + HTTP_CLOSE_S + 2 * CLOSE_S
        super().__init__(worker.process, frontend.aio, frontend.signals, timeout_s=timeout_s, more_s=more_s)
        self._worker = worker

    def sigterm(self) -> None:
        self._worker.on_stopped = self._close
        super().sigterm()

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
        self._worker.to_scheduler(Shutdown())

    def _demand_no_moves(self) -> None:
        """Who has waited for rest has given away what others get."""
        if left := len(self._worker.exchange.handovers_out()):
            raise Violation(f"{self._process.name}: drained, and {left} workers still get KV")

    def _close(self) -> None:
        """The scheduler process, after its loop has ended."""
        worker = self._worker
        if (registrar := worker.exchange.registrar) is not None:
            registrar.close()
            self._demand_left(registrar._server)
        for manager in worker.managers.by_thread.values():
            manager.control.abort_all()
        worker.managers.sender.wake_sender()
        self._wait(self._process.clock() + CLOSE_S)

    def _demand_left(self, address: str) -> None:
        """Who ends in good order is not looked up any more."""
        worker, name = self._worker, self._process.name
        for server in (worker.exchange.bootstrap, worker.around.bootstrap_of(address)):
            reached = (
                server is not None and not server.process.frozen and worker.around.reach(self._process.node, address)
            )
            if server is not None and reached and name in server.registry._workers:
                raise Violation(f"{name}: ends without leaving its bootstrap server")

    def _wait(self, deadline_s: float) -> None:
        managers = self._worker.managers.by_thread.values()
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


class RouterEnding(Ending):
    def __init__(self, router: Router, *, timeout_s: float) -> None:
        more_s = SHUTDOWN_TIMEOUT_S
        super().__init__(router.process, router.aio, router.signals, timeout_s=timeout_s, more_s=more_s)
        self._router = router

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
