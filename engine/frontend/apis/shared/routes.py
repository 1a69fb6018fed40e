"""Routes that an API exports as its ROUTES. Pure."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from service.http import openapi
from service.http.routes import Handler, shape_of
from service.security.keys import Access

SCHEMAS = "#/components/schemas/{name}"


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

    def operation(self) -> dict[str, Any]:
        """The route in the OpenAPI document."""
        good = openapi.answer("done", plain_text=self.plain_text, streams=self.streams)
        return openapi.operation(
            self.path,
            answers={
                "200": {"description": "done"} if self.empty else good,
                **({"202": openapi.answer("started")} if self.starts else {}),
            },
            failures=openapi.failures_of(openapi.FAILURES, shape_of(self.path).schema),
            body=None if self.body is None else {"$ref": SCHEMAS.format(name=self.body.__name__)},
            body_required=self.body_required,
            needs_key=self.need is not Access.NONE,
        )


open_route = partial(ApiRoute, "GET", need=Access.NONE, is_polled=True)  # health and metrics, without user data
token_route = partial(ApiRoute, "POST", anywhere=True, computes=True)
admin_route = partial(ApiRoute, "POST", need=Access.ADMIN)  # affects every client, writes to disk, or stops the server
