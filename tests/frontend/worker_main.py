"""Process entry of the frontend's tests: run_frontend with the arguments given as JSON; writes its address to a file."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstrap_allowlist import BootstrapAllowlist
from engine.frontend.listening import Listener, open_listener
from engine.frontend.role_switch import RoleSwitch
from engine.frontend.server import FrontendAddress, WorkerDied, open_worker_gate, run_frontend
from engine.ipc import IpcPaths
from service.flags import ConfigError
from service.process.stop_signals import StopSignals
from service.security.addresses import AllowedAddresses


def main(args: dict[str, Any]) -> int:
    folder = Path(args["folder"])

    def listening(address: FrontendAddress) -> None:
        (folder / "listening.tmp").write_text(address.url)
        (folder / "listening.tmp").rename(folder / "listening")

    server = ServerConfig(**args["server"])

    async def serve(listener: Listener) -> None:
        signals, gate = StopSignals(), open_worker_gate(server)
        with signals.caught(on_hangup=lambda: gate.reload(time.monotonic())):
            to = await run_frontend(
                server=server,
                signals=signals,
                gate=gate,
                listener=listener,
                engine=EngineConfig(**args["engine"]),
                ipc=IpcPaths(args["ipc_dir"]),
                mode=args["mode"],
                extra_info={"version": "test"},
                bootstrap_allowlist=allowlist(args.get("allowed")),
                on_listening=listening,
                on_ready=lambda address: (folder / "ready").touch(),
                children_alive=lambda: "the scheduler process died" if (folder / "dead").exists() else None,
                drain_s=args["drain_s"],
                health_timeout_s=0.5,
                switch=None if args["mode"] == "null" else RoleSwitch(check=lambda to: None),
            )
        if to is not None:
            (folder / "next").write_text(to.role)

    try:
        with open_listener(server.host, server.port) as listener:
            uvloop.run(serve(listener))
    except (ConfigError, WorkerDied) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def allowlist(allowed: list[str] | None) -> BootstrapAllowlist | None:
    """`allowed`: bootstrap servers that requests may name; None: this worker dials none."""
    if allowed is None:
        return None
    return BootstrapAllowlist(AllowedAddresses(allowed, loopback=False, flag="--disaggregation-bootstrap-allowed"))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
