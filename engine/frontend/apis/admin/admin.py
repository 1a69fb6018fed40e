"""Everything that is not generation: health, information, load, metrics, cache, aborts, self-check, tokenization."""

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from engine.frontend.access import require
from engine.frontend.apis.admin.load import get_load, load_summary, step_summary, v1_loads_entry
from engine.frontend.errors import not_ready
from engine.frontend.services import SERVICES, Services
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap, GenerateRequest, StateReply, StepReply
from engine.sampling_params import SamplingParams
from service.http.errors import DRAINING, ApiError, bad_field, decode_body
from service.http.stream import json_response
from service.security.keys import Access

HEARD_RECENTLY_S = 1.0  # a scheduler that said anything this short ago need not be asked
LOADING_TIMEOUT_S = 1.0
INFO_TIMEOUT_S = 5.0
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


async def health(request: web.BaseRequest) -> web.Response:
    """200 when the scheduler process answers (or just said something); no token is generated. A worker that drains says so, with 503.

    A long step is no illness: a thread beside it answers, and `busy_s` and `step` say since when and what it computes. 503 when
    that thread is silent, or the step has taken longer than --watchdog-timeout.
    `incarnation`: another process at this address has another one, or the same one in another role.
    """
    s = request[SERVICES]
    if s.client.is_draining:
        said = {"status": DRAINING, "num_live_reqs": s.client.num_live, "incarnation": s.incarnation}
        to = None if s.switch is None else s.switch.to_role
        answer = json_response(said if to is None else {**said, "switching_to": to}, status=503)
        answer.headers["Retry-After"] = "1"
        return answer
    _check_dead(s)
    if not s.scheduler.ready.is_set():
        await _still_loading(s)
    _check_up(s)
    said = {"status": "ok", "incarnation": s.incarnation}
    if s.scheduler.now_s() - s.scheduler.last_heard_s <= HEARD_RECENTLY_S:
        return json_response(said)
    now = await s.scheduler.step(timeout_s=s.health_timeout_s)
    if now.stalled:
        raise not_ready(f"one step has taken {now.busy_s:.0f} s, longer than --watchdog-timeout")
    return json_response({**said, **step_summary(now)})


async def _still_loading(s: Services) -> None:
    """Raises ApiError(503) that says for how long the model has been loading, if the scheduler process says so."""
    now = await _step_if_up(s)
    if now is not None and now.loading:
        raise not_ready(f"the model has been loading for {now.busy_s:.0f} s")


async def liveness(request: web.BaseRequest) -> web.Response:
    """200 while this process answers at all: starting, draining or overloaded is no reason to kill it.

    A scheduler that hangs is ended by its watchdog, and the worker with it.
    """
    return json_response({"status": "alive"})


async def health_generate(request: web.BaseRequest) -> web.Response:
    """200 when one real token came through model and frontend (disaggregated: without a transfer)."""
    s = request[SERVICES]
    _check_up(s)
    bootstrap = (
        None
        if s.mode == "null"
        else Bootstrap(host=FAKE_BOOTSTRAP_HOST, port=s.default_bootstrap_port, room=s.mint_room())
    )
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    probe = GenerateRequest(
        rid=s.mint_id("health-"), input_ids=[0], sampling=sampling, bootstrap=bootstrap, skip_cache_insert=True
    )
    try:
        with s.client.generate([probe]) as generation:
            await asyncio.wait_for(generation.next(), s.health_timeout_s)
    except TimeoutError:
        raise not_ready(f"no token came within {s.health_timeout_s:g} s") from None
    return json_response({"status": "ok"})


