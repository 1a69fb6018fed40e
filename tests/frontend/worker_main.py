"""`run_frontend` for tests: in a thread of the test's process, or as a process of its own where a test sends signals."""

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.frontend.role_switch import RoleSwitch
from engine.frontend.server import WorkerDied, run_frontend
from engine.frontend.spec import FrontendSpec, open_worker_gate
from engine.ipc import IpcPaths
from service.flags import ConfigError
from service.http.listening import ListeningPort, open_port
from service.process.stop_signals import StopSignals
from service.security.browser import AllowedAddresses

LOOK_S = 0.02


async def serve(args: dict[str, Any], port: ListeningPort, signals: StopSignals) -> None:
    """Writes to `folder`: `url` when it has the port, `ready`, and `next` with the role of a switch; ends when `dead` appears."""
    folder, server = Path(args["folder"]), ServerConfig(**args["server"])
    (folder / "url.tmp").write_text(port.url)
    (folder / "url.tmp").rename(folder / "url")
    gate = open_worker_gate(server)
    with signals.caught(on_hangup=lambda: gate.reload(time.monotonic())):
        spec = FrontendSpec(
            server=server,
            engine=EngineConfig(**args["engine"]),
            mode=args["mode"],
            extra_info={"version": "test"},
            bootstrap_allowlist=allowlist(args.get("allowed")),
            health_timeout_s=0.5,
            warms_up=args["warms_up"],
            secret=args["secret"].encode() or None,
            switch=None if args["mode"] == "null" else RoleSwitch(check=lambda to: None),
        )
        to = await run_frontend(
            spec,
            ipc=IpcPaths(args["ipc_dir"]),
            processes=_Processes(folder),
            signals=signals,
            gate=gate,
            port=port,
            on_ready=(folder / "ready").touch,
        )
    if to is not None:
        (folder / "next").write_text(to.role)


class _Processes:
    """The scheduler stand-in is a thread of the test; it is dead where the test makes a file, of which no news comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def dead(self) -> str | None:
        return "the scheduler process died" if (self._folder / "dead").exists() else None

    @contextmanager
    def watched(self, on_end: Callable[[], None]) -> Iterator[None]:
        async def look() -> None:
            while self.dead() is None:
                await asyncio.sleep(LOOK_S)
            on_end()

        looking = asyncio.get_running_loop().create_task(look())
        try:
            yield
        finally:
            looking.cancel()

    def end(self) -> None: ...


class WorkerThread:
    """A worker in a thread, with the methods of a `Popen` that tests use. `error`: what it raised."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.error: Exception | None = None
        self._args = args
        self._signals = StopSignals()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="worker")
        self._thread.start()

    def send_signal(self, number: int) -> None:
        """As if the process got it; one that is just ending does not."""
        assert self._loop is not None
        handler = {signal.SIGTERM: self._signals.on_sigterm, signal.SIGINT: self._signals.on_sigint}[
            signal.Signals(number)
        ]
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(handler)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0 if self.error is None else 1

    def wait(self, timeout_s: float) -> int | None:
        self._thread.join(timeout_s)
        return self.poll()

    def _run(self) -> None:
        log = logging.FileHandler(Path(self._args["folder"]) / "log")
        logging.getLogger().addHandler(log)
        try:
            server = self._args["server"]
            with open_port(server.get("host", "127.0.0.1"), server["port"]) as port:
                uvloop.run(self._serve(port))
        except (ConfigError, WorkerDied) as error:
            self.error = error
        finally:
            logging.getLogger().removeHandler(log)
            log.close()

    async def _serve(self, port: ListeningPort) -> None:
        self._loop = asyncio.get_running_loop()
        await serve(self._args, port, self._signals)


def main(args: dict[str, Any]) -> int:
    try:
        with open_port("127.0.0.1", 0) as port:
            uvloop.run(serve(args, port, StopSignals()))
    except (ConfigError, WorkerDied) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def allowlist(allowed: list[str] | None) -> BootstrapAllowlist:
    """`allowed`: bootstrap servers that requests may name; None: this worker dials none."""
    if allowed is None:
        return BootstrapAllowlist()
    return BootstrapAllowlist(AllowedAddresses(allowed, loopback=False, flag="--disaggregation-bootstrap-allowed"))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
