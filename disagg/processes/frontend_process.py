"""Further frontend process (--tokenizer-worker-num), ended by the main one or with it.

Exit status: 0; OPERATING_ERROR with a line on stderr; else a bug.
"""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from disagg.config import OtherFrontendSpec, frontend_spec, role_name
from disagg.processes.children import OPERATING_ERROR
from disagg.processes.exposure import make_allowlist
from engine.frontend.other import run_other_frontend
from engine.frontend.spec import open_worker_gate
from engine.ipc import IpcPaths
from service.flags import ConfigError
from service.http.listening import ListeningPort
from service.process.stop_signals import END
from service.telemetry.context import set_up_logging


async def run(spec: OtherFrontendSpec, *, row: int, port: ListeningPort) -> None:
    """Raises ConfigError."""
    gate, ended, loop = open_worker_gate(spec.server), asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(END, ended.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: gate.reload(time.monotonic()))
    allowlist = make_allowlist(spec.server, spec.disagg, control_host=spec.control_host)
    await run_other_frontend(
        frontend_spec(spec.engine, spec.server, spec.disagg, allowlist),
        row=row,
        ipc=IpcPaths(spec.ipc_dir),
        gate=gate,
        port=port,
        ended=ended,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m disagg.processes.frontend_process", description="a frontend of one worker"
    )
    parser.add_argument("--spec", required=True, help="file: OtherFrontendSpec as JSON")
    parser.add_argument("--row", type=int, required=True, help="its number; the main frontend has 0")
    parser.add_argument("--sockets", type=int, nargs="+", required=True, help="inherited sockets, bound to the port")
    args = parser.parse_args(argv)
    spec = msgspec.json.decode(Path(args.spec).read_bytes(), type=OtherFrontendSpec)
    name = f"{role_name(spec.disagg)} frontend {args.row}"
    set_up_logging(level=spec.server.log_level, format=spec.server.log_format, process=name)
    port = ListeningPort.inherited(spec.server.host, args.sockets)
    try:
        uvloop.run(run(spec, row=args.row, port=port))
    except ConfigError as error:
        print(f"tandem serve: error: {error}", file=sys.stderr, flush=True)
        return OPERATING_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
