"""POST /switch_role; rejects impossible switches before draining."""

import math

from fastapi import Response

from engine.frontend.apis.shared.routes import RouteTags, admin_route
from engine.frontend.role_switch import RoleSwitch, RoleSwitchState
from engine.frontend.services import SERVICES, Services
from service.flags import ConfigError
from service.http.api import ApiRouter
from service.http.body import Body, optional, required
from service.http.errors import ApiError, bad_field, read_body
from service.http.request import HttpRequest
from service.http.routes import json_response

API = ApiRouter(RouteTags.OPERATIONS)
ROLES = ("prefill", "decode")
FIXED = "this worker keeps its role; only one that was started with --disaggregation-mode prefill or decode can change"


class SwitchBody(Body):
    role: str = required("prefill or decode: the role that the worker takes.", "decode")
    timeout: float | None = optional(
        "Seconds for running requests to end, at least 0. Default: the server's --drain-timeout.", 30
    )


@API.on(admin_route, "/switch_role", SwitchBody, starts=True)
async def switch_role(request: HttpRequest) -> Response:
    """Change the role of this worker.

    202 once draining; /server_info shows the new role when done. 200 if unchanged.
    """
    s = request[SERVICES]
    body = read_body(await request.read(), SwitchBody)
    if body.role not in ROLES:
        raise bad_field("role", f"must be prefill or decode, got {body.role!r}")
    if body.timeout is not None and not (body.timeout >= 0 and math.isfinite(body.timeout)):
        raise bad_field("timeout", f"must be a number of seconds, at least 0, got {body.timeout}")
    switch = _open_switch(s)
    if body.role == s.spec.mode:
        return json_response({"role": s.spec.mode, "message": f"this is a {s.spec.mode} worker"})
    to = RoleSwitchState(
        role=body.role,
        model_path=str(s.leaders.updated.get("model_path", s.model.path)),
        served_name=s.model.served_name,
        weight_version=s.weight_version,
        adapters=dict(s.leaders.adapters),
    )
    try:
        switch.check(to)
    except ConfigError as e:
        raise bad_field("role", f"this worker cannot be a {body.role} worker: {e}") from None
    switch.request(to, body.timeout)
    message = f"it drains, then starts again as a {body.role} worker; /server_info shows when"
    reply = {
        "role": s.spec.mode,
        "switching_to": body.role,
        "incarnation": s.incarnation,
        "message": message,
    }
    return json_response(reply, status=202)


def _open_switch(s: Services) -> RoleSwitch:
    if s.spec.switch is None:
        raise bad_field("role", FIXED)
    restarts = s.spec.switch.last is not None and not s.leaders.ready.is_set()
    if s.spec.switch.to is not None or restarts:
        role = s.spec.switch.to_role or s.spec.mode
        raise ApiError(409, f"a switch to {role} is under way", code="switching", retry_after_s=1)
    if s.client.closed is not None:
        raise s.client.closed
    s.leaders.check_ready()
    if "weight_source" in s.leaders.updated:
        text = "its weights came as tensors, which end with its scheduler; POST /update_weights_from_disk first"
        raise ApiError(409, f"this worker keeps its role: {text}", code="weights_in_memory")
    return s.spec.switch
