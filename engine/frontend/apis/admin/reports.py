"""The scheduler's reports, if it is up."""

from typing import Any

from engine.frontend.apis.admin.load import load_summary
from engine.frontend.errors import not_ready
from engine.frontend.services import Services
from engine.messages import StateReply, StepReply
from service.http.errors import ApiError

LOADING_TIMEOUT_S = 1.0

INFO_TIMEOUT_S = 5.0


def check_up(s: Services) -> None:
    check_dead(s)
    if not s.scheduler.ready.is_set():
        raise not_ready("the model is still loading")


def check_dead(s: Services) -> None:
    reason = s.session.dead()
    if reason is not None:
        raise not_ready(reason)
    if s.client.closed is not None:
        raise s.client.closed


async def step_if_up(s: Services) -> StepReply | None:
    try:
        if not s.client.is_draining:
            check_dead(s)
        return await s.scheduler.step(timeout_s=min(LOADING_TIMEOUT_S, s.session.health_timeout_s))
    except ApiError:
        return None


async def state_if_up(s: Services) -> StateReply | None:
    try:
        if not s.client.is_draining:
            check_up(s)
        return await s.client.recent_state(timeout_s=INFO_TIMEOUT_S)
    except ApiError:
        return None


async def load_if_up(s: Services) -> dict[str, Any]:
    state = await state_if_up(s)
    return {} if state is None else load_summary(state)
