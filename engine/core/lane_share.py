"""How much of the device decode steps get beside prompts, and how soon they follow one another: what an objective for ITL needs.

    ITL objective  |<----------------- itl_s ---------------->|
    decode lane    | step |                          | step |          due PACE of it behind the one before
    prefill lane   | what a step leaves | whole device | ...

A decode step gets the fewest parts of the device with which it ends within PACE of the objective, and is not due before that. The rest is
the prompts'. Where all parts are not enough, LEAST_FOR_PROMPTS of the time stays theirs. Without an objective a decode step has
a half: of the parts, or where these cannot be divided, of the time. Nothing waits where no prompt is computed.

Sources of the idea: a share of decode that follows from its objective, in Semi-PD (arXiv:2504.19867) and DynaServe (arXiv:2504.09285).
"""

from collections import deque

PACE = 0.75  # of the objective: steps differ, and the loop takes its turns
ROOMY = 0.5  # of the objective: a step that would end within it with a part less gives one back
LEAST_FOR_PROMPTS = 0.25
HALF = 0.5
NUM_LAST = 5  # steps that count
ENOUGH = 3  # of them, to change the parts


class LaneShare:
    """`parts`: of the device. `itl_s`: the objective; None: there is none. `waits`: prompts stand still while a decode step has all parts.

    `decode_parts`: of a decode step beside prompts.
    """

    def __init__(self, *, parts: int, itl_s: float | None, waits: bool) -> None:
        assert parts >= 1 and (itl_s is None or itl_s > 0)
        self._parts = parts
        self._itl_s = itl_s
        self._waits = waits
        self._taken_s: deque[float] = deque(maxlen=NUM_LAST)
        self.decode_parts = max(1, parts // 2)

    def note(self, taken_s: float) -> None:
        """Learn from a decode step that took `taken_s` beside prompts."""
        self._taken_s.append(taken_s)
        if self._itl_s is None or len(self._taken_s) < ENOUGH:
            return
        usual_s = self._usual_s
        if usual_s > PACE * self._itl_s and self.decode_parts < self._parts:
            self._change(1)
        elif self.decode_parts > 1 and usual_s * self.decode_parts < ROOMY * self._itl_s * (self.decode_parts - 1):
            self._change(-1)

    def due_s(self, launched_s: float, joined_s: float | None = None) -> float:
        """Return when a decode step is due beside prompts. `launched_s`: when the last one was launched.

        `joined_s`: when the first request had its first token that no decode step was planned for since; its next token is due
        that long after, and the step takes time.
        """
        due_s = launched_s + max(self._pace_s, self._left_s)
        if joined_s is None:
            return due_s
        usual_s = self._usual_s if self._taken_s else 0.0
        return min(due_s, max(launched_s + self._left_s, joined_s + max(0.0, self._pace_s - usual_s)))

    @property
    def _pace_s(self) -> float:
        return 0.0 if self._itl_s is None else PACE * self._itl_s

    @property
    def _left_s(self) -> float:
        """The time from one step to the next that leaves prompts some, if steps leave them no parts."""
        if not self._waits or self.decode_parts < self._parts or not self._taken_s:
            return 0.0
        return self._usual_s / (HALF if self._itl_s is None else 1 - LEAST_FOR_PROMPTS)

    @property
    def _usual_s(self) -> float:
        """The upper median."""
        return sorted(self._taken_s)[len(self._taken_s) // 2]

    def _change(self, by: int) -> None:
        self.decode_parts += by
        self._taken_s.clear()

    def gauges(self) -> dict[str, float]:
        """Return them for metrics: the share of the device that decodes have beside prompts."""
        return {"decode_share": self.decode_parts / self._parts}
