"""Probes workers: health, load, bootstrap address. One task per worker, so that a slow one delays no other.

All use one client, and each worker is probed at its own moment of the interval. Owns those tasks; what the answers mean is decided by the worker table.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import aiohttp
import msgspec

from router.client.credentials import Credentials
from router.config import RouterConfig
from router.pool.active_calls import give_up_vain_calls, last_byte_s
from router.pool.models import has_adapters, parse_models, says_models
from router.pool.probe_timeout import ProbeTimeout
from router.pool.reports import parse_bootstrap, parse_busy, parse_incarnation, parse_load, parse_mode, says_draining
from router.pool.states import Check, Health
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable

log = logging.getLogger(__name__)

BOOTSTRAP_REFRESH_S = 10.0
_LOAD_PATHS = ("/v1/loads", "/get_load")  # the richer one first
_INFO_PATHS = ("/server_info", "/get_server_info")
_MODEL_PATHS = ("/v1/models",)
_MODEL_INFO_PATHS = ("/get_model_info", "/model_info")
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.UNIFIED}  # by --disaggregation-mode
MAX_ANSWER_BYTES = 4 << 20
BETWEEN_S = 0.0005  # two first checks
GOLDEN = 0.6180339887  # multiples of it are spread evenly over an interval, however many there are (Knuth, vol. 3, 6.4)
NO_WORKER = "/health answers, but neither /server_info nor /v1/models says anything: is this URL a worker's?"


class Failure(Protocol):
    """A request that did not reach its worker. `reason` "refused": nothing listens there."""

    @property
    def worker(self) -> Worker: ...

    @property
    def reason(self) -> str: ...

    @property
    def draining(self) -> bool: ...


class HealthMonitor:
    """Watches every worker of `table` that was given to `watch`."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        table: WorkerTable,
        session: aiohttp.ClientSession,
        credentials: Credentials,
        on_report: Callable[[Worker, LoadReport | None], None] = lambda worker, report: None,
        on_info: Callable[[Worker, object], None] = lambda worker, info: None,
    ) -> None:
        """`on_report` gets a worker's load before the table does; `on_info` what a worker reports about itself, when it comes
        up and now and then.
        """
        self._on_report = on_report
        self._credentials = credentials
        self._on_info = on_info
        self._config = config
        self._table = table
        self._session = session
        self._watches: dict[int, _Watch] = {}
        self._begin_s = 0.0  # when the last watch began, or will

    @property
    def num_watched(self) -> int:
        return len(self._watches)

    def watch(self, worker: Worker) -> None:
        """Start to check `worker`, now and then every interval. A thousand at once begin within half a second."""
        self._begin_s = max(_now_s(), self._begin_s + BETWEEN_S)
        watch = _Watch(worker, begin_s=self._begin_s)
        watch.task = asyncio.create_task(self._run(watch), name=f"health {worker.url}")
        self._watches[worker.worker_id] = watch

    def retire(self, worker: Worker) -> None:
        """It left the table: look after it only for as long as requests of ours run there."""
        watch = self._watches.get(worker.worker_id)
        if watch is not None:
            watch.retired = True
            watch.wake.set()

    async def unwatch(self, worker: Worker) -> None:
        watch = self._watches.pop(worker.worker_id, None)
        if watch is not None and watch.task is not None:
            watch.task.cancel()
            await asyncio.gather(watch.task, return_exceptions=True)

    async def first_round(self) -> None:
        """Until each worker was checked once."""
        await asyncio.gather(*(watch.checked.wait() for watch in self._watches.values()))

    async def close(self) -> None:
        for watch in list(self._watches.values()):
            await self.unwatch(watch.worker)

    def on_unreachable(self, failure: Failure) -> None:
        """A request could not reach its worker: where nothing listens, or it drains, it leaves the pool now.

        Else it is checked now.
        """
        worker = failure.worker
        if failure.reason == "refused":
            self._tell(worker, Check.REFUSED, str(failure))
        elif failure.draining:
            self._tell(worker, Check.DRAINING, "it is draining")
        self.look(worker)  # it may have been restarted, with another bootstrap port

    def look(self, worker: Worker) -> None:
        """Check it now, and read anew what it says of itself."""
        watch = self._watches.get(worker.worker_id)
        if watch is not None:
            watch.info_due_s = 0.0
            watch.wake.set()

    async def _run(self, watch: "_Watch") -> None:
        await asyncio.sleep(watch.begin_s - _now_s())
        while not watch.retired or watch.worker.calls:
            watch.wake.clear()
            await self._check(watch)
            self._give_up(watch.worker)
            watch.checked.set()
            try:
                async with asyncio.timeout(
                    watch.next_wait_s(self._config.health_check_interval_s)
                ):  # no task of its own
                    await watch.wake.wait()
            except TimeoutError:
                continue
        self._watches.pop(watch.worker.worker_id, None)

    def _give_up(self, worker: Worker) -> None:
        """End the requests that wait for it in vain."""
        count = give_up_vain_calls(worker, _now_s(), timeout_s=self._config.dead_worker_timeout_s)
        if count:
            log.warning("%d requests at %s worker %s were given up: it is gone", count, worker.role, worker.url)

    async def _check(self, watch: "_Watch") -> None:
        """One round: health, then what else is due. A worker comes up with its bootstrap address known."""
        worker = watch.worker
        known = worker.incarnation
        result, error = await self._ask_health(worker)
        now_s = _now_s()
        is_new = worker.health is not Health.UP or worker.incarnation != known
        if result is Check.OK and (is_new or now_s >= watch.info_due_s):
            error = await self._read_info(worker) or ""
            result = Check.FAILED if error else Check.OK
            watch.info_due_s = now_s + BOOTSTRAP_REFRESH_S
        self._tell(worker, result, error)
        if worker.health is Health.UP and self._config.load_poll_interval_s > 0 and now_s >= watch.load_due_s:
            watch.load_due_s = now_s + self._config.load_poll_interval_s
            await self._read_load(worker)

    async def _read_load(self, worker: Worker) -> None:
        report = parse_load((await self._first_json(worker, _LOAD_PATHS))[0])
        self._on_report(worker, report)
        self._table.on_report(worker, report)

    def _tell(self, worker: Worker, result: Check, error: str) -> None:
        if self._table.on_check(worker, result, now_s=_now_s(), error=error):
            level = logging.INFO if worker.health is Health.UP else logging.WARNING
            log.log(level, "%s worker %s is %s %s", worker.role, worker.url, worker.health, error)

    async def _ask_health(self, worker: Worker) -> tuple[Check, str]:
        asked_s = _now_s()
        try:
            status, body = await self._get(worker, "/health")
        except aiohttp.ClientConnectorError as err:
            return Check.REFUSED, str(err)
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            return Check.FAILED, f"/health: {str(err) or type(err).__name__}"
        self._table.on_incarnation(worker, parse_incarnation(body), asked_s=asked_s)
        self._table.on_busy(worker, parse_busy(body))
        if status == 503 and says_draining(body):
            return Check.DRAINING, "it is draining"
        return (Check.OK, "") if status == 200 else (Check.FAILED, f"/health answers {status}")

    async def _read_info(self, worker: Worker) -> str | None:
        """Read role and bootstrap address; returns what is wrong. Workers that say nothing of themselves are fine."""
        info, error = await self._first_json(worker, _INFO_PATHS)
        if error:  # nothing was learnt: what is known of it stays
            return error
        if error := await self._read_models(worker, info):
            return error
        if error := self._read_role(worker, parse_mode(info)):
            return error
        if info is not None and worker.role is Role.PREFILL and worker.given_bootstrap_port is None:
            host, port = parse_bootstrap(info, url_host=worker.url_host)
            self._table.on_bootstrap(worker, host=host, port=port)
        watch = self._watches.get(worker.worker_id)
        if watch is not None and not watch.retired:
            self._on_info(worker, info)
        return None

    def _read_role(self, worker: Worker, mode: str | None) -> str:
        """Which role it has; returns what is wrong. A worker may change between prefill and decode, and knows best."""
        said = worker.role if mode is None else _ROLES.get(mode)
        if said is worker.role:
            return ""
        if said is None or Role.UNIFIED in (said, worker.role):
            return f"runs with --disaggregation-mode {mode}, but was given as a {worker.role} worker"
        log.warning(
            "worker %s was taken for a %s worker, and says that it is a %s worker", worker.url, worker.role, said
        )
        self._table.on_role(worker, said)
        return ""

    async def _read_models(self, worker: Worker, info: object) -> str:
        """Read which models it serves; returns what is wrong: a server that says nothing at all of itself is no worker."""
        listed = None
        if not isinstance(info, dict) or has_adapters(info):
            listed, error = await self._first_json(worker, _MODEL_PATHS)
            if error:
                return error
        if not isinstance(info, dict) and not says_models(listed):
            said, error = await self._first_json(worker, _MODEL_INFO_PATHS)
            if error or not isinstance(said, dict):
                return error or NO_WORKER
        self._table.on_models(worker, parse_models(info, listed))
        return ""

    def refresh(self) -> None:
        """Ask all workers anew what they serve: it may just have changed."""
        for watch in self._watches.values():
            self.look(watch.worker)

    async def _first_json(self, worker: Worker, paths: tuple[str, ...]) -> tuple[Any, str]:
        """(the first JSON answer of `paths`, ""); (None, "") when it has none; (None, why) when one could not be asked."""
        error = ""
        for path in paths:
            try:
                status, body = await self._get(worker, path)
                if status == 200:
                    return msgspec.json.decode(body), ""
            except (ValueError, RecursionError):
                continue
            except (aiohttp.ClientError, OSError, TimeoutError) as err:
                error = f"{path}: {str(err) or type(err).__name__}"
        return None, error

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        question = self._question(worker) if self._config.health_silence_s else None
        try:
            status, body = await self._get_answer(worker, path)
            self._on_silence(worker, False)
            return status, body
        finally:
            if question is not None:
                question.close()

    async def _get_answer(self, worker: Worker, path: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=self._config.health_check_timeout_s)
        async with self._session.get(
            worker.url + path, timeout=timeout, headers=self._credentials.own(), allow_redirects=False
        ) as response:
            return response.status, await _read_bounded(response)

    def _question(self, worker: Worker) -> ProbeTimeout:
        return ProbeTimeout(
            limit_s=self._config.health_silence_s,
            received_s=lambda: last_byte_s(worker),
            report=partial(self._on_silence, worker),
        )

    def _on_silence(self, worker: Worker, silent: bool) -> None:
        if self._table.on_silence(worker, silent) and worker.health is Health.UP:
            level, what = (
                (logging.WARNING, "silent: others are preferred") if silent else (logging.INFO, "answering again")
            )
            log.log(level, "%s worker %s is %s", worker.role, worker.url, what)


class _Watch:
    """What the task of one worker remembers."""

    def __init__(self, worker: Worker, *, begin_s: float) -> None:
        self.worker = worker
        self.begin_s = begin_s
        self.task: asyncio.Task[None] | None = None
        self.wake = asyncio.Event()
        self.checked = asyncio.Event()
        self.retired = False
        self.load_due_s = 0.0
        self.info_due_s = 0.0
        self._is_placed = False

    def next_wait_s(self, interval_s: float) -> float:
        """Until the next check. The first wait is shorter for most, so that workers that came together are not asked together."""
        if self._is_placed:
            return interval_s
        self._is_placed = True
        return interval_s * (self.worker.worker_id * GOLDEN % 1 or 1.0)


def _now_s() -> float:
    """The event loop's time: monotonic, and virtual in a simulation."""
    return asyncio.get_running_loop().time()


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """The whole body; a `ClientPayloadError` if it is longer than any honest answer."""
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        parts.append(chunk)
    return b"".join(parts)
