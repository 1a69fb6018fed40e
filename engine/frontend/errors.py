"""What a client is told when a request cannot be served: OpenAI's error shape, and how a body is decoded strictly.

Must not know what a request asks for.
"""

import re
from typing import Any, TypeVar

import msgspec

from engine.messages import ControlReply, FinishReason
from engine.sampling_params import InvalidParam
from security.json_depth import MAX_DEPTH, deeper_than

T = TypeVar("T")

DRAINING = "draining"  # error code, and `status` on /health
DEADLINE = "deadline"  # error code: it would be, or is, too late

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")


class ApiError(Exception):
    """An answer that is not 2xx. `field` names the offending part of the body (`param` in OpenAI's shape)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code, self.retry_after_s = (
            status,
            message,
            field,
            code,
            retry_after_s,
        )

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code or self.status}}


def bad_field(field: str, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, f"{field}: {message}", field=field, code=code)


def from_invalid_param(e: InvalidParam, *, names: dict[str, str] | None = None) -> ApiError:
    """`names`: what the API calls a sampling parameter (max_new_tokens is max_tokens to OpenAI's clients)."""
    field = (names or {}).get(e.field, e.field)
    return ApiError(400, str(e).replace(e.field, field, 1), field=field)


def from_finish(finish: FinishReason) -> ApiError:
    """The error that an abort with a status is; one about load says when to come again."""
    code = DEADLINE if finish.status == 504 else None
    retry_after_s = 1 if finish.status == 503 else None
    message = finish.message or "the request was aborted"
    return ApiError(finish.status, message, field=finish.field or None, code=code, retry_after_s=retry_after_s)


def refused(reply: ControlReply) -> ApiError:
    """A control message that the scheduler did not accept; its text begins with the field, where one is to blame."""
    field, colon, _ = reply.message.partition(": ")
    return ApiError(reply.status, reply.message, field=field if colon and field.isidentifier() else None)


def not_ready(message: str) -> ApiError:
    return ApiError(503, message, code="service_unavailable", retry_after_s=1)


def draining(message: str) -> ApiError:
    """Routers read the code: another worker may serve the request."""
    return ApiError(503, message, code=DRAINING, retry_after_s=1)


def decode_body(data: bytes, type_: type[T]) -> T:
    """Strict: no coercion. Raises ApiError(400) that names the field; unknown fields are ignored."""
    if deeper_than(data):
        raise ApiError(400, f"the body is nested too deeply (more than {MAX_DEPTH} levels)", code="invalid_json")
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as e:
        raise _wrong_type(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e).removeprefix("JSON is malformed: ")
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None


def _wrong_type(message: str) -> ApiError:
    match = _PATH.search(message)
    if match is None:
        missing = re.search(r"missing required field `([^`]+)`", message)
        return ApiError(400, message, field=missing.group(1) if missing else None)
    path, text = match.group(1), message[: match.start()]
    missing = re.search(r"missing required field `([^`]+)`", text)
    field = f"{path}.{missing.group(1)}" if missing else path
    return ApiError(400, f"{field}: {text[:1].lower()}{text[1:]}".removeprefix(": "), field=field or None)
