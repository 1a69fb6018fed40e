"""Abort, flush, pause, memory, adapters, profiles.

Names and defaults are SGLang's (`srt/managers/io_struct.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from engine.frontend.apis.shared.resumable import check_signed
from engine.frontend.apis.shared.routes import RouteTags, admin_route, get_route, post_route
from engine.frontend.client.scheduler_link import CALL_TIMEOUT_S
from engine.frontend.services import SERVICES, Services
from engine.lora.peft_config import name_problem
from engine.messages import (
    ContinueGeneration,
    ControlMessage,
    ControlReply,
    LoadAdapter,
    PauseGeneration,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import ApiError, bad_field, read_body
from service.http.guard import key_refusal, may_end_any, owner_in
from service.http.request import HttpRequest
from service.http.resume import MAX_NAME_CHARS, MOVE_OUT
from service.http.routes import json_response
from service.security.keys import Access

API = ApiRouter(RouteTags.OPERATIONS)
MODES = ("abort", "retract", "in_place", "block")
UPDATE_TIMEOUT_S = 3600.0  # includes disk reads and running requests
PROFILE_TIMEOUT_S = 300.0  # writing a long trace takes long


class AbortBody(Body):
    rid: str | None = optional(
        "Id of the request to end, as the client named it. Give this or abort_all.", "my-request-1"
    )
    abort_all: bool | None = optional("True: ends all requests; needs the admin key. Default false.", False)


class LeavingSample(Body):
    rid: str = required("Name of the sample in its stream.", "my-request-1", max_length=MAX_NAME_CHARS)
    room: int = required("Number of the room that its KV takes.", 4711, ge=1, le=2**63 - 1)


class MoveOutBody(Body):
    """From Tandem's router, which signs it."""

    samples: list[LeavingSample] = required("Samples that move out.", [{"rid": "my-request-1", "room": 4711}])
    owner: str = optional("Owner of the names, empty without a key.", "", default="", max_length=MAX_NAME_CHARS)


class PauseBody(Body):
    mode: str | None = optional(
        "What happens to running requests: abort (the default) ends them, retract frees their KV and recomputes it "
        "later, in_place keeps their KV, block lets them go on while new ones wait (SGLang).",
        "retract",
    )


class MemoryBody(Body):
    tags: list[str] | None = optional("Parts of the memory: kv_cache, weights, cuda_graph. Default: all.", ["kv_cache"])


class LoadBody(Body):
    lora_name: str = required("Name of the adapter, for model and lora_path.", "my-adapter")
    lora_path: str = required("Directory of the adapter on the worker's disk.", "/adapters/mine")
    pinned: bool | None = optional("Not used: loaded adapters stay on the device.", False)


class UnloadBody(Body):
    lora_name: str = required("Name of a loaded adapter.", "my-adapter")


class DumpExpertsBody(Body):
    output_dir: str | None = optional(
        "Directory of the file on the worker's disk (Tandem). Default: a temporary one.", "/tmp/experts"
    )


class StartProfileBody(Body):
    output_dir: str | None = optional(
        "Directory of the trace on the worker's disk. Default: a temporary one.", "/tmp/profile"
    )
    num_steps: int | None = optional("Steps after which the profile ends by itself. Default: at /stop_profile.", 5)
    activities: list[str] | None = optional("What is recorded: CPU, GPU. Default: both, where there is a GPU.", ["CPU"])
    with_stack: bool | None = optional("True: events have their Python stack. Default false.", False)
    record_shapes: bool | None = optional("True: events have the shapes of tensors. Default false.", False)


@API.on(admin_route, "/flush_cache", plain_text=True)
@API.on(get_route, "/flush_cache", need=Access.ADMIN, plain_text=True)
async def flush_cache(request: HttpRequest) -> Response:
    """Drop all cached prefixes, if no request runs."""
    return Response(content=await flush(request[SERVICES]) + "\n", media_type="text/plain")


