"""Health of a worker's processes, scheduler and model."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from fastapi import Response

from engine.flags.images import blank_image
from engine.frontend.apis.admin.load import step_summary
from engine.frontend.apis.shared.routes import RouteTags, open_route, post_route
from engine.frontend.client.leaders import longest_of
from engine.frontend.errors import not_ready
from engine.frontend.services import SERVICES, Services
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap, GenerateRequest, StateReply, StepReply
from engine.sampling_params import SamplingParams
from engine.stamps import Stamped
from service.http.api import ApiRouter
from service.http.errors import DRAINING, ApiError, bad_field
from service.http.heartbeats import ASK, EVERY_S, IDLE, LINES, LONGEST_S, PATH, TYPE, first_line, live_line, wait_s
from service.http.request import HttpRequest
from service.http.routes import json_response, open_stream
from service.security.keys import Access

API = ApiRouter(RouteTags.HEALTH)

# ---- Heartbeat streams for routers (service/http/heartbeats.py).

MAX_STREAMS = 256  # router processes
_HEADERS = {"Content-Type": TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@API.on(open_route, PATH, is_alias=True)  # for routers
async def heartbeats(request: HttpRequest) -> Response:
    """Raises ApiError: 400 for `every`, 503 if not ready or too many."""
    s, every_s = request[SERVICES], _every_s(request)
    if not s.leaders.ready.is_set() or not s.stamps.read():
        raise not_ready("the model is still loading")
    if s.beating.num >= MAX_STREAMS:
        raise ApiError(503, f"{MAX_STREAMS} streams of heartbeats are open", code="queue_full", retry_after_s=1)
    with s.beating.taken() as pause:
        out = open_stream(request, headers=_HEADERS)
        await out.write(first_line(every_s))
        lines = HeartbeatLines()
        while await pause(wait_s(time.monotonic(), every_s, phase=LINES)):
            fine = s.client.closed is None and s.warm.is_set() and not s.leaders.released and not s.leaders.paused
            if line := lines.next(s.stamps.read(), now_s=time.monotonic(), num_live=s.client.num_live, fine=fine):
                await out.write(line)
        await out.end()
    return out


class HeartbeatLines:
    def __init__(self) -> None:
        self._stamped: dict[str, float] = {}
        self._num_steps = 0

    def next(self, stamps: Sequence[Stamped], *, now_s: float, num_live: int, fine: bool) -> bytes:
        """A line once all processes stamped again. `fine`: /health is plain `ok`."""
        stamped = {stamp.name: stamp.at_s for stamp in stamps}
        if any(self._stamped.get(name) == at_s for name, at_s in stamped.items()):
            return b""
        self._stamped = stamped
        num_steps, self._num_steps = self._num_steps, sum(stamp.num_steps for stamp in stamps)
        if not fine:
            return ASK
        if not num_live and num_steps == self._num_steps:
            return IDLE
        return live_line(max((now_s - since_s for stamp in stamps if (since_s := stamp.busy_since_s)), default=0.0))


def _every_s(request: HttpRequest) -> float:
    text = request.query.get("every", f"{EVERY_S:g}")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST_S:
        raise bad_field("every", f"must be seconds, more than 0 and at most {LONGEST_S:g}, got {text[:40]!r}")
    return max(value, EVERY_S)


# ---- internal requests

IMAGE_TOKENS = 4


async def compute_tokens(s: Services, count: int, *, name: str, timeout_s: float | None) -> None:
    """Compute on every DP rank. Raises ApiError, TimeoutError.

    Internal requests for /health_generate and warm-up, through scheduler and model. Disaggregated
    roles use the fake bootstrap server, so no KV is transferred. An encoder worker encodes a small
    image.
    """
    await asyncio.gather(*(_compute(s, count, r, name=name, timeout_s=timeout_s) for r in range(s.leaders.num_ranks)))


async def _compute(s: Services, count: int, rank: int, *, name: str, timeout_s: float | None) -> None:
    request = _image(s, name) if s.spec.mode == "encode" else _prompt(s, count, name)
    with s.client.generate([request], dp_rank=rank) as generation:
        await asyncio.wait_for(generation.collect(), timeout_s)


def _prompt(s: Services, count: int, name: str) -> GenerateRequest:
    bootstrap = None
    if s.spec.mode != "null":
        bootstrap = Bootstrap(FAKE_BOOTSTRAP_HOST, s.spec.default_bootstrap_port, s.mint_room())
    return GenerateRequest(
        rid=s.mint_id(name),
        input_ids=[0],
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, seed=0, ignore_eos=True),
        bootstrap=bootstrap,
        skip_cache_insert=True,
    )


def _image(s: Services, name: str) -> GenerateRequest:
    assert s.model.vision is not None, "the scheduler of an encode worker has loaded a tower"
    image = blank_image(s.model.vision, IMAGE_TOKENS)
    return GenerateRequest(
        rid=s.mint_id(name),
        input_ids=[0] * image.num_tokens,
        sampling=SamplingParams(max_new_tokens=0, temperature=0.0, seed=0),
        skip_cache_insert=True,
        alone=True,
        images=[image],
    )


# ---- health

FROZEN_S = 2 * EVERY_S  # without a stamp
LOOK_S = 0.05
RECENT_S = 0.25  # a more recent message proves liveness without a call
LOADING_TIMEOUT_S = 1.0
INFO_TIMEOUT_S = 5.0


@API.on(post_route, "/ping", need=Access.NONE, is_polled=True)
@API.on(open_route, "/ping")
@API.on(open_route, "/health")
async def health(request: HttpRequest) -> Response:
    """Report whether requests would be served.

    200 if the scheduler is alive; 503 while draining or with released memory.

    In a long step the heartbeat thread answers with `busy_s` and `step`; 503 if it is silent,
    another process is frozen, or the step exceeds --watchdog-timeout. `incarnation` changes with
    every start and role session.
    """
    s = request[SERVICES]
    facts = {"incarnation": s.incarnation, **({"paused": s.leaders.paused} if s.leaders.paused else {})}
    if s.client.is_draining:
        body = {"status": DRAINING, "num_live_reqs": s.client.num_live, **facts}
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
        return json_response({"status": DRAINING, "released": s.leaders.released, **facts}, status=503)
    await _until_all_run(s)
    body = {"status": "ok", **facts}
    if s.leaders.now_s() - s.leaders.last_message_s <= RECENT_S:
        return json_response(body)
    now = longest_of(await s.leaders.steps(timeout_s=s.spec.health_timeout_s))
    if now.stalled:
        raise not_ready(f"one step has taken {now.busy_s:.0f} s, longer than --watchdog-timeout")
    return json_response({**body, **step_summary(now)})


async def _until_all_run(s: Services) -> None:
    """Wait while a process is frozen. Raises ApiError(503)."""
    until_s = s.leaders.now_s() + s.spec.health_timeout_s
    while (found := s.stamps.frozen(time.monotonic(), after_s=FROZEN_S)) is not None:
        if s.leaders.now_s() > until_s:
            raise not_ready(f"the {found.name} process has not run for {time.monotonic() - found.at_s:.0f} s")
        await asyncio.sleep(LOOK_S)


@API.on(open_route, "/liveness", anywhere=True)
async def liveness(request: HttpRequest) -> Response:
    """Report that this process answers.

    The watchdog ends a stuck scheduler.
    """
    return json_response({"status": "alive"})


@API.on(open_route, "/health_generate")
async def health_generate(request: HttpRequest) -> Response:
    """Compute a token, as a deep check.

    Workers of a pair transfer no KV for it.
    """
    s = request[SERVICES]
    check_up(s)
    try:
        await compute_tokens(s, 1, name="health-", timeout_s=s.spec.health_timeout_s)
    except TimeoutError:
        raise not_ready(f"no token came within {s.spec.health_timeout_s:g} s") from None
    return json_response({"status": "ok"})


def check_up(s: Services) -> None:
    check_dead(s)
    s.leaders.check_ready()
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
    with suppress(ApiError):
        if not s.client.is_draining:
            check_dead(s)
        return await s.leaders.steps(timeout_s=min(LOADING_TIMEOUT_S, s.spec.health_timeout_s))
    return []


async def states_if_up(s: Services) -> list[StateReply]:
    """Empty if one does not answer."""
    with suppress(ApiError):
        if not s.client.is_draining:
            check_up(s)
        return await s.client.recent_states(timeout_s=INFO_TIMEOUT_S)
    return []
