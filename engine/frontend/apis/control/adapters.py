"""Load and unload LoRA adapters over HTTP. Field names are SGLang's (`srt/managers/io_struct.py`)."""

import msgspec
from aiohttp import web

from engine.frontend.services import SERVICES
from engine.lora.names import name_problem
from engine.messages import ControlReply, LoadAdapter, UnloadAdapter
from service.http.errors import bad_field, decode_body
from service.http.stream import json_response

LOAD_TIMEOUT_S = 3600.0  # adapters come from a disk; running requests finish before one is unloaded


class LoadBody(msgspec.Struct, kw_only=True):
    """`pinned` has no effect: every loaded adapter stays on the device."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str


async def load_lora_adapter(request: web.BaseRequest) -> web.Response:
    """200 once requests may name the adapter. 400 for one that does not fit; then nothing changes."""
    s = request[SERVICES]
    body = decode_body(await request.read(), LoadBody)
    if problem := name_problem(body.lora_name):
        raise bad_field("lora_name", problem)
    if body.lora_name in s.model.own_names:
        raise bad_field("lora_name", f"{body.lora_name!r} is a name of the model itself; choose another")
    if not body.lora_path:
        raise bad_field("lora_path", "must name an adapter's directory on the worker's disk")
    message = LoadAdapter(s.scheduler.mint_call_id(), body.lora_name, body.lora_path)
    return _answer(await s.scheduler.control(message, timeout_s=LOAD_TIMEOUT_S))


async def unload_lora_adapter(request: web.BaseRequest) -> web.Response:
    """200 once its requests have ended; new ones are refused at once."""
    s = request[SERVICES]
    body = decode_body(await request.read(), UnloadBody)
    message = UnloadAdapter(s.scheduler.mint_call_id(), body.lora_name)
    return _answer(await s.scheduler.control(message, timeout_s=LOAD_TIMEOUT_S))


def _answer(reply: ControlReply) -> web.Response:
    return json_response({"success": True, "message": reply.message, "loaded_adapters": reply.adapters or {}})
