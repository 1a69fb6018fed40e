"""Engine errors as HTTP errors (service/http/errors.py)."""

import math

from engine.messages import ControlReply, FinishReason
from engine.sampling_params import InvalidParam
from service.http.errors import DRAINING, MODEL_ERROR, ApiError

DEADLINE = "deadline"  # error code: too late
MAX_RETRY_AFTER_S = 60


def from_invalid_param(e: InvalidParam, *, names: dict[str, str] | None = None) -> ApiError:
    """`names`: the API's names of parameters."""
    field = (names or {}).get(e.field, e.field)
    return ApiError(400, str(e).replace(e.field, field, 1), field=field)


def from_finish(finish: FinishReason) -> ApiError:
    code = MODEL_ERROR if finish.own else DEADLINE if finish.status == 504 else None
    retry_after_s = 1 if finish.status == 503 else None
    message = finish.message or "the request was aborted"
    return ApiError(finish.status, message, field=finish.field or None, code=code, retry_after_s=retry_after_s)


def refused(reply: ControlReply) -> ApiError:
    """The text of a rejected control message may start with a field."""
    field, colon, _ = reply.message.partition(": ")
    return ApiError(reply.status, reply.message, field=field if colon and field.isidentifier() else None)


def not_ready(message: str) -> ApiError:
    return ApiError(503, message, code="service_unavailable", retry_after_s=1)


def draining(message: str) -> ApiError:
    """An error on which routers try another worker."""
    return ApiError(503, message, code=DRAINING, retry_after_s=1)


def too_late(wait_s: float, timeout_s: float) -> ApiError:
    """503, because another worker may be faster; `Retry-After` fits this one."""
    return ApiError(
        503,
        f"the first token would come after about {wait_s:.1f} s, the request ends after {timeout_s:g} s; try again later",
        code=DEADLINE,
        retry_after_s=min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s - timeout_s))),
    )
