"""Bodies of the router's own routes."""

from typing import Any

from router.config import check_worker_url
from service.flags import ConfigError
from service.http.body import Body, optional, required
from service.http.errors import ApiError

_WORKER_TYPE = "Name of role in SGLang's router, where a unified worker is regular."


class NamedWorker(Body):
    url: str = required("Address of the worker, http://HOST:PORT.", "http://10.0.0.7:30000")

    def model_post_init(self, context: Any) -> None:
        try:
            check_worker_url("url", self.url)
        except ConfigError as err:
            raise ApiError(400, str(err), field="url") from None


class NewWorker(NamedWorker):
    """A worker to add. `worker_type` is SGLang's name of `role`."""

    role: str | None = optional(
        "unified, prefill, decode or encode. May be left out where the router has one role of workers.", "prefill"
    )
    worker_type: str | None = optional(_WORKER_TYPE, "prefill")
    bootstrap_port: int | None = optional(
        "Port of a prefill worker's bootstrap server. Default: as the worker says.", 8998, ge=1, le=65535
    )


class RoleSwitchBody(NamedWorker):
    role: str | None = optional("prefill or decode: the role that the worker takes.", "decode")
    worker_type: str | None = optional(_WORKER_TYPE, "decode")
    force: bool | None = optional(
        "True: switches the last worker of its role, too. Default false.", False, default=False
    )
    timeout: float | None = optional(
        "Seconds for running requests to end. Default: the worker's --drain-timeout.", 30, ge=0
    )
