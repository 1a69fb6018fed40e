"""Abort, flush, pause, weights, adapters, profiles.

Names and defaults are SGLang's (`srt/managers/io_struct.py`).
"""

from typing import Annotated, Any

import msgspec
from aiohttp import web

from engine.frontend.apis.shared.resumable import check_signed
from engine.frontend.services import SERVICES
from engine.lora.peft_config import name_problem
from engine.messages import (
    ContinueGeneration,
    ControlReply,
    LoadAdapter,
    PauseGeneration,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from service.http.api_shapes import json_response
from service.http.errors import ApiError, bad_field, decode_body
from service.http.guard import key_refusal, may_end_any, owner_in
from service.http.resume import Name
from service.security.keys import Access

MODES = ("abort", "retract", "in_place", "block")
UPDATE_TIMEOUT_S = 3600.0  # includes disk reads and running requests
PROFILE_TIMEOUT_S = 300.0  # writing a long trace takes long
MAX_VERSION_CHARS = 256


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


class LeavingSample(msgspec.Struct):
    """A sample that moves out. `rid`: its name in its stream. `room`: of its KV."""

    rid: Name
    room: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class MoveOutBody(msgspec.Struct):
    """Samples to move out. `owner`: of the names, empty without key."""

    samples: list[LeavingSample]
    owner: Name = ""


class PauseBody(msgspec.Struct, kw_only=True):
    mode: str | None = None


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None


class MemoryBody(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None


class LoadBody(msgspec.Struct, kw_only=True):
    """Body of an adapter load. `pinned` is ignored: loaded adapters stay on the device."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str


class DumpExpertsBody(msgspec.Struct, kw_only=True):
    output_dir: str | None = None


class StartProfileBody(msgspec.Struct, kw_only=True):
    output_dir: str | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


async def flush_cache(request: web.BaseRequest) -> web.Response:
    reply = await request[SERVICES].leaders.flush_cache()
    if not reply.ok:
        raise ApiError(400, reply.message or "the cache cannot be flushed while requests run", code="not_idle")
    return web.Response(text=(reply.message or "Cache flushed.") + "\n")


async def abort_request(request: web.BaseRequest) -> web.Response:
    """200 also for an unknown id, as in SGLang, or another key's, which continues."""
    s = request[SERVICES]
    body = decode_body(await request.read() or b"{}", AbortBody)
    if body.abort_all:
        if (refusal := key_refusal(request, s.gate, Access.ADMIN)) is not None:
            raise refusal
        s.client.abort_all()
    elif body.rid:
        owner = None if may_end_any(request, s.gate) else owner_in(request)
        is_whole = (
            s.client.abort(body.rid, owner=owner) and owner is not None
        )  # a name without owner may be elsewhere, too
        if not is_whole and s.others is not None:
            await s.others.abort(body.rid, owner=owner)
    else:
        raise bad_field("rid", "name a request, or set abort_all")
    return web.Response()


async def move_out(request: web.BaseRequest) -> web.Response:
    """End streams that Tandem's router moves. `moving`: rids found."""
    s, data = request[SERVICES], await request.read()
    check_signed(request, data)
    body = decode_body(data, MoveOutBody)
    if s.spec.mode != "decode":
        raise ApiError(409, "only a decode worker has requests that move with their KV", code="not_decode")
    client, others, owner = s.client, s.others, body.owner
    moving = [one.rid for one in body.samples if client.move_out(one.rid, one.room, owner=owner)]
    if others is not None:
        left = [one for one in body.samples if one.rid not in moving]
        moving += [one.rid for one in left if await others.move_out(one.rid, one.room, owner=owner)]
    return json_response({"moving": moving})


async def pause_generation(request: web.BaseRequest) -> web.Response:
    """200 once no step runs."""
    body = decode_body(await request.read() or b"{}", PauseBody)
    mode = body.mode or "abort"
    if mode not in MODES:
        raise bad_field("mode", f"must be one of {', '.join(MODES)}, got {mode!r}")
    leaders = request[SERVICES].leaders
    reply = await leaders.control(PauseGeneration(leaders.mint_call_id(), mode))
    return json_response({"message": reply.message, "status": "ok", **reply.values})


async def continue_generation(request: web.BaseRequest) -> web.Response:
    leaders = request[SERVICES].leaders
    reply = await leaders.control(ContinueGeneration(leaders.mint_call_id()))
    return json_response({"message": reply.message, "status": "ok"})


async def update_weights_from_disk(request: web.BaseRequest) -> web.Response:
    """200 once later tokens use the new weights; 400, unchanged, if they do not fit."""
    leaders = request[SERVICES].leaders
    body = decode_body(await request.read(), UpdateWeightsBody)
    if not body.model_path:
        raise bad_field("model_path", "must name a checkpoint directory on the worker's disk")
    if body.load_format not in (None, "auto", "safetensors"):
        raise bad_field("load_format", f"must be auto or safetensors, got {body.load_format!r}")
    if body.weight_version is not None and not 0 < len(body.weight_version) <= MAX_VERSION_CHARS:
        raise bad_field("weight_version", f"must have 1 to {MAX_VERSION_CHARS} characters")
    message = UpdateWeights(
        leaders.mint_call_id(),
        body.model_path,
        weight_version=body.weight_version,
        abort_all=bool(body.abort_all_requests),
    )
    reply = await leaders.control(message, timeout_s=UPDATE_TIMEOUT_S)
    return _done(reply, num_paused_requests=0, **reply.values)


async def release_memory_occupation(request: web.BaseRequest) -> web.Response:
    """200 once memory is released; 409, unchanged, with live requests."""
    leaders = request[SERVICES].leaders
    message = ReleaseMemory(leaders.mint_call_id(), await _tags(request))
    return _done(await leaders.control(message), released=leaders.released)


async def resume_memory_occupation(request: web.BaseRequest) -> web.Response:
    """200 once memory is restored, with the checkpoint's weights."""
    leaders = request[SERVICES].leaders
    message = ResumeMemory(leaders.mint_call_id(), await _tags(request))
    return _done(await leaders.control(message, timeout_s=UPDATE_TIMEOUT_S), released=leaders.released)


async def _tags(request: web.BaseRequest) -> tuple[str, ...]:
    return tuple(decode_body(await request.read() or b"{}", MemoryBody).tags or ())


async def load_lora_adapter(request: web.BaseRequest) -> web.Response:
    """200 once the adapter is usable; 400, unchanged, if it does not fit."""
    s = request[SERVICES]
    body = decode_body(await request.read(), LoadBody)
    if problem := name_problem(body.lora_name):
        raise bad_field("lora_name", problem)
    if body.lora_name in s.model.own_names:
        raise bad_field("lora_name", f"{body.lora_name!r} is a name of the model itself; choose another")
    if not body.lora_path:
        raise bad_field("lora_path", "must name an adapter's directory on the worker's disk")
    message = LoadAdapter(s.leaders.mint_call_id(), body.lora_name, body.lora_path)
    reply = await s.leaders.control(message, timeout_s=UPDATE_TIMEOUT_S)
    return _done(reply, loaded_adapters=reply.adapters or {})


async def unload_lora_adapter(request: web.BaseRequest) -> web.Response:
    """200 once its requests have ended; new ones are rejected at once."""
    s = request[SERVICES]
    body = decode_body(await request.read(), UnloadBody)
    message = UnloadAdapter(s.leaders.mint_call_id(), body.lora_name)
    reply = await s.leaders.control(message, timeout_s=UPDATE_TIMEOUT_S)
    return _done(reply, loaded_adapters=reply.adapters or {})


async def start_profile(request: web.BaseRequest) -> web.Response:
    """The answer names the trace file of /stop_profile or `num_steps`."""
    leaders = request[SERVICES].leaders
    body = decode_body(await request.read() or b"{}", StartProfileBody)
    message = StartProfile(
        leaders.mint_call_id(),
        output_dir=body.output_dir or "",
        num_steps=body.num_steps,
        activities=tuple(body.activities or ()),
        with_stack=bool(body.with_stack),
        record_shapes=bool(body.record_shapes),
    )
    reply = await leaders.control(message, timeout_s=PROFILE_TIMEOUT_S)
    return _done(reply, **reply.values)


async def stop_profile(request: web.BaseRequest) -> web.Response:
    leaders = request[SERVICES].leaders
    reply = await leaders.control(StopProfile(leaders.mint_call_id()), timeout_s=PROFILE_TIMEOUT_S)
    return _done(reply, **reply.values)


async def start_expert_record(request: web.BaseRequest) -> web.Response:
    return await _record_experts(request, "start")


async def stop_expert_record(request: web.BaseRequest) -> web.Response:
    return await _record_experts(request, "stop")


async def dump_expert_record(request: web.BaseRequest) -> web.Response:
    """The answer names a file for --init-expert-location."""
    body = decode_body(await request.read() or b"{}", DumpExpertsBody)
    return await _record_experts(request, "dump", output_dir=body.output_dir or "")


async def _record_experts(request: web.BaseRequest, action: str, *, output_dir: str = "") -> web.Response:
    leaders = request[SERVICES].leaders
    reply = await leaders.control(RecordExperts(leaders.mint_call_id(), action, output_dir))
    return _done(reply, **reply.values)


def _done(reply: ControlReply, **more: Any) -> web.Response:
    return json_response({"success": True, "message": reply.message, **more})
