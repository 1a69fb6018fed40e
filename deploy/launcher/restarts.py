"""Pauses before dead processes start again. Pure."""

from dataclasses import dataclass

MAX_DOUBLINGS = 30


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Pauses of `first_s`, doubled by each death up to `longest_s`; reset by `stable_s` of health.

    The front, which clients reach, starts `front_tries` times in a row.
    """

    always: bool = True
    first_s: float = 1.0
    longest_s: float = 30.0
    stable_s: float = 60.0
    front_tries: int = 5


class Restarts:
    """Deaths of one process in a row. Times are of one clock, in seconds."""

    def __init__(self, policy: RestartPolicy, *, is_front: bool) -> None:
        self._policy = policy
        self._is_front = is_front
        self._deaths = 0
        self._healthy_at_s: float | None = None

    def became_healthy(self, now_s: float) -> None:
        self._healthy_at_s = now_s

    def pause_s(self, status: int | None, now_s: float) -> float | None:
        """None: it stays dead."""
        policy = self._policy
        if status == 0 or not policy.always:  # 0: it drained after a signal
            return None
        if self._healthy_at_s is not None and now_s - self._healthy_at_s >= policy.stable_s:
            self._deaths = 0
        self._healthy_at_s = None
        self._deaths += 1
        if self._is_front and self._deaths > policy.front_tries:
            return None
        return min(policy.first_s * 2.0 ** min(self._deaths - 1, MAX_DOUBLINGS), policy.longest_s)
