"""Routes that an API exports as its ROUTES. Pure."""

from dataclasses import dataclass
from functools import partial

import msgspec

from service.http.routes import Handler
from service.security.keys import Access


@dataclass(frozen=True)
class ApiRoute:
    """A route.

    `need`: required key. `is_polled`: successes are not logged. `anywhere`: on any frontend.
    `computes`: needs the text model. For OpenAPI: `is_alias` (left out), `streams` (content type),
    `plain_text` or `empty` answers, `starts`: work continues after a 202.
    """

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    body_required: bool = True
    need: Access = Access.USER
    is_polled: bool = False
    anywhere: bool = False
    computes: bool = False
    is_alias: bool = False
    streams: str = ""
    plain_text: bool = False
    empty: bool = False
    starts: bool = False


open_route = partial(ApiRoute, "GET", need=Access.NONE, is_polled=True)  # health and metrics, without user data
token_route = partial(ApiRoute, "POST", anywhere=True, computes=True)
admin_route = partial(ApiRoute, "POST", need=Access.ADMIN)  # affects every client, writes to disk, or stops the server
