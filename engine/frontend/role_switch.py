"""A role session may end in a switch to the other role: its request, and the state that the next session starts with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RoleSwitchState:
    """The next role, and what changed at run time. `adapters`: name -> directory."""

    role: str
    model_path: str
    served_name: str
    weight_version: str
    adapters: Mapping[str, str]


@dataclass(kw_only=True)
class RoleSwitch:
    """The switch that may end a session. `check` raises ConfigError for a session that cannot start.

    `last`: result of the switch that began this session, for /server_info; None: there was none. `on_request` is called once.
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
