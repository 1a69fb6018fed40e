"""Keyword arguments as flags: `tp_size=2` is `--tp-size=2`, other servers' names included."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

from deploy.commands.serve import ServeFlags, build_parser, flags_in
from deploy.flags import Parser
from deploy.foreign.worker import WORKER
from disagg.config import DisaggConfig
from engine.config import ServerConfig
from service.flags import ConfigError

# What an HTTP server alone reads.
_OF_SERVERS = (
    *("host", "port", "api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "allow_insecure"),
    *("allowed_hosts", "allowed_origins", "sse_keep_alive_interval_s", "max_stored_responses", "ready_file"),
    *("tokenizer_worker_num", "drain_timeout_s", "enable_trace", "otlp_traces_endpoint", "enable_early_rejection"),
)
QUIET = "--log-level=warning"  # unless given: a program prints its own lines
_OPTION = re.compile(r"(?<!tandem up )(?<!tandem serve )(?<!tandem router )--([a-z][a-z0-9-]*)")


class _FlagParser(Parser):
    """Raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse_flags(model: str, flags: Mapping[str, Any]) -> ServeFlags:
    """Flags of a unified worker. Raises ConfigError, which names the argument."""
    parser = build_parser(_FlagParser, prog="LLM")
    known = parser.options
    with python_names():
        found = flags_in(parser.parse_strict([QUIET, *argv_of(model, flags, known=known)]))
        _check_served(found)
    return found


def argv_of(model: str, flags: Mapping[str, Any], *, known: Collection[str]) -> list[str]:
    """A command line. `known`: the command's options. Raises ConfigError."""
    given = dict(flags)
    if model:
        if {"model_path", "model"} & given.keys():
            raise ConfigError("model: is given twice; leave out model_path")
        given["model_path"] = model
    return [word for name, value in given.items() for word in _words(name, value, known)]


@contextmanager
def python_names() -> Iterator[None]:
    """Raise ConfigErrors with arguments in place of options."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_python(str(error))) from None


def in_python(text: str) -> str:
    """Name arguments in place of options: `--tp-size` is `tp_size`."""
    return _OPTION.sub(lambda match: match[1].replace("-", "_"), text)


def _words(name: str, value: Any, known: Collection[str]) -> list[str]:
    option = "--" + name.replace("_", "-")
    if value is None:
        return []
    if value is False:
        negative = "--no-" + option.removeprefix("--")
        if negative in known or negative in WORKER.flags:
            return [negative]
        return [] if option in known or option in WORKER.flags else [option]  # the parser names an unknown one
    if value is True:
        return [option]
    if isinstance(value, Mapping):
        return (
            [option, *(f"{key}={item}" for key, item in value.items())]
            if name == "lora_paths"
            else [f"{option}={json.dumps(value)}"]
        )
    if isinstance(value, list | tuple):
        return [option, *map(str, value)] if value else []
    return [f"{option}={str(value).removeprefix('torch.')}"]  # dtypes


def _check_served(found: ServeFlags) -> None:
    """Raises ConfigError for a flag that only servers or pairs have."""
    for config in (ServerConfig, DisaggConfig):
        given = found.server if config is ServerConfig else found.disagg
        for one in fields(config):
            served = config is ServerConfig and one.name not in _OF_SERVERS
            if served or getattr(given, one.name) == one.default:
                continue
            remedy = "start a server with it: tandem serve, or Cluster(...)"
            what = "an LLM has no HTTP server" if config is ServerConfig else "an LLM is one worker for both phases"
            raise ConfigError(f"{one.name}: {what}; leave it out, or {remedy}")
    if found.engine.node_rank > 0:
        raise ConfigError("--node-rank: an LLM is the first machine; start the others with tandem serve --node-rank N")
