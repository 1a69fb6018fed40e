"""How long a new prompt would wait for its first token: queued tokens over the measured prefill rate. Pure.

Queued are the prompts that were sent to the scheduler and have no output yet. The rate is the prompt tokens that got one,
over the time in which any were queued; both decay by half every `HALF_LIFE_S` of work. So the rate includes whatever slows
prompts down: decodes beside them, memory that is short, cached prefixes, transfers.
"""

HALF_LIFE_S = 10.0
MIN_STARTED = 4  # prompts with a first output before which there is no forecast


class PrefillForecast:
    """`queued_tokens`: of the prompts without an output."""

    def __init__(self) -> None:
        self.queued_tokens = 0
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
        self.queued_tokens += max(1, num_tokens)

    def start(self, name: str, now_s: float) -> None:
        """Its first output came; later calls change nothing."""
        num_tokens = self._take(name, now_s)
        if num_tokens:
            self._served_tokens += num_tokens
            self._started += 1

    def drop(self, name: str, now_s: float) -> None:
        """Forget a prompt, which may have started."""
        self._take(name, now_s)

    def rate(self, now_s: float) -> float | None:
        """Prompt tokens per second; None before `MIN_STARTED`."""
        self._pass(now_s)
        if self._started < MIN_STARTED or self._busy_s <= 0.0:
            return None
        return self._served_tokens / self._busy_s

    def wait_s(self, num_tokens: int, now_s: float) -> float | None:
        """Seconds until a prompt of `num_tokens` that is sent now has its first token; None: unknown."""
        rate = self.rate(now_s)
        return None if rate is None else (self.queued_tokens + num_tokens) / max(rate, 1e-9)

    def _take(self, name: str, now_s: float) -> int:
        if name not in self._queued:
            return 0
        self._pass(now_s)
        num_tokens = self._queued.pop(name)
        self.queued_tokens -= num_tokens
        return num_tokens

    def _pass(self, now_s: float) -> None:
        """Let time pass; it counts while a prompt is queued."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        if self._queued:
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            self._served_tokens *= keep
            self._busy_s = self._busy_s * keep + passed_s
