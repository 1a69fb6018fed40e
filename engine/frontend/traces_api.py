"""POST /traces: what this worker did for its last requests, for `tandem trace` (telemetry/records.py)."""

from aiohttp import web

from engine.frontend.errors import ApiError, decode_body
from engine.frontend.services import SERVICES
from engine.frontend.stream import json_response
from telemetry.records import Records, TracesQuery, query_error


async def traces(request: web.Request) -> web.Response:
    query = decode_body(await request.read(), TracesQuery)
    if (wrong := query_error(query)) is not None:
        raise ApiError(400, wrong, field=wrong.partition(":")[0])
    return json_response(Records(records=request.app[SERVICES].tracer.ring.find(query)))