async def flush(s: Services) -> str:
    """Return what was done. Raises ApiError(400) while requests run."""
    reply = await s.leaders.flush_cache()
    if not reply.ok:
        raise ApiError(400, reply.message or "the cache cannot be flushed while requests run", code="not_idle")
    return reply.message or "Cache flushed."


@API.on(post_route, "/abort_request", AbortBody, empty=True, body_required=False)
async def abort_request(request: HttpRequest) -> Response:
    """Abort a request, or all.

    200 also for an unknown id, as in SGLang, or another key's, which continues.
    """
    s = request[SERVICES]
    body = read_body(await request.read() or b"{}", AbortBody)
    if body.abort_all:
        if (refusal := key_refusal(request, s.gate, Access.ADMIN)) is not None:
            raise refusal
        s.client.abort_all()
    elif body.rid:
        owner = None if may_end_any(request, s.gate) else owner_in(request)
        if not s.client.abort(body.rid, owner=owner) or owner is None:  # a name without owner may be elsewhere, too
            await s.others.abort(body.rid, owner=owner)
    else:
        raise bad_field("rid", "name a request, or set abort_all")
    return Response()


@API.on(post_route, MOVE_OUT, MoveOutBody)
async def move_out(request: HttpRequest) -> Response:
    """End streams that Tandem's router moves.

    `moving`: rids found.
    """
    s, data = request[SERVICES], await request.read()
    check_signed(request, data)
    body = read_body(data, MoveOutBody)
    if s.spec.mode != "decode":
        raise ApiError(409, "only a decode worker has requests that move with their KV", code="not_decode")
    client, others, owner = s.client, s.others, body.owner
    moving = [one.rid for one in body.samples if client.move_out(one.rid, one.room, owner=owner)]
    left = [one for one in body.samples if one.rid not in moving]
    moving += [one.rid for one in left if await others.move_out(one.rid, one.room, owner=owner)]
    return json_response({"moving": moving})


# ---- Orders to the schedulers, answered once all have carried them out.

SUCCESS, STATUS = ("success", True), ("status", "ok")


@dataclass(frozen=True, kw_only=True)
class Order:
    """A route that sends a control message.

    `about`: its documentation. `message`: makes it of services, call id and body, whose fields it
    checks. `head`, `shown`: the answer's fields, except for the reply's message.
    """

    about: str
    message: Callable[[Services, str, Any], ControlMessage]
    body: type[Body] | None = None
    body_required: bool = False
    timeout_s: float = CALL_TIMEOUT_S
    head: tuple[str, Any] = SUCCESS
    shown: Callable[[Services, ControlReply], dict[str, Any]] = lambda s, reply: reply.values

    async def handle(self, request: HttpRequest) -> Response:
        data = b"" if self.body is None else await request.read()
        return json_response(await self.carry_out(request[SERVICES], data))

    async def carry_out(self, s: Services, data: bytes) -> dict[str, Any]:
        """Send the message of a JSON body; return the answer's fields. Raises ApiError."""
        body = None
        if self.body is not None:
            body = read_body(data or (b"" if self.body_required else b"{}"), self.body)
        reply = await s.leaders.control(self.message(s, s.leaders.mint_call_id(), body), timeout_s=self.timeout_s)
        return {self.head[0]: self.head[1], "message": reply.message, **self.shown(s, reply)}


def _pause(s: Services, call_id: str, body: PauseBody) -> PauseGeneration:
    mode = body.mode or "abort"
    if mode not in MODES:
        raise bad_field("mode", f"must be one of {', '.join(MODES)}, got {mode!r}")
    return PauseGeneration(call_id, mode)


def _load_adapter(s: Services, call_id: str, body: LoadBody) -> LoadAdapter:
    if problem := name_problem(body.lora_name):
        raise bad_field("lora_name", problem)
    if body.lora_name in s.model.own_names:
        raise bad_field("lora_name", f"{body.lora_name!r} is a name of the model itself; choose another")
    if not body.lora_path:
        raise bad_field("lora_path", "must name an adapter's directory on the worker's disk")
    return LoadAdapter(call_id, body.lora_name, body.lora_path)


