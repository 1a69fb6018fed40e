"""Model, configuration, load, metrics, self-check, traces."""

from typing import Any

import msgspec
from fastapi import Response

from engine.frontend.apis.admin.health import states_if_up, step_if_up, steps_if_up
from engine.frontend.apis.admin.load import get_load, load_summary, step_summary, transfer_paths, v1_loads_entry
from engine.frontend.apis.shared.fields import choose_model
from engine.frontend.apis.shared.routes import RouteTags, admin_route, get_route, open_route
from engine.frontend.client.leaders import total_of
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.frontend.services import SERVICES, Services
from engine.messages import StateReply
from service.flags import installed_version
from service.http.api import ApiRouter, loads_answer
from service.http.errors import DRAINING
from service.http.request import HttpRequest
from service.http.routes import TracesBody, json_response, read_query
from service.security.keys import Access
from service.telemetry.context import Records
from service.telemetry.expositions import merge_expositions

API = ApiRouter(RouteTags.SERVER)
SUMMED_GAUGES = ("_active", "_kept_streams", "_kept_stream_bytes")  # over a worker's frontends
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@API.on(get_route, "/v1/models")
async def list_models(request: HttpRequest) -> Response:
    """List the model and its adapters."""
    return json_response({"object": "list", "data": _model_cards(request[SERVICES])})


@API.on(get_route, "/v1/models/{model}")
async def get_model(request: HttpRequest) -> Response:
    """Describe a model or an adapter."""
    s = request[SERVICES]
    chosen = choose_model(s, request.path.removeprefix("/v1/models/"), None)
    return json_response(next(card for card in _model_cards(s) if card["id"] == chosen.shown))


def _model_cards(s: Services) -> list[dict[str, Any]]:
    base = {
        "id": s.model.served_name,
        "object": "model",
        "created": s.started_unix_s,
        "owned_by": "sglang",
        "root": s.model.path,
        "parent": None,
        "max_model_len": s.context_length,
        "has_image_understanding": s.model.vision is not None,
    }
    adapters = s.leaders.adapters.items()
    return [base, *({**base, "id": name, "root": path, "parent": base["id"]} for name, path in adapters)]


@API.on(open_route, "/version")
async def version(request: HttpRequest) -> Response:
    """Return the version."""
    return json_response({"version": installed_version()})


@API.on(get_route, "/model_info")
async def model_info(request: HttpRequest) -> Response:
    """Describe the model."""
    s = request[SERVICES]
    return json_response({**s.model.info, **s.leaders.updated, "max_model_len": s.context_length})


@API.on(get_route, "/get_weight_version")
async def weight_version(request: HttpRequest) -> Response:
    """Return the name of the weights."""
    return json_response({"weight_version": request[SERVICES].weight_version})


@API.on(get_route, "/server_info", is_polled=True)
async def server_info(request: HttpRequest) -> Response:
    """Describe the server: flags, state, load."""
    return json_response(await describe_server(request[SERVICES]))


async def describe_server(s: Services) -> dict[str, Any]:
    states, now, switch = await states_if_up(s), await step_if_up(s), s.spec.switch
    load = load_summary(total_of(states)) if states else {}
    return {
        **s.server_info,
        **_engine_info(s),
        "model_path": s.model.path,
        **s.leaders.updated,
        "served_model_name": s.model.served_name,
        "disaggregation_mode": s.spec.mode,
        **({} if switch is None else {"switching_to": switch.to_role, "last_switch": switch.last}),
        "status": DRAINING if s.client.is_draining else "ready" if load else "starting",
        "paused": s.leaders.paused or None,
        **load,
        **(transfer_paths(total_of(states), mode=s.spec.mode) if states else {}),
        "internal_states": _internal_states(s, states),
        **({} if now is None else step_summary(now)),
    }


def _engine_info(s: Services) -> dict[str, Any]:
    """With several ranks, KV event addresses are in `internal_states`, one cache each."""
    if s.leaders.num_ranks == 1:
        return s.leaders.info
    return {
        **s.leaders.info,
        "kv_events_config": None,
        "rank_pids": [pid for link in s.leaders.links for pid in _pids(link)],
    }


def _pids(link: SchedulerLink) -> list[int]:
    found = link.info.get("rank_pids")
    return found if isinstance(found, list) else []


def _internal_states(s: Services, states: list[StateReply]) -> list[dict[str, Any]]:
    if len(states) < 2:
        return [load_summary(state) for state in states]
    return [
        {
            "dp_rank": rank,
            **load_summary(state),
            "rank_pids": _pids(link),
            "kv_events_config": link.info.get("kv_events_config"),
        }
        for rank, (state, link) in enumerate(zip(states, s.leaders.links, strict=True))
    ]


@API.on(get_route, "/v1/loads", is_polled=True)
async def loads(request: HttpRequest) -> Response:
    """Return the load of each rank."""
    s = request[SERVICES]
    entries = [
        v1_loads_entry(
            state, rank=rank, mode=s.spec.mode, max_running_requests=s.client.max_running, num_live=live.requests
        )
        for rank, (state, live) in enumerate(zip(await s.client.recent_states(), s.client.loads.of_all(), strict=True))
    ]
    return json_response(loads_answer(entries))


@API.on(get_route, "/get_load", is_polled=True)
async def old_load(request: HttpRequest) -> Response:
    """Return the load of each rank, as SGLang did before."""
    return json_response(get_load(await request[SERVICES].client.recent_states()))


@API.on(open_route, "/metrics", plain_text=True)
async def metrics(request: HttpRequest) -> Response:
    """Return Prometheus metrics."""
    s = request[SERVICES]
    body = s.metrics.exposition(await states_if_up(s), await steps_if_up(s))
    if s.others.num:
        body = merge_expositions([body, *await s.others.expositions()], summed=SUMMED_GAUGES)
    return Response(content=body, headers={"Content-Type": METRICS_CONTENT_TYPE})


@API.on(get_route, "/check", need=Access.ADMIN)
async def check(request: HttpRequest) -> Response:
    """Check all invariants.

    `ok`: no problem is found.
    """
    states = await request[SERVICES].leaders.states(check=True)
    total = total_of(states)
    ranks = {"ranks": [msgspec.structs.asdict(state) for state in states]} if len(states) > 1 else {}
    return json_response({"ok": not total.problems, **msgspec.structs.asdict(total), **ranks})


@API.on(admin_route, "/traces", TracesBody)
async def traces(request: HttpRequest) -> Response:
    """Return recent requests, for `tandem trace`."""
    query = read_query(await request.read())
    s = request[SERVICES]
    found = s.tracer.ring.find(query)
    return json_response(Records(records=await s.others.with_records(found, query)))
