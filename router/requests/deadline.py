"""How long a client will wait, as workers read it from headers: passed on, and shortened by what retries took. Pure."""

import math
from collections.abc import Mapping

TIMEOUT_HEADER = "x-request-timeout"  # seconds
ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"
LEAST_S = 0.001  # a worker may still be idle

_UNITS_S = {TIMEOUT_HEADER: 1.0, ENVOY_HEADER: 0.001}


def less_time(headers: Mapping[str, str], elapsed_s: float) -> dict[str, str]:
    """`headers` (of the first attempt, names in lower case) for one that begins `elapsed_s` later.

    What is no number is passed as it is: the worker says what is wrong with it.
    """
    left = dict(headers)
    for name, unit_s in _UNITS_S.items():
        try:
            value_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0.0 < value_s < math.inf:
            left[name] = f"{max(LEAST_S, value_s - elapsed_s) / unit_s:.3f}"
    return left
