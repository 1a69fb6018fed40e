"""Additions to samples: their conversation, by header or body, and what a router names."""

import math
from collections.abc import Mapping

import msgspec
from fastapi import Response

from engine.frontend.apis.shared.fields import namespaces_of
from engine.frontend.apis.shared.image_encoders import with_image_encoders
from engine.frontend.apis.shared.prefix_sources import with_prefix_source
from engine.frontend.apis.shared.request_body import RoutingFields
from engine.frontend.apis.shared.routes import RouteTags, post_route
from engine.frontend.services import SERVICES
from engine.messages import ExpectReturn, GenerateRequest
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import bad_field, read_body
from service.http.guard import MAX_SESSION_CHARS, SESSION_HEADER
from service.http.image_encoders import ENCODERS_HEADER
from service.http.prefix_source import PREFIX_HEADER
from service.http.request import HttpRequest

API = ApiRouter(RouteTags.OPERATIONS)
MAX_SECONDS = 86_400.0
_BY_HEADER = ((PREFIX_HEADER, with_prefix_source), (ENCODERS_HEADER, with_image_encoders))


def completed(request: HttpRequest, body: RoutingFields, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Raises ApiError(400)."""
    requests = _with_conversation(request.headers, body, requests)
    for header, complete in _BY_HEADER:
        if header in request.headers:
            requests = complete(request, requests)
    return requests


def _with_conversation(
    headers: Mapping[str, str], body: RoutingFields, requests: list[GenerateRequest]
) -> list[GenerateRequest]:
    named = [_name(field, getattr(body, field) or "") for field in ("session_id", "prompt_cache_key")]
    in_header = headers.get(SESSION_HEADER, "")[:MAX_SESSION_CHARS].encode(errors="replace").decode()  # any bytes
    name = next(filter(None, [in_header, *named]), "")
    expected_s = _seconds("expected_return_s", body.expected_return_s)
    within_s = _seconds("returns_within_s", body.returns_within_s)
    if not name:
        return requests
    marks = {"conversation": name, "expected_return_s": expected_s, "returns_within_s": within_s}
    return [msgspec.structs.replace(request, **marks) for request in requests]


def _name(field: str, value: str | int) -> str:
    if len(name := str(value)) > MAX_SESSION_CHARS:
        raise bad_field(field, f"must have at most {MAX_SESSION_CHARS} characters, got {len(name)}")
    return name


def _seconds(field: str, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 <= value <= MAX_SECONDS):
        raise bad_field(field, f"must be 0 to {MAX_SECONDS:.0f} seconds, got {value}")
    return value


class CloseBody(Body):
    session_id: str | int = required("Name of the conversation.", "agent-7")
    cache_salt: str | None = optional("As its requests have it.", "tenant-7f3a")
    extra_key: str | None = optional("As its requests have it.", "a")


class ReturnBody(CloseBody):
    expected_return_s: float = required("Seconds from now to its next turn, 0 to 86400.", 20.0)


@API.on(post_route, "/close_session", CloseBody)
async def close_session(request: HttpRequest) -> Response:
    """Evict a conversation's pages first: it is over."""
    return await _announce(request, read_body(await request.read(), CloseBody), None)


@API.on(post_route, "/expect_return", ReturnBody)
async def expect_return(request: HttpRequest) -> Response:
    """Expect a conversation's next turn, as when a tool starts."""
    body = read_body(await request.read(), ReturnBody)
    return await _announce(request, body, _seconds("expected_return_s", body.expected_return_s))


async def _announce(request: HttpRequest, body: CloseBody, return_s: float | None) -> Response:
    fields = RoutingFields(cache_salt=body.cache_salt, extra_key=body.extra_key)
    note = ExpectReturn(_name("session_id", body.session_id), namespaces_of(fields, 1)[0], return_s)
    for link in request[SERVICES].leaders.links:
        link.send(note)
    return Response()
