"""Runs a bootstrap server, in a thread of a prefill worker or as a process."""

import asyncio
import logging
import threading
from contextlib import ExitStack

from bootstrap_server.app import make_handle
from bootstrap_server.config import BootstrapConfig
from bootstrap_server.protocol import MAX_BODY_BYTES
from bootstrap_server.registry import Registry
from service.http.listening import ListeningPort, open_port
from service.http.routes import Handler
from service.http.server import RequestLimits, serving
from service.process.start import allow_many_files
from service.process.stop_signals import StopSignals

START_S = 10.0
CLOSE_S = 1.0  # for answers in progress at the end
LIMITS = RequestLimits(max_body_bytes=MAX_BODY_BYTES)
log = logging.getLogger(__name__)


class BootstrapServer:
    def __init__(
        self, config: BootstrapConfig, *, shared: bool, secret: bytes | None = None, port_flag: str = "--port"
    ) -> None:
        self.registry = Registry(config, shared=shared)
        self.port = 0
        self._config = config
        self._port_flag = port_flag
        self._handle = make_handle(self.registry, config=config, secret=secret)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._held = ExitStack()

    def start(self) -> None:
        """Return once it listens. Raises ConfigError."""
        port = self._held.enter_context(open_port(self._config.host, self._config.port, flag=self._port_flag))
        self.port = port.port
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(port)), name="bootstrap-server", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError(f"the bootstrap server did not start within {START_S:g} s")

    def close(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S)
        self._held.close()

    async def _serve(self, port: ListeningPort) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(port, self._handle, LIMITS, shutdown_timeout_s=CLOSE_S):
            self._ready.set()
            await self._stop.wait()


def run_bootstrap_server(config: BootstrapConfig, *, secret: bytes | None = None) -> None:
    """Run a shared server until a signal. Raises ConfigError."""
    allow_many_files()
    handle = make_handle(Registry(config, shared=True), config=config, secret=secret)
    with open_port(config.host, config.port) as port:
        asyncio.run(_serve_alone(port, handle))


async def _serve_alone(port: ListeningPort, handle: Handler) -> None:
    signals = StopSignals()
    with signals.caught():
        async with serving(port, handle, LIMITS, shutdown_timeout_s=CLOSE_S):
            log.info("bootstrap server listens on %s:%d", port.host, port.port)
            await signals.requested.wait()
