"""Which model a request names: the served one, or a LoRA adapter of it. Loading and unloading adapters over HTTP.

Field names are SGLang's (`srt/managers/io_struct.py`), and so is `model: "BASE:ADAPTER"`. The scheduler has the last word
on which adapters there are; here is what it said last.
"""

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from engine.frontend.services import ANY_MODEL, SERVICES, Services
from engine.lora.names import name_problem
from engine.messages import ControlReply, LoadAdapter, UnloadAdapter
from service.http.errors import ApiError, bad_field, decode_body
from service.http.stream import json_response

LOAD_TIMEOUT_S = 3600.0  # adapters come from a disk; running requests finish before one is unloaded
OFF = "this server was started without --enable-lora"


class LoadBody(msgspec.Struct, kw_only=True):
    """`pinned` is taken and means nothing: every loaded adapter stays on the device."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str


class Chosen(NamedTuple):
    """`shown`: the name in answers; `lora`: the adapter's ("": the model alone)."""

    shown: str
    lora: str


def choose_model(s: Services, model: str | None, lora_path: str | None) -> Chosen:
    """What `model` and `lora_path` of a body name together. Raises ApiError: 404 for a model that is not served here."""
    named = _adapter_in(s, model)
    if named and lora_path and named != lora_path:
        raise bad_field("lora_path", f"is {lora_path!r}, and model names the adapter {named!r}; leave one out")
    lora = named or check_lora_path(s, lora_path)
    return Chosen(lora or s.served_name, lora)


def check_lora_path(s: Services, lora_path: str | None) -> str:
    """Name of the adapter, "" for none. Raises ApiError(400)."""
    if lora_path and not s.lora:
        raise bad_field("lora_path", OFF, code="unsupported_parameter")
    return lora_path or ""


def _adapter_in(s: Services, model: str | None) -> str:
    """The adapter that `model` names; "" for the model alone. Raises ApiError(404)."""
    own = (*ANY_MODEL, s.served_name, s.model_path)
    if model is None or model in own:
        return ""
    for name in (model, *(model[len(base) + 1 :] for base in own if base and model.startswith(f"{base}:"))):
        if name in s.client.adapters:
            return name
    more = f", with the adapters {', '.join(s.client.adapters)}" if s.client.adapters else ""
    raise ApiError(
        404,
        f"the model {model!r} does not exist; this server has {s.served_name!r}{more}",
        field="model",
        code="model_not_found",
    )


def adapter_cards(s: Services, base: dict[str, Any]) -> list[dict[str, Any]]:
    """What /v1/models says of each adapter; `base` is the card of the model."""
    return [{**base, "id": name, "root": path, "parent": base["id"]} for name, path in s.client.adapters.items()]


async def load_lora_adapter(request: web.BaseRequest) -> web.Response:
    """200 once requests may name the adapter. 400 for one that does not fit: nothing changes."""
    s = request[SERVICES]
    body = decode_body(await request.read(), LoadBody)
    if problem := name_problem(body.lora_name):
        raise bad_field("lora_name", problem)
    if body.lora_name in (*ANY_MODEL, s.served_name, s.model_path):
        raise bad_field("lora_name", f"{body.lora_name!r} is a name of the model itself; choose another")
    if not body.lora_path:
        raise bad_field("lora_path", "must name an adapter's directory on the worker's disk")
    message = LoadAdapter(s.client.mint_call_id(), body.lora_name, body.lora_path)
    return _answer(await s.client.control(message, timeout_s=LOAD_TIMEOUT_S))


async def unload_lora_adapter(request: web.BaseRequest) -> web.Response:
    """200 once the requests that used it have ended; new ones are refused at once."""
    s = request[SERVICES]
    body = decode_body(await request.read(), UnloadBody)
    message = UnloadAdapter(s.client.mint_call_id(), body.lora_name)
    return _answer(await s.client.control(message, timeout_s=LOAD_TIMEOUT_S))


def _answer(reply: ControlReply) -> web.Response:
    return json_response({"success": True, "message": reply.message, "loaded_adapters": reply.adapters or {}})
