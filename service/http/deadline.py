"""The client's deadline by `x-request-timeout` (seconds) or Envoy's header."""

import math
from collections.abc import Mapping

TIMEOUT_HEADER = "x-request-timeout"  # seconds
ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"
UNITS_S: Mapping[str, float] = {TIMEOUT_HEADER: 1.0, ENVOY_HEADER: 0.001}


def seconds_of(text: str, name: str) -> float | None:
    """Return a header's seconds, None unless above 0."""
    try:
        value_s = float(text) * UNITS_S[name]
    except ValueError:
        return None
    return value_s if 0.0 < value_s < math.inf else None
