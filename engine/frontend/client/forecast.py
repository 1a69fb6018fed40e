"""How long a new prompt would wait for its first token: queued tokens over the measured prefill rate. Pure.

A prompt is queued until its first output. The rate is the tokens of started prompts over the time in which any were
queued; both decay by half every `HALF_LIFE_S` of it. So it includes decodes, short memory, cached prefixes, transfers.
"""

HALF_LIFE_S = 10.0
MIN_STARTED = 4  # prompts with a first output before which there is no forecast


class PrefillForecast:
    def __init__(self) -> None:
        self._queued: dict[str, int] = {}
        self._started = 0
        self._served_tokens = 0.0  # decayed, over _busy_s
        self._busy_s = 0.0
        self._at_s = 0.0

    def add(self, name: str, num_tokens: int, now_s: float) -> None:
        """A prompt was sent. An empty one counts as one token."""
        assert name not in self._queued, name
        self._pass(now_s)
        self._queued[name] = max(1, num_tokens)

    def start(self, name: str, now_s: float) -> None:
        """A prompt's first output came; later calls change nothing."""
        if name in self._queued:
            self._pass(now_s)
            self._served_tokens += self._queued.pop(name)
            self._started += 1

    def drop(self, name: str, now_s: float) -> None:
        if name in self._queued:
            self._pass(now_s)
            del self._queued[name]

    def wait_s(self, num_tokens: int, now_s: float) -> float | None:
        """Seconds until a prompt of `num_tokens` that is sent now has its first token; None before `MIN_STARTED`."""
        self._pass(now_s)
        if self._started < MIN_STARTED or self._busy_s <= 0.0:
            return None
        rate = self._served_tokens / self._busy_s
        return (sum(self._queued.values()) + num_tokens) / max(rate, 1e-9)

    def _pass(self, now_s: float) -> None:
        """Count the time since the last call, if a prompt was queued."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        if self._queued:
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            self._served_tokens *= keep
            self._busy_s = self._busy_s * keep + passed_s
