"""Checks before every route: request id, browser rule, keys; errors as answers."""

import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping

from fastapi import Response

from service.http.errors import INTERNAL_ERROR, ApiError
from service.http.request import BrokenBody, Handler, HttpRequest, RequestKey, StreamedResponse, raw_headers
from service.http.routes import (
    EXTRA_HEADERS,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    STREAMING,
    MatchedRoute,
    Routes,
    errors_of,
)
from service.security.browser import BrowserRule
from service.security.keys import Access, Caller, KeyGate, authorization_of, owner_of
from service.telemetry.context import CURRENT, OPERATIONS, TraceContext, request_id_of

log = logging.getLogger(__name__)

CALLER: RequestKey[Caller] = RequestKey("caller", Caller)
ANYBODY = Caller(Access.ADMIN)  # at a server without keys
CLIENT_GONE = 499  # status in logs and metrics if the client disconnected


def make_guard(
    routes: Routes,
    *,
    gate: KeyGate,
    need_of: Callable[[str, str], Access],
    browser: BrowserRule,
    admit: Callable[[HttpRequest, Access], ApiError | None] | None = None,
    is_trusted: Callable[[HttpRequest], bool] | None = None,
    on_refused: Callable[[str], None] = lambda reason: None,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> Handler:
    """The handler of all requests of a server.

    need_of(method, path): key that a path needs    admit: last check, with the caller at `CALLER`
    is_trusted: from a peer process, which has checked the caller
    on_refused: gets "browser" or "key"
    """

    has_keys = gate.api.is_set or gate.admin.is_set

    async def handle(request: HttpRequest) -> Response:
        route = routes.of(request)
        request_id = request_id_of(request.headers.get(REQUEST_ID_HEADER, "")) or new_id()
        request[REQUEST_ID] = request_id
        operation = OPERATIONS.get(request.path, "")
        CURRENT.set(TraceContext(request_id, operation, request.headers.get("traceparent", "")))
        request[EXTRA_HEADERS] = {REQUEST_ID_HEADER: request_id, **browser.sharing(request.headers)}
        response = early_answer(request, route)
        if response is None:
            response = await answer_of(route.handler, request)
        if not isinstance(response, StreamedResponse):
            response.raw_headers += raw_headers(request[EXTRA_HEADERS].items())
        return response

    def early_answer(request: HttpRequest, route: MatchedRoute) -> Response | None:
        if is_trusted is not None and is_trusted(request):
            return None
        page = browser.refusal(request.method, request.path, request.headers, has_body=request.has_body)
        if page is not None:
            on_refused("browser")
            return route.errors.response(ApiError(page.status, page.message, code=page.code))
        preflight = browser.preflight(request.method, request.headers)
        if preflight is not None:  # browsers send it without a key
            return Response(status_code=204, headers=preflight)
        refusal = refuse(request)
        return None if refusal is None else route.errors.response(refusal)

    def refuse(request: HttpRequest) -> ApiError | None:
        request[CALLER] = ANYBODY
        if has_keys:
            request[CALLER] = gate.caller(authorization_of(request.headers), time.monotonic())
            refusal = key_refusal(request, gate, need_of(request.method, request.path))
            if refusal is not None:
                on_refused("key")
                return refusal
        return None if admit is None else admit(request, need_of(request.method, request.path))

    return handle


def key_refusal(request: HttpRequest, gate: KeyGate, need: Access) -> ApiError | None:
    """The refusal, if any; also for handlers that decide by the body."""
    refusal = gate.refusal(request[CALLER], need)
    if refusal is None:
        return None
    status, message = refusal
    return ApiError(status, message, code="invalid_api_key" if status == 401 else "admin_key_needed")


async def answer_of(handler: Handler, request: HttpRequest) -> Response:
    """Return the handler's response or exception, unless a stream has started."""
    errors = errors_of(request)
    try:
        return await handler(request)
    except ApiError as error:
        response = errors.response(error)
        if error.status in (408, 413) or isinstance(error, BrokenBody):  # the rest of the body is not read
            response.headers["Connection"] = "close"
        return response
    except ConnectionError:
        raise  # the client disconnected
    except RecursionError:
        return errors.response(ApiError(400, "the body is nested too deeply", code="invalid_json"))
    except Exception:
        if request.get(STREAMING):
            raise
        log.exception("%s %s failed", request.method, request.path)
        message = "internal error; the server's log has the details"
        return errors.response(ApiError(500, message, code=INTERNAL_ERROR))


# ---- The client's deadline by `x-request-timeout` (seconds) or Envoy's header.

TIMEOUT_HEADER = "x-request-timeout"  # seconds
ENVOY_HEADER = "x-envoy-expected-rq-timeout-ms"
LEAST_S = 0.001  # least deadline of a retry: an idle worker may meet it
UNITS_S: Mapping[str, float] = {TIMEOUT_HEADER: 1.0, ENVOY_HEADER: 0.001}


def seconds_of(text: str | None, name: str) -> float | None:
    """A header's seconds, None if absent or not above 0."""
    if text is None:
        return None
    try:
        value_s = float(text) * UNITS_S[name]
    except ValueError:
        return None
    return value_s if 0.0 < value_s < math.inf else None


def request_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Raises ApiError(400) for a bad header."""
    for name in UNITS_S:
        text = headers.get(name)
        if text is None:
            continue
        value_s = seconds_of(text, name)
        if value_s is None:
            raise ApiError(400, f"{name}: must be a number greater than 0, got {text[:40]!r}", field=name)
        return value_s
    return None


def time_given(headers: Mapping[str, str]) -> float:
    """The deadline in seconds, inf without one; bad numbers count for none."""
    times_s = (seconds_of(headers.get(name), name) for name in UNITS_S)
    return min((value_s for value_s in times_s if value_s is not None), default=math.inf)


def less_time(headers: Mapping[str, str], elapsed_s: float) -> Mapping[str, str]:
    """`headers` with deadlines reduced by `elapsed_s`. Workers refuse bad numbers."""
    if elapsed_s < LEAST_S:
        return headers
    left = dict(headers)
    for name, unit_s in UNITS_S.items():
        value_s = seconds_of(headers.get(name), name)
        if value_s is not None:
            left[name] = f"{max(LEAST_S, value_s - elapsed_s) / unit_s:.3f}"
    return left


# ---- the DP rank in a client's header, as in vLLM and SGLang

RANK_HEADER = "x-data-parallel-rank"
SESSION_HEADER, MAX_SESSION_CHARS = "X-Session-Id", 1024  # names a conversation
MAX_DIGITS = 9


def rank_in(headers: Mapping[str, str]) -> int | None:
    """The rank, if any. Raises ApiError(400)."""
    text = headers.get(RANK_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ApiError(400, f"{RANK_HEADER}: must be the number of a DP rank, got {text[:40]!r}", field=RANK_HEADER)
    return int(text)


# ---- owners of request names

CALLER_HEADER = "X-Tandem-Caller"
NO_KEY = "-"  # names shared by all
_DIGEST = re.compile("[0-9a-f]{64}")


def caller_header(request: HttpRequest) -> dict[str, str]:
    """Owners of request names: a `rid` belongs to the key that sent it.

        router -> worker   CALLER_HEADER: digest of the client's key, or NO_KEY

    Routers use a key of their own, so name the owner; without the header it is the request's key. A
    digest is as secret as its key.
    """
    return {CALLER_HEADER: _own(request) or NO_KEY}


def owner_said(headers: Mapping[str, str]) -> str:
    return headers.get(CALLER_HEADER, NO_KEY).replace(NO_KEY, "")


def owner_in(request: HttpRequest) -> str:
    """A worker request's owner, empty for all without key. Raises ApiError(400)."""
    said = request.headers.get(CALLER_HEADER)
    if said is None:
        return _own(request)
    if said != NO_KEY and not _DIGEST.fullmatch(said):
        raise ApiError(
            400, f"{CALLER_HEADER}: must be the digest of a key, or {NO_KEY}; leave it out", field=CALLER_HEADER
        )
    return said.replace(NO_KEY, "")


def has_admin_key(request: HttpRequest, gate: KeyGate) -> bool:
    """Return whether the caller may abort any request."""
    return gate.admin.is_set and request[CALLER].access >= Access.ADMIN


def may_end_any(request: HttpRequest, gate: KeyGate) -> bool:
    """The same at a worker; without keys it trusts all but a router's clients."""
    has_keys = gate.api.is_set or gate.admin.is_set
    return has_admin_key(request, gate) if has_keys else CALLER_HEADER not in request.headers


def _own(request: HttpRequest) -> str:
    return owner_of(authorization_of(request.headers)) if request[CALLER].name else ""
