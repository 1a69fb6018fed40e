"""Health of a worker: states and check results. Pure."""

from enum import StrEnum


class Health(StrEnum):
    STARTING = "starting"  # has not answered a check yet
    UP = "up"
    DRAINING = "draining"  # finishes its requests, takes no new ones
    DOWN = "down"


class Check(StrEnum):
    OK = "ok"
    DRAINING = "draining"  # as the worker reports
    FAILED = "failed"
    REFUSED = "refused"  # nothing listens: decides at once


# (state, event) -> (next state, flag with the number of equal results needed, if any)
TRANSITIONS: dict[tuple[Health, Check], tuple[Health, str]] = {
    (Health.STARTING, Check.OK): (Health.UP, "health_success_threshold"),
    (Health.STARTING, Check.DRAINING): (Health.DRAINING, ""),
    (Health.STARTING, Check.FAILED): (Health.STARTING, ""),
    (Health.STARTING, Check.REFUSED): (Health.STARTING, ""),
    (Health.UP, Check.OK): (Health.UP, ""),
    (Health.UP, Check.DRAINING): (Health.DRAINING, ""),
    (Health.UP, Check.FAILED): (Health.DOWN, "health_failure_threshold"),
    (Health.UP, Check.REFUSED): (Health.DOWN, ""),
    (Health.DRAINING, Check.OK): (Health.UP, "health_success_threshold"),  # a new process serves at this address
    (Health.DRAINING, Check.DRAINING): (Health.DRAINING, ""),
    (Health.DRAINING, Check.FAILED): (Health.DOWN, "health_failure_threshold"),
    (Health.DRAINING, Check.REFUSED): (Health.DOWN, ""),
    (Health.DOWN, Check.OK): (Health.UP, "health_success_threshold"),
    (Health.DOWN, Check.DRAINING): (Health.DRAINING, ""),
    (Health.DOWN, Check.FAILED): (Health.DOWN, ""),
    (Health.DOWN, Check.REFUSED): (Health.DOWN, ""),
}
