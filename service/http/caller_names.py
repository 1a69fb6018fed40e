"""Owners of request names: a `rid` belongs to the key that sent it.

    router -> worker   CALLER_HEADER: digest of the client's key, or NO_KEY

Routers use a key of their own, so name the owner; without the header it is the request's key. A
digest is as secret as its key.
"""

import re
from collections.abc import Mapping

from aiohttp import web

from service.http.errors import ApiError
from service.http.guard import CALLER
from service.security.keys import Access, KeyGate, authorization_of, owner_of

CALLER_HEADER = "X-Tandem-Caller"
NO_KEY = "-"  # names shared by all
_DIGEST = re.compile("[0-9a-f]{64}")


def caller_header(request: web.BaseRequest) -> dict[str, str]:
    return {CALLER_HEADER: _own(request) or NO_KEY}


def owner_said(headers: Mapping[str, str]) -> str:
    return headers.get(CALLER_HEADER, NO_KEY).replace(NO_KEY, "")


def owner_in(request: web.BaseRequest) -> str:
    """Return a worker request's owner, empty for all without key. Raises ApiError(400)."""
    said = request.headers.get(CALLER_HEADER)
    if said is None:
        return _own(request)
    if said != NO_KEY and not _DIGEST.fullmatch(said):
        raise ApiError(
            400, f"{CALLER_HEADER}: must be the digest of a key, or {NO_KEY}; leave it out", field=CALLER_HEADER
        )
    return said.replace(NO_KEY, "")


def has_admin_key(request: web.BaseRequest, gate: KeyGate) -> bool:
    """Return whether the caller may abort any request."""
    return gate.admin.is_set and request[CALLER].access >= Access.ADMIN


def may_end_any(request: web.BaseRequest, gate: KeyGate) -> bool:
    """The same at a worker; without keys it trusts all but a router's clients."""
    has_keys = gate.api.is_set or gate.admin.is_set
    return has_admin_key(request, gate) if has_keys else CALLER_HEADER not in request.headers


def _own(request: web.BaseRequest) -> str:
    return owner_of(authorization_of(request.headers)) if request[CALLER].name else ""
