"""What log lines of the roles are about, for JSON logs."""

from engine.core.request import Request
from service.telemetry.logs import about


def about_request(request: Request, room: int) -> dict[str, dict[str, str | int | float]]:
    """For `extra=`."""
    return about(request_id=request.request_id, rid=request.rid, room=room)
