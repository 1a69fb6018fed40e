"""Decision to fetch a prefix or compute it, and the maximum wait. Pure.

  fetch      latency of recent small fetches + bytes / bandwidth of recent large ones
  compute    tokens * time per token of recent prompts of about this length (a power of two)

Fetches are forgotten after `MEMORY_S`: a slow link gets another try.
"""

import math
from collections import deque

ASSUMED_BYTES_A_S = 1e9  # before the first fetch: TCP on a good network, or a copy inside a small machine
ASSUMED_LATENCY_S = 0.01
LARGE_BYTES = 4 << 20  # a smaller fetch is dominated by latency
LEAST_MEASURED_TOKENS = 64  # shorter prompts measure only the time of a step
SLACK_S = 0.25  # extra wait for a handshake and a busy source
UNMEASURED_WAIT_S = 2.0  # before the first prompt
MEMORY_S = 60.0
KEPT = 32


class FetchPolicy:
    def __init__(self, *, token_bytes: float) -> None:
        self._token_bytes = token_bytes
        self._fetches = _Rate(memory_s=MEMORY_S)
        self._small_fetches = _Rate(memory_s=MEMORY_S)
        self._prompts: dict[int, _Rate] = {}  # by bits of the number of tokens

    def note_fetch(self, num_tokens: int, taken_s: float, now_s: float) -> None:
        """Record the time of a fetch, a minimum if it timed out."""
        size_bytes = num_tokens * self._token_bytes
        if size_bytes < LARGE_BYTES:
            self._small_fetches.note(1, taken_s, now_s)
        else:
            self._fetches.note(size_bytes, max(taken_s - self._latency_s(now_s), taken_s / 2), now_s)

    def note_prompt(self, num_tokens: int, taken_s: float, now_s: float) -> None:
        if num_tokens >= LEAST_MEASURED_TOKENS and taken_s > 0:
            rate = self._prompts.setdefault(num_tokens.bit_length(), _Rate(memory_s=math.inf))
            rate.note(num_tokens, taken_s, now_s)

    def wait_s(self, num_tokens: int, now_s: float) -> float | None:
        """Return the maximum wait, or None to compute the tokens here.

        At worst, wait and computation take twice the time.
        """
        compute_s = self.compute_s(num_tokens, now_s)
        if compute_s is None:
            return UNMEASURED_WAIT_S
        return compute_s + SLACK_S if self.fetch_s(num_tokens, now_s) < compute_s else None

    def copy_wait_s(self, num_tokens: int, now_s: float) -> float:
        """Maximum time of a copy, which no request waits for."""
        return UNMEASURED_WAIT_S + self.fetch_s(num_tokens, now_s)

    def fetch_s(self, num_tokens: int, now_s: float) -> float:
        bytes_a_s = self._fetches.a_second(now_s) or ASSUMED_BYTES_A_S
        return self._latency_s(now_s) + num_tokens * self._token_bytes / bytes_a_s

    def compute_s(self, num_tokens: int, now_s: float) -> float | None:
        bits = num_tokens.bit_length()
        nearest = min(self._prompts, key=lambda known: (abs(known - bits), known), default=None)
        tokens_a_s = None if nearest is None else self._prompts[nearest].a_second(now_s)
        return None if tokens_a_s is None else num_tokens / tokens_a_s

    def _latency_s(self, now_s: float) -> float:
        small_a_s = self._small_fetches.a_second(now_s)
        return ASSUMED_LATENCY_S if small_a_s is None else 1 / small_a_s

    def gauges(self, now_s: float) -> dict[str, float]:
        bytes_a_s = self._fetches.a_second(now_s)
        return {} if bytes_a_s is None else {"prefix_fetch_gb_s": bytes_a_s / 1e9}


class _Rate:
    """Rate over the last `KEPT` samples in `memory_s`."""

    def __init__(self, *, memory_s: float) -> None:
        self._memory_s = memory_s
        self._last: deque[tuple[float, float, float]] = deque(maxlen=KEPT)  # amount, seconds, when

    def note(self, amount: float, taken_s: float, now_s: float) -> None:
        self._last.append((amount, max(taken_s, 1e-6), now_s))

    def a_second(self, now_s: float) -> float | None:
        while self._last and self._last[0][2] < now_s - self._memory_s:
            self._last.popleft()
        if not self._last:
            return None
        return sum(amount for amount, _, _ in self._last) / sum(taken_s for _, taken_s, _ in self._last)
