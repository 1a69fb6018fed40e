"""Engine errors as HTTP errors (service/http/errors.py)."""

import logging
import math
import re
from collections.abc import Sequence

from engine.messages import ControlReply, FinishReason
from engine.sampling_params import InvalidParam
from service.http.errors import MODEL_ERROR, ApiError

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


def too_late(wait_s: float, timeout_s: float) -> ApiError:
    """503, because another worker may be faster; `Retry-After` fits this one."""
    return ApiError(
        503,
        f"the first token would come after about {wait_s:.1f} s, the request ends after {timeout_s:g} s; try again later",
        code=DEADLINE,
        retry_after_s=min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s - timeout_s))),
    )


# ---- Unknown body fields, ignored but reported in a header and the log.

log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Tandem-Ignored-Fields"
MAX_SHOWN = 16  # names in a header
MAX_NOTED = 64  # lines in the log

_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)


def shown(names: Sequence[str]) -> str:
    """Names for a header; odd ones become "?", because clients choose them."""
    texts = [name if _NAME.fullmatch(name) else "?" for name in names[:MAX_SHOWN]]
    return ", ".join(texts + (["..."] if len(names) > MAX_SHOWN else []))


class IgnoredFields:
    """Logs each field once, a bounded number."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def note(self, path: str, names: Sequence[str]) -> None:
        for name in map(shown, zip(names)):
            if len(self._noted) == MAX_NOTED:
                return
            if (path, name) not in self._noted:
                self._noted.add((path, name))
                log.warning("%s: a request has the unknown field %s, which is ignored (not logged again)", path, name)
