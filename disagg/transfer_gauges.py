"""How fast KV has gone to decode lately. Pure; owned by the prefill role, which sees both ends of a transfer."""

from collections import deque

KEPT = 64  # transfers that the gauges look back on


class TransferGauges:
    """Times from the last chunk's hand-over until every byte and the metadata row have landed: what a request waits for.

    Earlier chunks travel while the next one computes. The loop polls, so speeds are lower bounds for small prompts. Layer by
    layer most of the last chunk has left before: the speed is what the request sees, and may be more than the wire's.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._bootstraps: deque[float] = deque(maxlen=KEPT)

    def bootstrapped(self, taken_s: float) -> None:
        """Decode's pages were known `taken_s` after the request had come."""
        self._bootstraps.append(taken_s)

    def landed(self, *, size_bytes: int, taken_s: float) -> None:
        self._recent.append((size_bytes, max(taken_s, 1e-9)))

    def values(self) -> dict[str, float]:
        waits = self._bootstraps
        bootstrap = {"kv_transfer_bootstrap_ms": sum(waits) / len(waits) * 1e3} if waits else {}
        if not self._recent:
            return bootstrap
        size_bytes, taken_s = (sum(column) for column in zip(*self._recent, strict=True))
        return {
            **bootstrap,
            "kv_transfer_total_mb": size_bytes / len(self._recent) / 1e6,
            "kv_transfer_speed_gb_s": size_bytes / taken_s / 1e9,
            "kv_transfer_latency_ms": taken_s / len(self._recent) * 1e3,
        }
