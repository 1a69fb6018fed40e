"""`tandem serve`: a worker by its flags."""

from collections.abc import Sequence

from deploy.flags import Parser, add_flags, config_from
from deploy.foreign.worker import WORKER
from disagg.config import DisaggConfig
from engine.config import EngineConfig, ServerConfig


def run(argv: Sequence[str]) -> int:
    args = build_parser().parse_strict(argv)
    engine = config_from(args, EngineConfig)
    server = config_from(args, ServerConfig)
    disagg = config_from(args, DisaggConfig)
    from disagg.processes.worker import run_worker  # not before the flags are right: it brings the engine along

    return run_worker(engine=engine, server=server, disagg=disagg)


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem serve",
        foreign=WORKER,
        description="Run one worker: HTTP server, scheduler and model. Alone (null) it is a complete server.",
    )
    add_flags(parser, ServerConfig, title="HTTP server")
    add_flags(parser, EngineConfig, title="model, memory and scheduling")
    add_flags(parser, DisaggConfig, title="disaggregation")
    return parser
