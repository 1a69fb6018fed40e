"""Body of POST /traces, which a worker and a router take."""

from pydantic import ConfigDict

from service.http.body import Body, optional
from service.http.errors import bad_field, read_body
from service.telemetry.context import MAX_ASKED, TracesQuery, query_error


class TracesBody(Body):
    model_config = ConfigDict(extra="forbid")

    ids: list[str] | None = optional(f"Ids of requests, 1 to {MAX_ASKED}. Give this or last.", ["my-request-1"])
    last: int | None = optional(f"Number of the last requests, 1 to {MAX_ASKED}. Give this or ids.", 10)


def read_query(data: bytes) -> TracesQuery:
    """Raises ApiError(400)."""
    body = read_body(data, TracesBody)
    query = TracesQuery(ids=body.ids, last=body.last)
    if (wrong := query_error(query)) is not None:
        field, _, message = wrong.partition(": ")
        raise bad_field(field, message)
    return query
