"""Role switches: the request, and the next session's state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
    """`check` raises ConfigError if the session cannot start.

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
