"""Exceptions of the Python interface. Wrong flags raise `ConfigError` (service/flags.py)."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.http.errors import ApiError


_FOREIGN = {  # ours -> SGLang's and vLLM's names
    "pause": "pause_generation",
    "resume": "continue_generation",
    "release_memory": "release_memory_occupation sleep",
    "resume_memory": "resume_memory_occupation wake_up",
    "flush_cache": "reset_prefix_cache",
    "update_weights": "update_weights_from_disk update_weights_from_tensor",
    "get_server_info": "server_info model_info get_model_info",
    "embed": "encode",
    "close": "shutdown",
    "AsyncLLM.generate": "async_generate",
    "AsyncLLM.abort": "abort_request",
}
FOREIGN = {name: own for own, names in _FOREIGN.items() for name in names.split()}
_ROUTE = re.compile("POST /([a-z_]+)")  # in remedies


class TandemError(Exception):
    """Base of errors; the text has the reason. `code`: for programs, as in HTTP answers."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class RequestError(TandemError, ValueError):
    """A wrong argument of a call. `field`: its name, as in HTTP bodies."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.field = field


class EngineDeadError(TandemError, RuntimeError):
    """The engine has ended: a process died, or it was closed. Later calls fail alike."""


@contextmanager
def as_python() -> Iterator[None]:
    """Raise errors of the HTTP API as ours."""
    from service.http.errors import ApiError

    try:
        yield
    except ApiError as error:
        raise _translated(error) from None


def _translated(error: "ApiError") -> TandemError:
    from engine.frontend.client.scheduler_link import ENGINE_DEAD
    from tandem.flags import in_python

    message = _ROUTE.sub(lambda match: f"{FOREIGN.get(match[1], match[1])}()", in_python(error.message))
    if error.code == ENGINE_DEAD:
        return EngineDeadError(message, code=error.code)
    if error.status < 500:
        return RequestError(message, field=error.field, code=error.code)
    return TandemError(message, code=error.code)
