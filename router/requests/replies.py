"""The router's own answers to failures. Pure."""

from aiohttp import web

from router.attempts.upstream_call import CallFailed
from router.pool.models import serves
from router.pool.reports import parse_error
from router.pool.vllm import lack_of, lacks_route
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.requests.relay import answer_headers
from service.http.errors import DRAINING, ApiError

HANDED_BACK = "the router is draining and could not finish this request (--drain-timeout); try again"


def draining(message: str) -> ApiError:
    return ApiError(503, message, code=DRAINING, retry_after_s=1)


def no_worker(
    table: WorkerTable, missing: list[Role], model: str = "", *, retry_after_s: int | None = None
) -> ApiError:
    """Return an error with the missing role and workers' states."""
    known = [w for w in table.workers(missing[0]) if not model or serves(w.models, model)]
    why = "; ".join(f"{w.url}: {_state(w)}" for w in known[:4]) or "none was given"
    what = f"worker for model {model!r}" if model and table.models.several else "worker"
    state = "answers" if known and all(w.silent for w in known) else "is alive"
    message = f"no {' and no '.join(missing)} {what} {state} ({why})"
    return ApiError(503, message, code="no_worker", retry_after_s=retry_after_s)


def _state(worker: Worker) -> str:
    return "it does not answer its checks" if worker.silent else worker.last_error or worker.health.value


def failure_response(failure: CallFailed, path: str) -> web.Response:
    """Return a worker's error unchanged. ApiError if there is none, or no such route."""
    if lacks_route(failure.status, failure.body):
        raise no_route(failure.worker, path) from None
    if failure.reason == "status":
        return web.Response(status=failure.status, body=failure.body, headers=answer_headers(failure.headers))
    status = 504 if failure.reason == "timeout" else 502
    raise ApiError(status, str(failure), code=f"worker_{failure.reason}") from None


def no_route(worker: Worker, path: str) -> ApiError:
    return ApiError(501, lack_of(worker.runtime_type, path), code="not_implemented")


def failure_error(failure: CallFailed) -> ApiError:
    """Return a started stream's last error: the worker's message, else ours."""
    return error_of(failure.status or 502, failure.body or str(failure).encode())


def error_of(status: int, body: bytes) -> ApiError:
    message = parse_error(body)
    return ApiError(status, body.decode(errors="replace")[:2000] if message is None else message)
