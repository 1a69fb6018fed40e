"""How long a new prompt would wait for its first token: queued tokens over the measured prefill rate. Pure.

Queued are the prompts that were sent to the scheduler and have no output yet; the rate is the prompt tokens that got
one, over the time during which any were queued, older time counting less (half as much after each `HALF_LIFE_S` of
work). So it holds whatever slows prompts down: decodes beside them, memory that is short, cached prefixes, transfers.
Must not know requests or clocks: it is told names, tokens and seconds.
"""

HALF_LIFE_S = 10.0
MIN_STARTED = 4  # prompts that must have begun before a forecast is ventured


class PrefillForecast:
    def __init__(self) -> None:
        self._queued: dict[str, int] = {}
        self._queued_tokens = 0
        self._started = 0
        self._served_tokens = 0.0  # decayed, over _busy_s
        self._busy_s = 0.0
        self._at_s = 0.0

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    def add(self, name: str, num_tokens: int, now_s: float) -> None:
        """A prompt was sent. An empty one counts as one token."""
        assert name not in self._queued, name
        self._pass(now_s)
        self._queued[name] = max(1, num_tokens)
        self._queued_tokens += max(1, num_tokens)

    def start(self, name: str, now_s: float) -> None:
        """Its first output came. Later ones change nothing."""
        num_tokens = self._take(name, now_s)
        if num_tokens:
            self._served_tokens += num_tokens
            self._started += 1

    def drop(self, name: str, now_s: float) -> None:
        """It will never start (or has long done so)."""
        self._take(name, now_s)

    def rate(self, now_s: float) -> float | None:
        """Prompt tokens a second; None while too little was seen."""
        self._pass(now_s)
        if self._started < MIN_STARTED or self._busy_s <= 0.0:
            return None
        return self._served_tokens / self._busy_s

    def wait_s(self, num_tokens: int, now_s: float) -> float | None:
        """Seconds until a prompt of `num_tokens` that is sent now has its first token; None: unknown."""
        rate = self.rate(now_s)
        if rate is None:
            return None
        return (self._queued_tokens + num_tokens) / max(rate, 1e-9)

    def _take(self, name: str, now_s: float) -> int:
        if name not in self._queued:
            return 0
        self._pass(now_s)
        num_tokens = self._queued.pop(name)
        self._queued_tokens -= num_tokens
        return num_tokens

    def _pass(self, now_s: float) -> None:
        """Time goes by; it counts while somebody waits."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        if self._queued:
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            self._served_tokens *= keep
            self._busy_s = self._busy_s * keep + passed_s
