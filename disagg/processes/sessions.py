"""A worker's sessions, one after another.

session as prefill --POST /switch_role--> session as decode --...--> ended (signal, or a child died)
     ^                                      |
     +-------- it could not start ----------+
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from disagg.config import frontend_spec
from disagg.processes.role_session import RoleSession, started
from disagg.processes.session_plan import SessionPlan, check_next_session, next_session
from engine.frontend.role_switch import RoleSwitch, RoleSwitchState
from engine.frontend.server import WorkerDied, run_frontend
from service.flags import ConfigError
from service.http.listening import ListeningPort
from service.process.files import write_ready_file
from service.process.start import spare_what_lives
from service.process.stop_signals import StopSignals
from service.security.keys import KeyGate
from service.telemetry.context import set_up_logging

log = logging.getLogger(__name__)


async def run_sessions(plan: SessionPlan, gate: KeyGate, ports: tuple[ListeningPort, ...]) -> int:
    """Return the exit status. Raises a first session's error."""
    worker = _Worker(gate, ports, StopSignals())
    with worker.signals.caught(on_hangup=worker.on_hangup):
        return await worker.live(plan)


@dataclass(frozen=True, kw_only=True)
class _End:
    to: RoleSwitchState | None = None
    error: Exception | None = None
    is_reported: bool = False
    was_ready: bool = False


@dataclass
class _Worker:
    gate: KeyGate
    ports: tuple[ListeningPort, ...]
    signals: StopSignals
    session: RoleSession | None = None

    def on_hangup(self) -> None:
        self.gate.reload(time.monotonic())
        if self.session is not None:
            self.session.children.hang_up()

    async def live(self, plan: SessionPlan) -> int:
        back: SessionPlan | None = None  # previous session, to return to if this one cannot start
        last: Mapping[str, Any] | None = None
        while True:
            end = await self._one_session(plan, last)
            if end.to is not None:
                last = _switch(plan, end.to.role)
                plan, back = next_session(plan, end.to), next_session(plan, replace(end.to, role=plan.role))
                log.info("switching from %s to %s", last["from"], last["to"])
            elif end.error is not None and back is not None and not (end.was_ready or self.signals.requested.is_set()):
                log.error("it cannot be a %s worker (%s); it goes back to %s", plan.role, end.error, back.role)
                last = {**_switch(back, plan.role), "error": f"{end.error}; the worker's log may say more"}
                plan, back = back, None
            else:
                return _status(end)
            set_up_logging(level=plan.server.log_level, format=plan.server.log_format, process=plan.role)

    async def _one_session(self, plan: SessionPlan, last: Mapping[str, Any] | None) -> _End:
        if self.signals.requested.is_set():
            return _End()
        session: RoleSession | None = None
        try:
            with started(plan, self.ports[1:]) as session:
                self.session = session
                return _End(to=await self._serve(session, last))
        except (WorkerDied, ConfigError) as error:
            if session is None:
                return _End(error=error)
            return _End(error=error, is_reported=session.children.has_reported(), was_ready=session.was_ready)
        finally:
            self.session = None

    async def _serve(self, session: RoleSession, last: Mapping[str, Any] | None) -> RoleSwitchState | None:
        plan = session.plan

        def on_ready() -> None:
            session.was_ready = True
            url = self.ports[0].url
            log.info("serving at %s (%s)", url, plan.role)
            write_ready_file(plan.server.ready_file, {"url": url, "role": plan.role, "pid": os.getpid()})
            spare_what_lives()

        can_switch = plan.role in ("prefill", "decode")
        spec = frontend_spec(
            plan.engine,
            plan.server,
            plan.disagg,
            plan.bootstrap_allowlist,
            switch=RoleSwitch(check=lambda to: check_next_session(plan, to), last=last) if can_switch else None,
        )
        return await run_frontend(
            spec,
            ipc=session.ipc,
            processes=session.children,
            signals=self.signals,
            gate=self.gate,
            port=self.ports[0],
            on_ready=on_ready,
        )


def _status(end: _End) -> int:
    if end.error is None:
        return 0
    if not isinstance(end.error, WorkerDied):
        raise end.error
    if not end.is_reported:
        print(f"tandem serve: error: {end.error}", file=sys.stderr, flush=True)
    return 1


def _switch(plan: SessionPlan, role: str) -> dict[str, Any]:
    return {"from": plan.role, "to": role, "error": None}
