"""`tandem serve`: a worker by its flags."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from deploy.flags import ENGINE_TOPICS, Parser, add_flags, config_from
from deploy.foreign.worker import WORKER
from disagg.config import DisaggConfig
from engine.config import EngineConfig, ServerConfig
from service.extras import require
from transfer_backends.engines.wheels import extras_of


def run(argv: Sequence[str]) -> int:
    engine, server, disagg = flags_in(build_parser().parse_strict(argv))
    require("engine", *(extras_of(disagg.disaggregation_transfer_backend) if disagg.has_peers else ()))
    from disagg.processes.worker import run_worker  # not before the flags are right: it brings the engine along

    return run_worker(engine=engine, server=server, disagg=disagg)


# Groups of help in their order, and what `--help` shows.
TOPICS = ("model", "server", "keys", "disaggregation", *ENGINE_TOPICS)
COMMON = (
    *("model_path", "served_model_name", "dtype", "quantization"),
    *("host", "port", "api_key"),
    *("disaggregation_mode", "disaggregation_transfer_backend"),
    *("tp_size", "dp_size"),
    *("context_length", "max_total_tokens", "mem_fraction_static"),
    *("max_running_requests", "chunked_prefill_size"),
    *("speculative_algorithm", "lora_paths", "tool_call_parser", "reasoning_parser"),
)


class ServeFlags(NamedTuple):
    engine: EngineConfig
    server: ServerConfig
    disagg: DisaggConfig


def flags_in(args: argparse.Namespace) -> ServeFlags:
    """Raises ConfigError."""
    return ServeFlags(
        engine=config_from(args, EngineConfig),
        server=config_from(args, ServerConfig),
        disagg=config_from(args, DisaggConfig),
    )


def build_parser(parser_class: type[Parser] = Parser, *, prog: str = "tandem serve") -> Parser:
    parser = parser_class(
        prog=prog,
        foreign=WORKER,
        topics=TOPICS,
        common=COMMON,
        model=("model_path", "the model, as --model-path"),
        description="Run one worker: HTTP server, scheduler and model. Alone (null) it is a complete server.",
    )
    add_flags(parser, EngineConfig, title="model")
    add_flags(parser, ServerConfig, title="server")
    add_flags(parser, DisaggConfig, title="disaggregation")
    return parser