def _start_profile(s: Services, call_id: str, body: StartProfileBody) -> StartProfile:
    return StartProfile(
        call_id,
        output_dir=body.output_dir or "",
        num_steps=body.num_steps,
        activities=tuple(body.activities or ()),
        with_stack=bool(body.with_stack),
        record_shapes=bool(body.record_shapes),
    )


def _adapters(s: Services, reply: ControlReply) -> dict[str, Any]:
    return {"loaded_adapters": reply.adapters or {}}


def _released(s: Services, reply: ControlReply) -> dict[str, Any]:
    return {"released": s.leaders.released}


ORDERS = {
    "/pause_generation": Order(
        about="Pause all requests (`mode`).\n\n200 once no step runs.", message=_pause, body=PauseBody, head=STATUS
    ),
    "/continue_generation": Order(
        about="Continue paused requests.", message=lambda s, call_id, _: ContinueGeneration(call_id), head=STATUS
    ),
    "/release_memory_occupation": Order(
        about="Give back the memory of weights or KV cache (`tags`).\n\n200 once it is released; 409, unchanged, with live requests.",
        message=lambda s, call_id, body: ReleaseMemory(call_id, tuple(body.tags or ())),
        body=MemoryBody,
        shown=_released,
    ),
    "/resume_memory_occupation": Order(
        about="Take the memory again.\n\n200 once it is restored, with the checkpoint's weights.",
        message=lambda s, call_id, body: ResumeMemory(call_id, tuple(body.tags or ())),
        body=MemoryBody,
        timeout_s=UPDATE_TIMEOUT_S,
        shown=_released,
    ),
    "/load_lora_adapter": Order(
        about="Load a LoRA adapter.\n\n200 once it is usable; 400, unchanged, if it does not fit.",
        message=_load_adapter,
        body=LoadBody,
        body_required=True,
        timeout_s=UPDATE_TIMEOUT_S,
        shown=_adapters,
    ),
    "/unload_lora_adapter": Order(
        about="Unload a LoRA adapter.\n\n200 once its requests have ended; new ones are rejected at once.",
        message=lambda s, call_id, body: UnloadAdapter(call_id, body.lora_name),
        body=UnloadBody,
        body_required=True,
        timeout_s=UPDATE_TIMEOUT_S,
        shown=_adapters,
    ),
    "/start_profile": Order(
        about="Start a profile of the schedulers.\n\nThe answer names the trace file, which /stop_profile or `num_steps` writes.",
        message=_start_profile,
        body=StartProfileBody,
        timeout_s=PROFILE_TIMEOUT_S,
    ),
    "/stop_profile": Order(
        about="End a profile, and write it.",
        message=lambda s, call_id, _: StopProfile(call_id),
        timeout_s=PROFILE_TIMEOUT_S,
    ),
    "/start_expert_distribution_record": Order(
        about="Start counting the tokens of each expert.", message=lambda s, call_id, _: RecordExperts(call_id, "start")
    ),
    "/stop_expert_distribution_record": Order(
        about="Stop counting the tokens of each expert.", message=lambda s, call_id, _: RecordExperts(call_id, "stop")
    ),
    "/dump_expert_distribution_record": Order(
        about="Write the counts of experts.\n\nThe answer names a file for --init-expert-location.",
        message=lambda s, call_id, body: RecordExperts(call_id, "dump", body.output_dir or ""),
        body=DumpExpertsBody,
    ),
}


def add_orders(api: ApiRouter, orders: Mapping[str, Order]) -> None:
    for path, order in orders.items():
        required = order.body_required or order.body is None
        api.add(admin_route(path, order.handle, order.body, body_required=required, about=order.about))


add_orders(API, ORDERS)
