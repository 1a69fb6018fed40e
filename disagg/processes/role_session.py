"""Session of a worker in one role: its processes, from their start to their end."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from bootstrap_server.app import BootstrapServer
from bootstrap_server.registry import BootstrapConfig
from disagg.config import OtherFrontendSpec, SchedulerSpec, read_secret
from disagg.processes.children import Children
from disagg.processes.joint_memory import JointMemory
from disagg.processes.rank_start import gpus_of_ranks, visible_here
from disagg.processes.session_plan import BOOTSTRAP_PORT_FLAG, SessionPlan
from engine.flags.local_defaults import shares_cores
from engine.flags.nodes import leader_of
from engine.frontend.client.dp_policy import Rule, rule_of
from engine.ipc import IpcPaths
from service.http.listening import ListeningPort

PROGRESS_ENV = "TANDEM_PROGRESS"  # `tandem up` sets it to show a bar from our log


@dataclass(kw_only=True)
class RoleSession:
    plan: SessionPlan
    ipc: IpcPaths
    children: Children = field(default_factory=Children)
    joint: JointMemory | None = None  # shared by the DP ranks
    was_ready: bool = False


@contextmanager
def started(plan: SessionPlan, other_ports: Sequence[ListeningPort] = ()) -> Iterator[RoleSession]:
    """Raises ConfigError."""
    bootstrap = _embedded_bootstrap_server(plan)
    session = RoleSession(plan=plan, ipc=IpcPaths.create())
    try:
        if bootstrap is not None:
            bootstrap.start()
            disagg = replace(plan.disagg, disaggregation_bootstrap_port=bootstrap.port)
            session.plan = replace(plan, disagg=disagg)
        _start(session, num_frontends=1 + len(other_ports))
        for row, port in enumerate(other_ports, start=1):
            start_frontend(session, row, port)
        yield session
    finally:
        session.children.end()
        if session.joint is not None:
            session.joint.close()
        session.ipc.remove()
        if bootstrap is not None:
            bootstrap.close()


def _start(session: RoleSession, *, num_frontends: int) -> None:
    plan = session.plan
    engine, server, disagg = plan.engine, plan.server, plan.disagg
    own = f"{plan.control_host}:{disagg.disaggregation_bootstrap_port}"
    first = SchedulerSpec(
        engine=engine,
        disagg=disagg,
        ipc_dir=session.ipc.dir,
        control_host=plan.control_host,
        bootstrap=disagg.disaggregation_bootstrap_server or own,
        log_level=server.log_level,
        log_format=server.log_format,
        progress=sys.stderr.isatty() or PROGRESS_ENV in os.environ,
        num_frontends=num_frontends,
    )
    threads = engine.num_threads
    assert threads is not None, "prepared (disagg/processes/worker.py)"
    if engine.enable_dp_attention:
        session.joint = JointMemory.create(engine)
        session.children.before_end = session.joint.abort
        first = msgspec.structs.replace(first, joint=session.joint.spec)
    for rank, gpus in enumerate(gpus_of_ranks(engine, visible_here)):
        spec = msgspec.structs.replace(first, dp_rank=rank, gpus=gpus, progress=first.progress and rank == 0)
        session.children.start(
            "scheduler" if engine.dp_size == 1 else f"DP rank {rank} scheduler",
            "disagg.processes.scheduler_process",
            ["--spec-json", msgspec.json.encode(spec).decode()],
            num_threads=threads,
            descriptors=() if session.joint is None else session.joint.descriptors,
            shares_cores=shares_cores(engine),
            gpu=gpus[leader_of(engine)] if gpus else None,
        )


def start_frontend(session: RoleSession, row: int, port: ListeningPort) -> None:
    plan, file = session.plan, session.ipc.frontend_spec
    spec = OtherFrontendSpec(
        engine=plan.engine,
        server=plan.server,
        disagg=plan.disagg,
        ipc_dir=session.ipc.dir,
        control_host=plan.control_host,
    )
    # The directory is private; a command line is not, and keys may be in it.
    file.write_bytes(msgspec.json.encode(spec))
    session.children.start(
        f"frontend {row}",
        "disagg.processes.frontend_process",
        ["--spec", str(file), "--row", str(row), "--sockets", *map(str, port.descriptors)],
        num_threads=1,
        descriptors=port.descriptors,
        takes_hangup=True,
    )


def _embedded_bootstrap_server(plan: SessionPlan) -> BootstrapServer | None:
    if not plan.has_bootstrap_server:
        return None
    config = BootstrapConfig(
        host=plan.server.host,
        port=plan.disagg.disaggregation_bootstrap_port,
        allowed_hosts=plan.server.allowed_hosts,
    )
    return BootstrapServer(
        config,
        # else a room is at the DP rank of its number
        shared=plan.engine.dp_size > 1 and rule_of(plan.server.load_balance_method, mode=plan.role) is not Rule.ROOM,
        secret=read_secret(plan.disagg.cluster_secret_file),
        port_flag=BOOTSTRAP_PORT_FLAG,
    )
