"""Several processes that form one router (`--workers N`).

parent    holds the port (SO_REUSEPORT: the kernel distributes connections), restarts
          processes, forwards signals
process   a whole router; load in shared memory (router/pool/shared_load.py); pool changes and
          counts over unix sockets (fleet.py)
"""

import asyncio
import hmac
import logging
import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from router.config import RouterConfig
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from service.flags import ConfigError
from service.http.listening import TIMEOUT_S, UnixPeers, open_shared_ports
from service.http.request import HttpRequest
from service.process.files import socket_folder
from service.process.stop_signals import DRAIN, END, hangup_ends

log = logging.getLogger(__name__)

READY_S = 60.0
RESTART_PAUSE_S = 1.0  # between two starts, so that a process that dies at once does not occupy a core

Target = Callable[["ProcessSlot", RouterConfig], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSlot:
    """`key` authenticates peers."""

    row: int
    num_rows: int
    folder: Path
    key: str

    @property
    def load_file(self) -> Path:
        return self.folder / "load"

    @property
    def ready_file(self) -> Path:
        return self.folder / f"{self.row}.ready"

    def socket(self, row: int) -> Path:
        return self.folder / f"{row}.sock"

    @property
    def peers(self) -> tuple[Path, ...]:
        return tuple(self.socket(row) for row in range(self.num_rows) if row != self.row)


def run_fleet(config: RouterConfig, serve: Target, *, on_ready: Callable[[str], None]) -> None:
    """Run `config.workers` processes until a signal ends all. `on_ready(url)` when all listen."""
    shared = tempfile.TemporaryDirectory(prefix="tandem-router-", dir=socket_folder(), ignore_cleanup_errors=True)
    with open_shared_ports(config.host, config.port, count=1) as (port,), shared as name:
        key, folder = secrets.token_hex(16), Path(name)
        config = replace(config, port=port.port, ready_file=None)
        slots = [ProcessSlot(row=i, num_rows=config.workers, folder=folder, key=key) for i in range(config.workers)]
        fleet = _Fleet([_Member(slot, config, serve) for slot in slots])
        with fleet.signals():
            fleet.start()
            on_ready(port.url)
            fleet.watch()


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, DRAIN, END)


def signal_for(number: int, *, had_sigterm: bool) -> signal.Signals:
    """The signal to forward. A second SIGTERM becomes another, as the kernel merges equal ones."""
    if number in (signal.SIGHUP, DRAIN):
        return signal.Signals(number)
    return DRAIN if number == signal.SIGTERM and not had_sigterm else END


def obey_parent(*, on_drain: Callable[[], None], on_end: Callable[[], None]) -> None:
    """End only by the parent's signals or death."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    loop.add_signal_handler(DRAIN, on_drain)
    loop.add_signal_handler(END, on_end)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def on_orphaned() -> None:
        loop.remove_reader(parent.sentinel)
        log.warning("the router's parent process is gone: this one ends too")
        on_end()

    loop.add_reader(parent.sentinel, on_orphaned)


class _Member:
    def __init__(self, slot: ProcessSlot, config: RouterConfig, serve: Target) -> None:
        self.slot = slot
        self._config = config
        self._serve = serve
        self._started_s = 0.0
        self.process: BaseProcess = self._make()

    def _make(self) -> BaseProcess:
        context = multiprocessing.get_context("spawn")  # never fork: the parent may have threads
        return context.Process(target=self._serve, args=(self.slot, self._config), name=f"router-{self.slot.row}")

    def start(self) -> None:
        self._started_s = time.monotonic()
        self.slot.ready_file.unlink(missing_ok=True)
        self.slot.socket(self.slot.row).unlink(missing_ok=True)
        self.process.start()

    def start_again(self) -> None:
        time.sleep(max(0.0, self._started_s + RESTART_PAUSE_S - time.monotonic()))
        self.process = self._make()
        self.start()

    def send(self, number: int) -> None:
        if self.process.pid is not None and self.process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class _Fleet:
    def __init__(self, members: list[_Member]) -> None:
        self._members = members
        self._stopping = self._had_sigterm = False
        self._hangup_ends = hangup_ends()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """After a signal that ends processes none restarts; none survives the context."""
        before = {number: signal.signal(number, self._on_signal) for number in _HANDLED}
        try:
            yield
        finally:
            for member in self._members:
                member.send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP and self._hangup_ends():
            number = signal.SIGINT
        sent = signal_for(number, had_sigterm=self._had_sigterm)
        self._had_sigterm = self._had_sigterm or number == signal.SIGTERM
        self._stopping = self._stopping or number != signal.SIGHUP
        for member in self._members:
            member.send(sent)

    def start(self) -> None:
        for member in self._members:
            member.start()
        deadline_s = time.monotonic() + READY_S
        for member in self._members:
            while not member.slot.ready_file.exists() and not self._stopping:
                if member.process.exitcode is not None or time.monotonic() > deadline_s:
                    raise ConfigError(f"--workers: process {member.slot.row} did not start; its log says why")
                time.sleep(0.02)

    def watch(self) -> None:
        while running := [member for member in self._members if member.process.exitcode is None]:
            wait([member.process.sentinel for member in running], timeout=1.0)
            for member in self._members:
                if member.process.exitcode is not None and not self._stopping:
                    log.error("router process %d died (status %d)", member.slot.row, member.process.exitcode)
                    member.start_again()


KEY_HEADER = "X-Tandem-Sibling"
SUMMED_GAUGES = (
    *("_inflight_requests", "_inflight_tokens", "_waiting_requests", "_assigned", "_active"),
    *("_stored_responses", "_stored_response_bytes"),
)


class PeerProcesses(UnixPeers):
    """Pool changes, and counts for /metrics.

    Over unix sockets with a shared key; requests of peers are not forwarded again.
    """

    def __init__(self, slot: ProcessSlot | None) -> None:
        self._slot = slot
        super().__init__(() if slot is None else slot.peers, headers={} if slot is None else {KEY_HEADER: slot.key})

    def is_peer(self, request: HttpRequest) -> bool:
        key = request.headers.get(KEY_HEADER, "")
        if self._slot is None or not key:
            return False
        return hmac.compare_digest(key.encode(errors="surrogateescape"), self._slot.key.encode())

    async def forward(self, request: HttpRequest, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> None:
        """A starting peer catches up later."""
        if self.num and not self.is_peer(request):
            await self.request(request.method, request.path, body, timeout_s=timeout_s)

    async def catch_up(self, table: WorkerTable, *, now_s: float) -> None:
        """Copy a peer's pool, which may have changed since the start."""
        for body in (await self.request("GET", "/workers"))[:1]:
            known = {w["url"]: w for w in msgspec.json.decode(body)["workers"] if not w["discovered"]}
            for worker in table.workers():
                if worker.url not in known:
                    table.remove(worker.url)
            for url, view in known.items():
                if all(worker.url != url for worker in table.workers()):
                    port = view["bootstrap_port"]
                    table.add(url, role=Role(view["role"]), bootstrap_port=port, now_s=now_s)
