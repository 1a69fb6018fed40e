"""Configuration of a role session, and of one of its frontends."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.frontend.client.other_frontends import NO_OTHERS, OtherFrontends
from engine.frontend.client.scheduler_link import SharedRequests
from engine.frontend.role_switch import RoleSwitch
from engine.ipc import MAIN_FRONTEND, IpcPaths
from engine.stamps import Stamps
from service.http.errors import RequestLimits
from service.security.keys import KeyGate, open_gate

HEALTH_TIMEOUT_S = 20.0
DEFAULT_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, kw_only=True)
class FrontendSpec:
    """`extra_info`: for /server_info, no secrets.

    `switch`: None for a fixed role. `secret`: authenticates the router. `warms_up`: compute a
    request first.
    """

    server: ServerConfig
    engine: EngineConfig
    mode: str = "null"
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    default_bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    bootstrap_allowlist: BootstrapAllowlist = field(default_factory=BootstrapAllowlist)
    switch: RoleSwitch | None = None
    health_timeout_s: float = HEALTH_TIMEOUT_S
    warms_up: bool = False
    secret: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class FrontendSlot:
    """`others`: none but in the main one."""

    stamps: Stamps
    row: int = MAIN_FRONTEND
    shared: SharedRequests | None = None
    others: OtherFrontends = NO_OTHERS


def main_slot(spec: FrontendSpec, ipc: IpcPaths, stack: AsyncExitStack) -> FrontendSlot:
    """The main frontend's; `stack` closes what it shares with others."""
    num_rows = spec.server.num_frontends
    if num_rows == 1:
        return FrontendSlot(stamps=Stamps(ipc.dir))
    shared = SharedRequests(ipc.dir, row=MAIN_FRONTEND, num_rows=num_rows, num_ranks=spec.engine.dp_size)
    stack.callback(shared.close)
    others = OtherFrontends([ipc.http_socket(row) for row in range(num_rows) if row != MAIN_FRONTEND])
    stack.push_async_callback(others.close)
    return FrontendSlot(shared=shared, others=others, stamps=Stamps(ipc.dir))


def limits_of(server: ServerConfig) -> RequestLimits:
    return RequestLimits(max_body_bytes=server.max_body_bytes, size_flag="--max-body-bytes")


def open_worker_gate(server: ServerConfig) -> KeyGate:
    return open_gate(
        api_key=server.api_key,
        api_key_file=server.api_key_file,
        admin_api_key=server.admin_api_key,
        admin_api_key_file=server.admin_api_key_file,
    )
