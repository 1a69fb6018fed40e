"""A worker's life may end in another one, in the other role: what was asked for, and what the one leaves to the next.

Must not know HTTP, or how a life is started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a life leaves to the next: the role, and what was changed while it ran. `adapters`: name -> directory."""

    role: str
    model_path: str
    served_name: str
    weight_version: str
    adapters: Mapping[str, str]


@dataclass(kw_only=True)
class RoleSwitch:
    """Of one life. `check` raises ConfigError or ConfigError for a next life that cannot be.

    `last`: how the switch ended by which this life began, for /server_info; None: none has been.
    """

    check: Callable[[Handover], object]
    last: Mapping[str, Any] | None = None
    to: Handover | None = None
    timeout_s: float | None = None

    def ask(self, to: Handover, timeout_s: float | None) -> None:
        assert self.to is None, self.to
        self.to, self.timeout_s = to, timeout_s
