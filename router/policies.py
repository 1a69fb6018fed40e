"""Which worker gets the next request. Pure: candidates and randomness are given; ties are broken by an explicit key."""

from collections.abc import Callable, Sequence
from typing import Protocol

from router.workers import Role, Worker


class Policy(Protocol):
    def choose(self, candidates: Sequence[Worker]) -> Worker:
        """One of `candidates` (all of one role, at least one)."""


class LeastLoad:
    """Fewest tokens; then fewest requests; then the one that was given the fewest so far; then the oldest."""

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        return min(candidates, key=_load_key)


def _load_key(worker: Worker) -> tuple[int, int, int, int]:
    return (worker.load_tokens, worker.inflight_requests, worker.assigned_total, worker.worker_id)


class RoundRobin:
    """The next worker by id after the last one chosen of that role, so that joining and leaving workers skip no one."""

    def __init__(self) -> None:
        self._last_id: dict[Role, int] = {}

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        ordered = sorted(candidates, key=lambda w: w.worker_id)
        last = self._last_id.get(ordered[0].role, -1)
        chosen = next((w for w in ordered if w.worker_id > last), ordered[0])
        self._last_id[chosen.role] = chosen.worker_id
        return chosen


class Random:
    """Uniform. `draw(n)` returns a random integer in [0, n)."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        return candidates[self._draw(len(candidates))]


def make_policy(name: str, *, draw: Callable[[int], int]) -> Policy:
    """The policy called `name` in router.config.POLICIES."""
    match name:
        case "least_load":
            return LeastLoad()
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(draw)
    raise AssertionError(f"unknown policy {name!r}")


def pick(policy: Policy, candidates: Sequence[Worker]) -> Worker | None:
    """A worker; None if there is none."""
    return policy.choose(candidates) if candidates else None
