"""How long a client waits, by header or by flag, and the answer when that is too short."""

import math
from collections.abc import Mapping

from engine.frontend.errors import DEADLINE
from service.http.deadline import UNITS_S, seconds_of
from service.http.errors import ApiError

MAX_RETRY_AFTER_S = 60


def request_timeout_s(headers: Mapping[str, str], *, default_s: float | None) -> float | None:
    """Seconds from now; None: no limit. Raises ApiError(400) for a header that is not a number above 0."""
    for name in UNITS_S:
        text = headers.get(name)
        if text is None:
            continue
        value_s = seconds_of(text, name)
        if value_s is None:
            raise ApiError(400, f"{name}: must be a number greater than 0, got {text[:40]!r}", field=name)
        return value_s
    return default_s


def too_late(wait_s: float, timeout_s: float) -> ApiError:
    """503: another worker may be in time. `Retry-After` says when this one would be."""
    return ApiError(
        503,
        f"the first token would come after about {wait_s:.1f} s, the request ends after {timeout_s:g} s; try again later",
        code=DEADLINE,
        retry_after_s=min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s - timeout_s))),
    )
