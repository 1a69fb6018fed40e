"""The health of a worker as a table: what a check makes of it. Pure; what follows for requests is the worker table's."""

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    STARTING = "starting"  # never answered a check yet
    UP = "up"
    DRAINING = "draining"  # it finishes what it has, and takes nothing new
    DOWN = "down"


class Check(StrEnum):
    """What was learnt about a worker. `REFUSED`: nothing listens there, so no second opinion is needed.

    `DRAINING`: it says so itself.
    """

    OK = "ok"
    DRAINING = "draining"
    FAILED = "failed"
    REFUSED = "refused"


# (state, event) -> (next state, which threshold must be reached first). Every cell is here.
TRANSITIONS: dict[tuple[Health, Check], tuple[Health, str]] = {
    (Health.STARTING, Check.OK): (Health.UP, "success"),
    (Health.STARTING, Check.DRAINING): (Health.DRAINING, "none"),
    (Health.STARTING, Check.FAILED): (Health.STARTING, "none"),
    (Health.STARTING, Check.REFUSED): (Health.STARTING, "none"),
    (Health.UP, Check.OK): (Health.UP, "none"),
    (Health.UP, Check.DRAINING): (Health.DRAINING, "none"),
    (Health.UP, Check.FAILED): (Health.DOWN, "failure"),
    (Health.UP, Check.REFUSED): (Health.DOWN, "none"),
    (Health.DRAINING, Check.OK): (Health.UP, "success"),  # another one serves at this address
    (Health.DRAINING, Check.DRAINING): (Health.DRAINING, "none"),
    (Health.DRAINING, Check.FAILED): (Health.DOWN, "failure"),
    (Health.DRAINING, Check.REFUSED): (Health.DOWN, "none"),
    (Health.DOWN, Check.OK): (Health.UP, "success"),
    (Health.DOWN, Check.DRAINING): (Health.DRAINING, "none"),
    (Health.DOWN, Check.FAILED): (Health.DOWN, "none"),
    (Health.DOWN, Check.REFUSED): (Health.DOWN, "none"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Equal results in a row before the state changes."""

    failure: int = 2
    success: int = 1
    none: int = 1
