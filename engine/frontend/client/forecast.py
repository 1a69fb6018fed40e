"""TTFT forecast: queued tokens over the measured prefill rate. Pure.

A prompt is queued until its first output. The rate is started prompts' tokens over the time with
any queued, decayed with `HALF_LIFE_S`, so it includes decodes, memory limits, cache hits,
transfers.
"""

HALF_LIFE_S = 10.0
MIN_STARTED = 4  # first outputs before the first forecast


class PrefillForecast:
    def __init__(self) -> None:
        self._queued: dict[str, int] = {}
        self._started = 0
        self._served_tokens = 0.0  # decayed, over _busy_s
        self._busy_s = 0.0
        self._at_s = 0.0

    def add(self, name: str, num_tokens: int, now_s: float) -> None:
        """An empty prompt counts one token."""
        assert name not in self._queued, name
        self._pass(now_s)
        self._queued[name] = max(1, num_tokens)

    def start(self, name: str, now_s: float) -> None:
        """Later calls change nothing."""
        if name in self._queued:
            self._pass(now_s)
            self._served_tokens += self._queued.pop(name)
            self._started += 1

    def drop(self, name: str, now_s: float) -> None:
        if name in self._queued:
            self._pass(now_s)
            del self._queued[name]

    def wait_s(self, num_tokens: int, now_s: float) -> float | None:
        """Seconds to the first token of a prompt sent now; None before `MIN_STARTED`."""
        self._pass(now_s)
        if self._started < MIN_STARTED or self._busy_s <= 0.0:
            return None
        rate = self._served_tokens / self._busy_s
        return (sum(self._queued.values()) + num_tokens) / max(rate, 1e-9)

    def _pass(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        if self._queued:
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            self._served_tokens *= keep
            self._busy_s = self._busy_s * keep + passed_s
