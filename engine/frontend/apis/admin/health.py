"""Health of a worker's processes, scheduler and model."""

import asyncio
import time

from aiohttp import web

from engine.frontend.apis.admin.load import step_summary
from engine.frontend.client.dp_reports import longest_of
from engine.frontend.errors import not_ready
from engine.frontend.first_tokens import compute_tokens
from engine.frontend.services import SERVICES, Services
from engine.messages import StateReply, StepReply
from service.http.errors import DRAINING, ApiError
from service.http.heartbeats import EVERY_S
from service.http.stream import json_response

FROZEN_S = 2 * EVERY_S  # without a stamp
LOOK_S = 0.05
RECENT_S = 0.25  # a more recent message proves liveness without a call
LOADING_TIMEOUT_S = 1.0
INFO_TIMEOUT_S = 5.0


async def health(request: web.BaseRequest) -> web.Response:
    """200 if the scheduler is alive; 503 while draining or with released memory.

    In a long step the heartbeat thread answers with `busy_s` and `step`; 503 if it is silent,
    another process is frozen, or the step exceeds --watchdog-timeout. `incarnation` changes with
    every start and role session.
    """
    s = request[SERVICES]
    if s.client.is_draining:
        body = {"status": DRAINING, "num_live_reqs": s.client.num_live, "incarnation": s.incarnation}
        to = None if s.spec.switch is None else s.spec.switch.to_role
        answer = json_response(body if to is None else {**body, "switching_to": to}, status=503)
        answer.headers["Retry-After"] = "1"
        return answer
    check_dead(s)
    if not s.leaders.ready.is_set():
        loading = await step_if_up(s)
        if loading is not None and loading.loading:
            raise not_ready(f"the model has been loading for {loading.busy_s:.0f} s")
    check_up(s)
    if s.leaders.released:  # a router sends no requests, but forwards what resumes it
        body = {"status": DRAINING, "released": s.leaders.released, "incarnation": s.incarnation}
        return json_response(body, status=503)
    await _until_all_run(s)
    body = {"status": "ok", "incarnation": s.incarnation}
    if s.leaders.now_s() - s.leaders.last_message_s <= RECENT_S:
        return json_response(body)
    now = longest_of(await s.leaders.steps(timeout_s=s.spec.health_timeout_s))
    if now.stalled:
        raise not_ready(f"one step has taken {now.busy_s:.0f} s, longer than --watchdog-timeout")
    return json_response({**body, **step_summary(now)})


async def _until_all_run(s: Services) -> None:
    """Wait while a process is frozen. Raises ApiError(503)."""
    until_s = s.leaders.now_s() + s.spec.health_timeout_s
    while s.stamps is not None and (found := s.stamps.frozen(time.monotonic(), after_s=FROZEN_S)) is not None:
        if s.leaders.now_s() > until_s:
            raise not_ready(f"the {found.name} process has not run for {time.monotonic() - found.at_s:.0f} s")
        await asyncio.sleep(LOOK_S)


async def liveness(request: web.BaseRequest) -> web.Response:
    """200 while this process answers; the watchdog handles a stuck scheduler."""
    return json_response({"status": "alive"})


async def health_generate(request: web.BaseRequest) -> web.Response:
    """200 after one token through model and frontend (disaggregated: without transfer)."""
    s = request[SERVICES]
    check_up(s)
    try:
        await compute_tokens(s, 1, name="health-", timeout_s=s.spec.health_timeout_s)
    except TimeoutError:
        raise not_ready(f"no token came within {s.spec.health_timeout_s:g} s") from None
    return json_response({"status": "ok"})


def check_up(s: Services) -> None:
    check_dead(s)
    if not s.leaders.ready.is_set():
        raise not_ready("the model is still loading")
    if not s.warm.is_set():
        raise not_ready("the warm-up request is being computed")


def check_dead(s: Services) -> None:
    reason = s.dead()
    if reason is not None:
        raise not_ready(reason)
    if s.client.closed is not None:
        raise s.client.closed


async def step_if_up(s: Services) -> StepReply | None:
    steps = await steps_if_up(s)
    return longest_of(steps) if steps else None


async def steps_if_up(s: Services) -> list[StepReply]:
    """Empty if one does not answer."""
    try:
        if not s.client.is_draining:
            check_dead(s)
        return await s.leaders.steps(timeout_s=min(LOADING_TIMEOUT_S, s.spec.health_timeout_s))
    except ApiError:
        return []


async def states_if_up(s: Services) -> list[StateReply]:
    """Empty if one does not answer."""
    try:
        if not s.client.is_draining:
            check_up(s)
        return await s.client.recent_states(timeout_s=INFO_TIMEOUT_S)
    except ApiError:
        return []
