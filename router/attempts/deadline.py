"""How long a client will wait, as workers read it from headers: passed on, and shortened by what waits and retries took. Pure."""

import math
from collections.abc import Mapping

from service.http.deadline import UNITS_S, seconds_of

LEAST_S = 0.001  # a worker may still be idle


def time_given(headers: Mapping[str, str]) -> float:
    """Seconds that the client of a request with `headers` (names in lower case) will wait; inf: it does not say."""
    return min((value_s for name in UNITS_S if (value_s := _seconds(headers, name)) is not None), default=math.inf)


def less_time(headers: Mapping[str, str], elapsed_s: float) -> dict[str, str]:
    """`headers` (of the first attempt, names in lower case) for one that begins `elapsed_s` later.

    What is no number is passed as it is: the worker says what is wrong with it.
    """
    left = dict(headers)
    for name, unit_s in UNITS_S.items():
        value_s = _seconds(headers, name)
        if value_s is not None:
            left[name] = f"{max(LEAST_S, value_s - elapsed_s) / unit_s:.3f}"
    return left


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    """What the header says; None: nothing, or nothing that makes sense."""
    text = headers.get(name)
    return None if text is None else seconds_of(text, name)
