"""What a turn may skip while it only decodes: to read the inbox, to ask the role. Under heavy decode it costs more than it gains.

Flags: --scheduler-recv-interval, --disaggregation-decode-polling-interval.
"""

from engine.core.plan import Plan


class DecodeSkipper:
    """`interval`: decode steps from one time to the next. A turn that launches a step with prompts, or nothing, ends it."""

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._num_skipped = 0

    def due(self, last: Plan | None) -> bool:
        """`last`: what the turn before launched, if anything. Call it once a turn."""
        self._num_skipped += 1
        if last is not None and not last.extend and self._num_skipped < self._interval:
            return False
        self._num_skipped = 0
        return True
