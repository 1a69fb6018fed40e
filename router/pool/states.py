"""The health of a worker: a table of states and check results. Pure."""

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    STARTING = "starting"  # never answered a check yet
    UP = "up"
    DRAINING = "draining"  # it finishes its requests and takes nothing new
    DOWN = "down"


class Check(StrEnum):
    OK = "ok"
    DRAINING = "draining"  # as the worker reports
    FAILED = "failed"
    REFUSED = "refused"  # nothing listens there: one result is enough


# (state, event) -> (next state, which threshold must be reached first)
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
