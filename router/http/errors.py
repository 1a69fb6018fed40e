"""What the router itself says when something is wrong, in OpenAI's error shape. Knows no worker and no request."""

from collections.abc import Mapping

import msgspec
from aiohttp import web

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def error_kind(status: int) -> str:
    """OpenAI's `type` of an error with this HTTP status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """An error answer. `param`: the field that is wrong; `code`: a word for programs."""
    error = {"message": message, "type": error_kind(status), "param": param, "code": code}
    body = msgspec.json.encode({"error": error})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
