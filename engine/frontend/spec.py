"""Configuration of a role session, and role switches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.frontend.client.other_frontends import OtherFrontends
from engine.frontend.client.shared_requests import SharedRequests
from engine.ipc import MAIN_FRONTEND
from engine.stamps import Stamps
from service.http.server import RequestLimits
from service.security.keys import KeyGate, open_gate

HEALTH_TIMEOUT_S = 20.0
DEFAULT_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, kw_only=True)
class RoleSwitchState:
    """The next role and runtime changes. `adapters`: name -> directory."""

    role: str
    model_path: str
    served_name: str
    weight_version: str
    adapters: Mapping[str, str]


@dataclass(kw_only=True)
class RoleSwitch:
    """A pending switch. `check` raises ConfigError if the session cannot start.

    `last`: result of the previous switch, for /server_info. `on_request`: called once.
    """

    check: Callable[[RoleSwitchState], object]
    last: Mapping[str, Any] | None = None
    to: RoleSwitchState | None = None
    timeout_s: float | None = None
    on_request: Callable[[], None] = lambda: None

    @property
    def to_role(self) -> str | None:
        return None if self.to is None else self.to.role

    def request(self, to: RoleSwitchState, timeout_s: float | None) -> None:
        """End this session after a drain. Call it once."""
        assert self.to is None, self.to
        self.to, self.timeout_s = to, timeout_s
        self.on_request()


@dataclass(frozen=True, kw_only=True)
class FrontendSpec:
    """Configuration of a role session. `extra_info`: for /server_info, no secrets.

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
    """A frontend among those of its worker. `others`, `stamps`: in the main one."""

    row: int = MAIN_FRONTEND
    shared: SharedRequests | None = None
    others: OtherFrontends | None = None
    stamps: Stamps | None = None


def limits_of(server: ServerConfig) -> RequestLimits:
    return RequestLimits(max_body_bytes=server.max_body_bytes, size_flag="--max-body-bytes")


def open_worker_gate(server: ServerConfig) -> KeyGate:
    return open_gate(
        api_key=server.api_key,
        api_key_file=server.api_key_file,
        admin_api_key=server.admin_api_key,
        admin_api_key_file=server.admin_api_key_file,
    )
