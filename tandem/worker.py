"""The worker under an LLM: scheduler processes, and the frontend's services on a thread of its own.

The thread runs an event loop, so an LLM works where the caller's thread runs another (Jupyter).
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from disagg.config import frontend_spec
from disagg.processes.role_session import RoleSession, started
from disagg.processes.session_plan import SessionPlan
from engine.frontend.assembly import connected
from engine.frontend.client.scheduler_link import ENGINE_DEAD
from engine.frontend.server import SessionEnd, WorkerDied, until_over
from engine.frontend.services import Services
from engine.frontend.spec import FrontendSlot, open_worker_gate
from engine.stamps import Stamps
from service.flags import ConfigError
from service.http.errors import ApiError
from service.process.stop_signals import StopSignals
from tandem.errors import EngineDeadError, as_python
from tandem.flags import in_python

T = TypeVar("T")

CLOSED = "this engine is closed; make another LLM"
LAST_CALLS_S = 1.0  # time for calls to take their errors before the loop ends


class LocalWorker:
    """A worker without HTTP, from its start to `close`. Its methods may be called in any thread.

    `make_plan`: runs on the thread, as it may download a model; `close` does not wait for it.
    `started`: the services, or an error: ConfigError for a wrong flag or file.
    """

    def __init__(self, make_plan: Callable[[], SessionPlan]) -> None:
        self.started: concurrent.futures.Future[Services] = concurrent.futures.Future()
        self._make_plan = make_plan
        self._pid = os.getpid()
        self._signals = StopSignals()
        self._loop = uvloop.new_event_loop()
        self._lock = threading.RLock()  # a collection of garbage may call `close` anywhere
        self.over: EngineDeadError | None = None  # why calls fail
        self._has_plan = self._is_closing = False
        # a daemon: an interpreter that ends waits for other threads before it would call `close`
        self._thread = threading.Thread(target=self._run, name="tandem-worker", daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run `call` on the worker's loop. Raises EngineDeadError."""
        try:
            if self._is_fork:  # before the lock, which another thread may have held at the fork
                text = f"this engine is of process {self._pid}, which forked this one; make an LLM here"
                raise EngineDeadError(text, code=ENGINE_DEAD)
            with self._lock:
                if self.over is None:
                    return asyncio.run_coroutine_threadsafe(_in_python(call), self._loop)
                raise EngineDeadError(str(self.over), code=ENGINE_DEAD)
        except EngineDeadError:
            call.close()
            raise

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run `call` and wait; an interrupted wait cancels it. Raises TandemError."""
        future = self.submit(call)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineDeadError(str(self.over or CLOSED), code=ENGINE_DEAD) from None
        except BaseException:
            future.cancel()
            raise

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the worker's loop soon, if it still runs."""
        if self._is_fork:
            return
        with self._lock:
            if self.over is None:
                self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """End the processes, and wait for it. A second call, or one in a fork, does nothing."""
        if self._is_fork:
            return
        with self._lock:
            self._is_closing = True
            if self.over is None:
                self._loop.call_soon_threadsafe(self._signals.on_sigint)
            has_processes = self._has_plan
        if has_processes and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def _is_fork(self) -> bool:
        return os.getpid() != self._pid

    def _run(self) -> None:
        error: BaseException = EngineDeadError(CLOSED)
        try:
            plan = self._make_plan()
            with self._lock:
                self._has_plan = not self._is_closing
            if self._has_plan:
                with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                    runner.run(self._live(plan))
        except BaseException as found:
            error = found
        with self._lock:
            self.over = self.over or EngineDeadError(str(error), code=ENGINE_DEAD)
            self._loop.close()  # a second time, if it ran
        if not self.started.done():
            self.started.set_exception(error)

    async def _live(self, plan: SessionPlan) -> None:
        why = CLOSED
        try:
            with started(plan) as session:
                await self._serve(session)
        except BaseException as error:
            why = str(error)
            raise
        finally:
            with self._lock:
                self.over = EngineDeadError(why, code=ENGINE_DEAD)
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            if calls:
                await asyncio.wait(calls, timeout=LAST_CALLS_S)

    async def _serve(self, session: RoleSession) -> None:
        plan = session.plan
        spec = frontend_spec(plan.engine, plan.server, plan.disagg, plan.bootstrap_allowlist)
        slot, gate = FrontendSlot(stamps=Stamps(session.ipc.dir)), open_worker_gate(plan.server)
        with connected(spec, ipc=session.ipc, dead=session.children.dead, gate=gate, slot=slot) as services:

            def on_ready() -> None:
                self.started.set_result(services)

            try:
                end = SessionEnd(self._signals, None)
                await until_over(services, end, session.children, on_ready=on_ready)
                services.client.fail_all(ApiError(503, CLOSED, code=ENGINE_DEAD))
            except WorkerDied as died:
                raise _reason(session, died) from None
            finally:
                services.close()


async def _in_python(call: Coroutine[Any, Any, T]) -> T:
    with as_python():
        return await call


def _reason(session: RoleSession, died: WorkerDied) -> Exception:
    with suppress(OSError):
        return ConfigError(in_python(session.ipc.reported_error.read_text()))
    return EngineDeadError(f"{died}; the lines that it wrote to stderr may say more", code=ENGINE_DEAD)
