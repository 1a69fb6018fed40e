"""Health monitor: checks of workers, one task each."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from router.client.credentials import Credentials
from router.client.session import call_worker
from router.client.upstream import Upstream
from router.config import HealthFlags
from router.pool.active_calls import (
    PAUSES,
    LetGo,
    calls_for_others,
    give_up_all,
    give_up_vain_calls,
    last_sign_s,
    num_to_give,
    waits_at_silent,
)
from router.pool.breaker import Check, Health
from router.pool.health_log import HealthLog
from router.pool.heartbeats import BEATS, FAILURES, ROUNDING_S, Heartbeats, Prober
from router.pool.reports import (
    IS_DRAINING,
    NO_PAIR,
    VLLM,
    Info,
    is_bootstrap_server,
    parse_bootstrap,
    parse_encoder,
    parse_error,
    parse_health,
    parse_load,
    parse_mode,
    parse_ranks,
    reports_draining,
    runtime_of,
    why_draining,
)
from router.pool.worker import PAIR, LoadReport, Role, Worker
from router.pool.workers import WorkerTable, has_adapters, parse_event_names, parse_models, reports_models
from service.http.listening import url_of, why_unreachable
from service.kv_layout import read_layout
from service.waiter import end_tasks, loop_time_s

log = logging.getLogger(__name__)

BOOTSTRAP_REFRESH_S = 10.0
_LOAD_PATHS = ("/v1/loads", "/get_load")  # the richer one first
_INFO_PATHS = ("/server_info", "/get_server_info")
_MODEL_PATHS = ("/v1/models",)
_MODEL_INFO_PATHS = ("/get_model_info", "/model_info")
_ROLES = {  # by --disaggregation-mode
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "null": Role.UNIFIED,
    "encode": Role.ENCODE,
}
MAX_BEATS_PER_S = 4096  # over all workers
MAX_CHECKS_PER_S = 64  # over all workers with requests and without heartbeats: about 3 % of a core
BETWEEN_S = 0.0005  # delay between first checks
GOLDEN = 0.6180339887  # its multiples spread evenly over an interval (Knuth, vol. 3, 6.4)
NO_WORKER = "/health answers, but neither /server_info nor /v1/models says anything: is this URL a worker's?"
NO_HALF = (
    "/server_info does not say which half of a pair it is (disaggregation_mode): start it with --disaggregation-mode prefill or "
    "decode, or give it as a unified worker (--worker-urls)"
)
NO_BOOTSTRAP = (
    "/server_info names no bootstrap server (disaggregation_bootstrap_port), so no decode worker would get its KV: start it with "
    "--disaggregation-mode prefill, or give it as a unified worker (--worker-urls)"
)
NO_ENCODER = (
    "/server_info names no image_encoder: prefill workers would not find it; is it a Tandem worker of this version?"
)


@dataclass(eq=False, kw_only=True)
class HealthMonitor:
    """`on_report` gets a load before the table, `on_info` a `/server_info`. `let_go` migrates calls
    from a live worker. Without `upstream` there are no heartbeats.
    """

    config: HealthFlags
    table: WorkerTable
    session: aiohttp.ClientSession
    credentials: Credentials
    upstream: Upstream | None = None
    on_report: Callable[[Worker, LoadReport | None], None] = lambda worker, report: None
    on_info: Callable[[Worker, Info], None] = lambda worker, info: None
    let_go: LetGo = give_up_all
    _watches: dict[int, "_Watch"] = field(default_factory=dict)
    _begin_s: float = 0.0  # start of the last watch

    def __post_init__(self) -> None:
        self._log = HealthLog(self.table)
        self._prober = Prober(
            session=self.session,
            credentials=self.credentials,
            timeout_s=self.config.health_check_timeout_s,
            silence_s=self.config.health_silence_s,
            on_silence=self._on_silence,
        )

    def watch(self, worker: Worker) -> None:
        """First checks are staggered."""
        self._begin_s = max(loop_time_s(), self._begin_s + BETWEEN_S)
        watch = _Watch(worker, begin_s=self._begin_s)
        watch.heartbeats = self._heartbeats(watch)
        watch.task = asyncio.create_task(self._run(watch), name=f"health {worker.url}")
        self._watches[worker.worker_id] = watch

    def retire(self, worker: Worker) -> None:
        """Watch it while our requests run there."""
        watch = self._watches.get(worker.worker_id)
        if watch is not None:
            watch.retired = True
            watch.wake.set()

    async def first_round(self) -> None:
        await asyncio.gather(*(watch.checked.wait() for watch in self._watches.values()))

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        self._watches.clear()
        await end_tasks(tasks)

    def on_unreachable(self, worker: Worker, *, refused: str = "", draining: bool = False) -> None:
        """Mark a worker down if refused, or draining; check it."""
        if refused:
            self._note(worker, Check.REFUSED, refused)
        elif draining:
            self._note(worker, Check.DRAINING, IS_DRAINING)
        self.look(worker)  # it may have restarted with another bootstrap port

    def look(self, worker: Worker) -> None:
        """Check it now, with `/server_info`."""
        watch = self._watches.get(worker.worker_id)
        if watch is not None:
            watch.info_due_s = 0.0
            watch.wake.set()

    def refresh(self) -> None:
        for watch in self._watches.values():
            self.look(watch.worker)

    async def _run(self, watch: "_Watch") -> None:
        await asyncio.sleep(watch.begin_s - loop_time_s())
        try:
            while not watch.retired or watch.worker.calls:
                watch.wake.clear()
                try:
                    await self._check(watch)
                except Exception as error:  # an answer that no code here expects must not end the checks
                    self._on_defect(watch.worker, error)
                self._log.on_round(loop_time_s())
                self._give_up(watch.worker)
                watch.checked_s = loop_time_s()
                watch.checked.set()
                await self._wait(watch, watch.next_s(self.config.health_check_interval_s))
        finally:
            if watch.heartbeats is not None:
                watch.heartbeats.close()
        self._watches.pop(watch.worker.worker_id, None)
        self._log.forget(watch.worker)

    def _on_defect(self, worker: Worker, error: Exception) -> None:
        why = f"the router cannot check it: {type(error).__name__}: {error}"
        if why != worker.checks.error:
            log.error("%s worker %s: %s", worker.role, worker.url, why, exc_info=error)
        self._note(worker, Check.FAILED, why)

    def _heartbeats(self, watch: "_Watch") -> Heartbeats | None:
        silence_s = self.config.health_silence_s
        if self.upstream is None or not silence_s:
            return None
        return Heartbeats(
            worker=watch.worker,
            upstream=self.upstream,
            headers=self.credentials.own,
            silence_s=silence_s,
            every_s=lambda: max(silence_s / BEATS, len(self._watches) / MAX_BEATS_PER_S),
            on_silence=self._on_silence,
            ask=watch.wake.set,
        )

    async def _wait(self, watch: "_Watch", due_s: float) -> None:
        while not watch.wake.is_set() and (now_s := loop_time_s()) < due_s:
            beat_s = self._beat_s(watch)
            if beat_s and now_s - max(watch.checked_s, last_sign_s(watch.worker)) >= beat_s:
                return
            try:
                async with asyncio.timeout(min(due_s - now_s, beat_s) if beat_s else due_s - now_s):
                    await watch.wake.wait()
            except TimeoutError:
                continue

    def _beat_s(self, watch: "_Watch") -> float:
        """Seconds before a probe; 0: no probes."""
        if not (watch.worker.calls or watch.is_late) or watch.is_fine:
            return 0.0
        beat_s = self._prober.beat_s and max(self._prober.beat_s, len(self._watches) / MAX_CHECKS_PER_S)
        return beat_s if beat_s < self.config.health_check_interval_s else 0.0

    def _give_up(self, worker: Worker) -> None:
        count = give_up_vain_calls(worker, loop_time_s(), timeout_s=self.config.dead_worker_timeout_s)
        if count:
            log.debug("%d requests at %s worker %s were given up: it is gone", count, worker.role, worker.url)

    async def _check(self, watch: "_Watch") -> None:
        """Run one round: health, then whatever is due. With good heartbeats health comes with
        `/server_info`, and load only with requests.
        """
        worker, heartbeats, asked_s = watch.worker, watch.heartbeats, loop_time_s()
        known, result, error = worker.process.incarnation, Check.OK, ""
        if worker.health is not Health.UP or not watch.is_fine or loop_time_s() >= watch.info_due_s:
            result, error = await self._check_health(worker)
            if result is Check.OK and heartbeats is not None:
                heartbeats.on_answer()
        now_s = loop_time_s()
        is_new = worker.health is not Health.UP or worker.process.incarnation != known
        if result is Check.OK and (is_new or now_s >= watch.info_due_s):
            error = await self._read_info(watch)
            if error and error != worker.checks.error and worker.health is not Health.UP:  # no change of state logs it
                log.warning("%s worker %s gets no request: %s", worker.role, worker.url, error)
            result = Check.FAILED if error else Check.OK
            watch.info_due_s = now_s + BOOTSTRAP_REFRESH_S
        if heartbeats is not None and result is Check.OK:
            heartbeats.open(is_new=is_new)
        self._note(worker, result, error, reached=worker.checks.heard_s >= asked_s)
        if worker.health is Health.UP and self.config.load_poll_interval_s > 0 and now_s >= watch.load_due_s:
            watch.load_due_s = now_s + self.config.load_poll_interval_s
            report = worker.report
            if heartbeats is None or not heartbeats.took_rest() or report is None:
                report = parse_load((await self._prober.first_json(worker, _LOAD_PATHS))[0])
            self.on_report(worker, report)
            self.table.loads.on_report(worker, report)
            above = self.config.rebalance_above
            if not above or worker.role is not Role.DECODE:
                return
            if count := num_to_give(worker, self.table.pool_of(worker), above=above):
                self.move_calls(worker, f"it holds more than {above:g} of its memory (--rebalance-above)", most=count)

    def move_calls(self, worker: Worker, why: str, *, answers: bool = True, most: int | None = None) -> int:
        """Migrate (the latest `most`) calls to others and count them. While the worker `answers`,
        calls with unsent tokens stay.
        """
        if self.config.disable_moves or not self.table.has_others(worker):
            return 0
        calls = calls_for_others(worker, answers=answers)
        calls = calls if most is None else calls[-most:]
        if calls:
            log.info("%s worker %s gives its calls (%d) to others: %s", worker.role, worker.url, len(calls), why)
            (self.let_go if answers else give_up_all)(worker, calls, why)
        return len(calls)

    def _note(self, worker: Worker, result: Check, error: str, *, reached: bool = False) -> None:
        changed = self.table.on_check(worker, result, now_s=loop_time_s(), error=error)
        self._log.on_check(worker, changed=changed, reached=reached)
        if worker.health is Health.DRAINING:  # each time, as answers start meanwhile
            self.move_calls(worker, "it is draining")

    def _on_silence(self, worker: Worker, silent: bool) -> None:
        """Reports repeat. Immovable calls get more time, as the silence may be a pause."""
        if self.table.on_silence(worker, silent) and worker.health is Health.UP:
            what = "silent: others are preferred" if silent else "answering again"
            log.log(logging.WARNING if silent else logging.INFO, "%s worker %s is %s", worker.role, worker.url, what)
            if silent:
                self.move_calls(worker, "it does not answer its checks (--health-silence)", answers=False)
        elif silent and worker.beats:
            self._end_vain_calls(worker)

    def _end_vain_calls(self, worker: Worker) -> None:
        if self.config.disable_moves or self.table.has_others(worker):
            return
        silence_s = self.config.health_silence_s
        calls = waits_at_silent(worker, loop_time_s(), silence_s=silence_s - ROUNDING_S)
        if calls:
            log.debug("%d calls of %s worker %s end: it is silent, and alone", len(calls), worker.role, worker.url)
            give_up_all(worker, calls, f"no heartbeat for {PAUSES * silence_s:g} s (--health-silence)")

    async def _check_health(self, worker: Worker) -> tuple[Check, str]:
        checked_s = loop_time_s()
        try:
            status, body = await self._prober.get(worker, "/health")
        except aiohttp.ClientConnectorError as err:
            return Check.REFUSED, why_unreachable(err)
        except FAILURES as err:
            return Check.FAILED, self._prober.why("/health", err)
        report = parse_health(body)
        worker.process.busy_s = report.busy_s
        if report.incarnation:  # else an error, which says nothing of a pause
            worker.process.paused = report.paused
            self._log.on_pause(worker)
        self.table.on_incarnation(worker, report.incarnation, checked_s=checked_s)
        if status == 503 and reports_draining(body):
            return Check.DRAINING, why_draining(body)
        if status == 200:
            return Check.OK, ""
        return Check.FAILED, ": ".join(filter(None, (f"/health answers {status}", parse_error(body))))

    async def _read_info(self, watch: "_Watch") -> str:
        worker = watch.worker
        answer, error = await self._prober.first_json(worker, _INFO_PATHS)
        info: Info = answer if isinstance(answer, dict) else {}
        error = error or await self._read_models(worker, answer) or self._read_role(worker, info)
        if error:
            return error
        if worker.role is Role.PREFILL:
            error = await self._read_bootstrap(watch, info)
            if error:
                return error
        if worker.role is Role.ENCODE and parse_encoder(info) is None:
            return NO_ENCODER
        worker.ranks = parse_ranks(info)
        self.table.on_layout(worker, read_layout(info))
        if not watch.retired:
            self.on_info(worker, info)
        return ""

    async def _read_bootstrap(self, watch: "_Watch", info: Info) -> str:
        """A given port (also mapped) wins if a server answers there. Checked once per process."""
        worker = watch.worker
        host, port = parse_bootstrap(info, url_host=worker.url_host)
        given = worker.bootstrap.given_port
        if given is None:
            self.table.on_bootstrap(worker, host, port)
            return NO_BOOTSTRAP if port is None else ""
        claim = (worker.process.incarnation, worker.bootstrap.host, port)
        if given == port or claim == watch.proven:
            return ""
        url = f"{url_of(worker.bootstrap.host, given)}/health"
        answer = await call_worker(self.session, "GET", url, {}, timeout_s=self.config.health_check_timeout_s)
        if is_bootstrap_server(answer.status, answer.body):
            watch.proven = claim
            return ""
        if port is None:
            return f"{NO_BOOTSTRAP}; the given bootstrap port, {given}, is no bootstrap server's"
        return (
            f"its bootstrap port was given as {given}, where no bootstrap server answers; it says {port}: leave the port "
            f"out (--prefill, bootstrap_port, the pod's annotation), or give {port}"
        )

    def _read_role(self, worker: Worker, info: Info) -> str:
        """The role may switch. A server without a role in a pair would ignore its peer, and compute
        whole requests.
        """
        mode = parse_mode(info)
        if worker.role in PAIR and worker.runtime_type == VLLM:
            return NO_PAIR
        if worker.role in PAIR and mode is None:
            return NO_HALF
        role = worker.role if mode is None else _ROLES.get(mode)
        if role is worker.role:
            return ""
        if role not in PAIR or worker.role not in PAIR:
            return f"runs with --disaggregation-mode {mode}, but was given as one of role {worker.role}"
        log.warning(
            "worker %s was taken for a %s worker, and says that it is a %s worker", worker.url, worker.role, role
        )
        self.table.on_role(worker, role)
        return ""

    async def _read_models(self, worker: Worker, info: object) -> str:
        """A server without report is no worker."""
        listed = None
        if not isinstance(info, dict) or has_adapters(info) or runtime_of(info, None) == VLLM:
            listed, error = await self._prober.first_json(worker, _MODEL_PATHS)
            if error:
                return error
        if not isinstance(info, dict) and not reports_models(listed):
            model_info, error = await self._prober.first_json(worker, _MODEL_INFO_PATHS)
            if error or not isinstance(model_info, dict):
                return error or NO_WORKER
        worker.runtime_type = runtime_of(info, listed)
        self.table.on_models(worker, parse_models(info, listed), parse_event_names(info, listed))
        return ""


class _Watch:
    def __init__(self, worker: Worker, *, begin_s: float) -> None:
        self.worker = worker
        self.begin_s = begin_s
        self.heartbeats: Heartbeats | None = None
        self.task: asyncio.Task[None] | None = None
        self.wake = asyncio.Event()
        self.checked_s = 0.0  # end of the last check
        self.checked = asyncio.Event()
        # reported process, host and port when the given port was verified
        self.proven: tuple[str, str, int | None] | None = None
        self.retired = False
        self.load_due_s = 0.0
        self.info_due_s = 0.0
        self._is_placed = False

    @property
    def is_fine(self) -> bool:
        return self.heartbeats is not None and self.heartbeats.fine

    @property
    def is_late(self) -> bool:
        return self.heartbeats is not None and self.heartbeats.is_late

    def next_s(self, interval_s: float) -> float:
        """Loop time, for an idle worker of its `/server_info`."""
        due_s = loop_time_s() + self.next_wait_s(interval_s)
        return max(due_s, self.info_due_s) if self.heartbeats is not None and self.heartbeats.rests else due_s

    def next_wait_s(self, interval_s: float) -> float:
        """First checks are spread over the interval."""
        if self._is_placed:
            return interval_s
        self._is_placed = True
        return interval_s * (self.worker.worker_id * GOLDEN % 1 or 1.0)
