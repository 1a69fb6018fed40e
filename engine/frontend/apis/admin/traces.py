"""POST /traces: what this worker did for its last requests, for `tandem trace` (service/telemetry/records.py)."""

from aiohttp import web

from engine.frontend.services import SERVICES
from service.http.errors import ApiError, decode_body
from service.http.stream import json_response
from service.telemetry.records import Records, TracesQuery, query_error


async def traces(request: web.BaseRequest) -> web.Response:
    query = decode_body(await request.read(), TracesQuery)
    if (wrong := query_error(query)) is not None:
        raise ApiError(400, wrong, field=wrong.partition(":")[0])
    return json_response(Records(records=request[SERVICES].tracer.ring.find(query)))
