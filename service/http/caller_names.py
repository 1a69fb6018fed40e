"""Owners of request names: a `rid` belongs to the key that sent it, so two keys may use the same.

    router -> worker   CALLER_HEADER: digest of the client's key, or NO_KEY

Routers call workers with a key of their own, so they name the owner. Without the header it is the
key in the request. Forging is useless: a digest is as hard to guess as its key.
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
    """Return the header of a router's calls for this request."""
    return {CALLER_HEADER: _own(request) or NO_KEY}


def owner_said(headers: Mapping[str, str]) -> str:
    return headers.get(CALLER_HEADER, NO_KEY).replace(NO_KEY, "")


def owner_in(request: web.BaseRequest) -> str:
    """Return the owner of a worker's request, empty for all without a key. Raises ApiError(400)."""
    said = request.headers.get(CALLER_HEADER)
    if said is None:
        return _own(request)
    if said != NO_KEY and not _DIGEST.fullmatch(said):
        raise ApiError(
            400, f"{CALLER_HEADER}: must be the digest of a key, or {NO_KEY}; leave it out", field=CALLER_HEADER
        )
    return said.replace(NO_KEY, "")


def has_admin_key(request: web.BaseRequest, gate: KeyGate) -> bool:
    """Return whether the caller may abort requests of any key."""
    return gate.admin.is_set and request[CALLER].access >= Access.ADMIN


def may_end_any(request: web.BaseRequest, gate: KeyGate) -> bool:
    """Return the same at a worker. Without keys it trusts all callers except a router's clients."""
    has_keys = gate.api.is_set or gate.admin.is_set
    return has_admin_key(request, gate) if has_keys else CALLER_HEADER not in request.headers


def _own(request: web.BaseRequest) -> str:
    """Return the digest of the key, empty if none is needed."""
    return owner_of(authorization_of(request.headers)) if request[CALLER].name else ""
