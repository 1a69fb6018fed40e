"""Whose names the requests of a server have: a name (`rid`) belongs to the key that gave it, so two keys may give the same one.

    router -> worker   CALLER_HEADER: the digest of the key that sent a request to the router, or NO_KEY

The router shows workers a key of its own, or none, so it says whose the names are. Without the header they are of the key in the request. Anyone may
write it, and gets names that no one else has: the digest of another's key is as hard to guess as the key.
"""

import re
from collections.abc import Mapping

from aiohttp import web

from service.http.errors import ApiError
from service.http.guard import CALLER
from service.security.keys import Access, KeyGate, authorization_of, owner_of

CALLER_HEADER = "X-Tandem-Caller"
NO_KEY = "-"  # names that all share
_DIGEST = re.compile("[0-9a-f]{64}")


def caller_header(request: web.BaseRequest) -> dict[str, str]:
    """Return what a router says to workers of a request that it received."""
    return {CALLER_HEADER: _own(request) or NO_KEY}


def owner_said(headers: Mapping[str, str]) -> str:
    """Return the owner in `caller_header`."""
    return headers.get(CALLER_HEADER, NO_KEY).replace(NO_KEY, "")


def owner_in(request: web.BaseRequest) -> str:
    """Return the owner of the names in a worker's request; "": they are of all without a key. Raises ApiError(400)."""
    said = request.headers.get(CALLER_HEADER)
    if said is None:
        return _own(request)
    if said != NO_KEY and not _DIGEST.fullmatch(said):
        raise ApiError(
            400, f"{CALLER_HEADER}: must be the digest of a key, or {NO_KEY}; leave it out", field=CALLER_HEADER
        )
    return said.replace(NO_KEY, "")


def has_admin_key(request: web.BaseRequest, gate: KeyGate) -> bool:
    """Whether the caller may end a request of any key. Without admin keys no one may."""
    return gate.admin.is_set and request[CALLER].access >= Access.ADMIN


def may_end_any(request: web.BaseRequest, gate: KeyGate) -> bool:
    """The same at a worker. One without keys trusts all that reach it, but for the clients of a router."""
    has_keys = gate.api.is_set or gate.admin.is_set
    return has_admin_key(request, gate) if has_keys else CALLER_HEADER not in request.headers


def _own(request: web.BaseRequest) -> str:
    """No key is known where none is needed."""
    return owner_of(authorization_of(request.headers)) if request[CALLER].name else ""
