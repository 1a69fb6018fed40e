"""Health of a worker: of its process, its scheduler, and its model."""

import asyncio

from aiohttp import web

from engine.frontend.apis.admin.load import step_summary
from engine.frontend.apis.admin.reports import check_dead, check_up, step_if_up
from engine.frontend.errors import not_ready
from engine.frontend.services import SERVICES, Services
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap, GenerateRequest
from engine.sampling_params import SamplingParams
from service.http.errors import DRAINING
from service.http.stream import json_response

HEARD_RECENTLY_S = 1.0  # a scheduler that body anything this short ago need not be asked


async def health(request: web.BaseRequest) -> web.Response:
    """200 if the scheduler process answers (or sent something just now); no token is generated. 503 while it drains.

    In a long step a thread beside the loop answers: `busy_s` and `step` say what it computes. 503 when that thread is silent, or
    the step exceeds --watchdog-timeout. `incarnation` changes with every start and role session.
    """
    s = request[SERVICES]
    if s.client.is_draining:
        body = {"status": DRAINING, "num_live_reqs": s.client.num_live, "incarnation": s.session.incarnation}
        to = None if s.session.switch is None else s.session.switch.to_role
        answer = json_response(body if to is None else {**body, "switching_to": to}, status=503)
        answer.headers["Retry-After"] = "1"
        return answer
    check_dead(s)
    if not s.scheduler.ready.is_set():
        await _still_loading(s)
    check_up(s)
    body = {"status": "ok", "incarnation": s.session.incarnation}
    if s.scheduler.now_s() - s.scheduler.last_heard_s <= HEARD_RECENTLY_S:
        return json_response(body)
    now = await s.scheduler.step(timeout_s=s.session.health_timeout_s)
    if now.stalled:
        raise not_ready(f"one step has taken {now.busy_s:.0f} s, longer than --watchdog-timeout")
    return json_response({**body, **step_summary(now)})


async def _still_loading(s: Services) -> None:
    now = await step_if_up(s)
    if now is not None and now.loading:
        raise not_ready(f"the model has been loading for {now.busy_s:.0f} s")


async def liveness(request: web.BaseRequest) -> web.Response:
    """200 while this process answers at all. A scheduler that hangs is ended by its watchdog, and the worker with it."""
    return json_response({"status": "alive"})


async def health_generate(request: web.BaseRequest) -> web.Response:
    """200 after one real token through model and frontend (disaggregated: without a transfer)."""
    s = request[SERVICES]
    check_up(s)
    bootstrap = (
        None
        if s.session.mode == "null"
        else Bootstrap(host=FAKE_BOOTSTRAP_HOST, port=s.session.default_bootstrap_port, room=s.mint_room())
    )
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    probe = GenerateRequest(
        rid=s.mint_id("health-"), input_ids=[0], sampling=sampling, bootstrap=bootstrap, skip_cache_insert=True
    )
    try:
        with s.client.generate([probe]) as generation:
            await asyncio.wait_for(generation.next(), s.session.health_timeout_s)
    except TimeoutError:
        raise not_ready(f"no token came within {s.session.health_timeout_s:g} s") from None
    return json_response({"status": "ok"})