async def model_info(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    return json_response({**s.model_info, **s.scheduler.updated, "max_model_len": s.context_length})


async def server_info(request: web.BaseRequest) -> web.Response:
    """Resolved configuration, what the scheduler said of itself, and its load; the load is missing while it is down."""
    s = request[SERVICES]
    load, now = await _load_if_up(s), await _step_if_up(s)
    info = {
        **s.server_info,
        **s.scheduler.info,
        "model_path": s.model_path,
        **s.scheduler.updated,
        "served_model_name": s.served_name,
    }
    return json_response(
        {
            **info,
            "disaggregation_mode": s.mode,
            **({} if s.switch is None else {"switching_to": s.switch.to_role, "last_switch": s.switch.last}),
            "status": DRAINING if s.client.is_draining else "ready" if load else "starting",
            **load,
            "internal_states": [load] if load else [],
            **({} if now is None else step_summary(now)),
        }
    )


async def loads(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    entry = v1_loads_entry(
        await s.client.recent_state(),
        mode=s.mode,
        max_running_requests=int(s.server_info.get("max_running_requests", 0)),
        num_live=s.client.num_live,
    )
    return json_response({"timestamp": time.time(), "version": s.server_info.get("version"), "loads": [entry]})


async def old_load(request: web.BaseRequest) -> web.Response:
    return json_response(get_load(await request[SERVICES].client.recent_state()))


async def metrics(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = s.metrics.exposition(await _state_if_up(s), await _step_if_up(s))
    return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})


async def flush_cache(request: web.BaseRequest) -> web.Response:
    reply = await request[SERVICES].scheduler.flush_cache()
    if not reply.ok:
        raise ApiError(400, reply.message or "the cache cannot be flushed while requests run", code="not_idle")
    return web.Response(text=(reply.message or "Cache flushed.") + "\n")


async def abort_request(request: web.BaseRequest) -> web.Response:
    """200 also for an id that is not (or no longer) running, as SGLang does."""
    s = request[SERVICES]
    body = decode_body(await request.read() or b"{}", AbortBody)
    if body.abort_all:
        require(request, Access.ADMIN)
        s.client.abort_all()
    elif body.rid:
        s.client.abort(body.rid)
    else:
        raise bad_field("rid", "name a request, or set abort_all")
    return web.Response()


async def check(request: web.BaseRequest) -> web.Response:
    """Every owner of the scheduler checks its own invariants; `ok` is false when one found a problem."""
    state = await request[SERVICES].scheduler.state(check=True)
    return json_response({"ok": not state.problems, **msgspec.structs.asdict(state), "problems": state.problems})


async def tokenize(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = decode_body(await request.read(), TokenizeBody)
    add = body.add_special_tokens is not False
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    tokens = [await s.encode(t, field="prompt", add_special_tokens=add) for t in texts]
    counts = [len(t) for t in tokens]
    single = isinstance(body.prompt, str)
    return json_response(
        {
            "tokens": tokens[0] if single else tokens,
            "count": counts[0] if single else counts,
            "max_model_len": s.context_length,
        }
    )


async def detokenize(request: web.BaseRequest) -> web.Response:
    s = request[SERVICES]
    body = decode_body(await request.read(), DetokenizeBody)
    flat = [t for t in body.tokens if isinstance(t, int)]
    nested = [t for t in body.tokens if not isinstance(t, int)]
    if flat and nested:
        raise bad_field("tokens", "must be a list of token ids or a list of such lists")
    for token in [*flat, *(t for ids in nested for t in ids)]:
        if not 0 <= token < s.vocab_size:
            raise bad_field("tokens", f"{token} is not a token id (0 to {s.vocab_size - 1})")
    skip = body.skip_special_tokens is not False
    texts = [s.tokenizer.decode(ids, skip_special_tokens=skip) for ids in nested or [flat]]
    return json_response({"text": texts if nested else texts[0]})


def _check_up(s: Services) -> None:
    _check_dead(s)
    if not s.scheduler.ready.is_set():
        raise not_ready("the model is still loading")


def _check_dead(s: Services) -> None:
    reason = s.dead()
    if reason is not None:
        raise not_ready(reason)
    if s.client.closed is not None:
        raise s.client.closed


async def _step_if_up(s: Services) -> StepReply | None:
    try:
        if not s.client.is_draining:
            _check_dead(s)
        return await s.scheduler.step(timeout_s=min(LOADING_TIMEOUT_S, s.health_timeout_s))
    except ApiError:
        return None


async def _state_if_up(s: Services) -> StateReply | None:
    try:
        if not s.client.is_draining:
            _check_up(s)
        return await s.client.recent_state(timeout_s=INFO_TIMEOUT_S)
    except ApiError:
        return None


async def _load_if_up(s: Services) -> dict[str, Any]:
    state = await _state_if_up(s)
    return {} if state is None else load_summary(state)
