"""The `tandem` command: subcommands, and errors on one line.

Status 0: success, 1: operating error, 2: bad command line. Subcommands are imported on use: router
and bootstrap server never import torch.
"""

import errno
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import NamedTuple

from service.extras import missing_module


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "up": Command("deploy.commands.up", "start a whole cluster on this machine: router, prefill and decode workers"),
    "chat": Command("deploy.commands.chat", "talk to a model in the terminal; --up starts a cluster for it"),
    "serve": Command("deploy.commands.serve", "run one worker (--disaggregation-mode null|prefill|decode|encode)"),
    "router": Command("deploy.commands.router", "run the router in front of workers"),
    "bootstrap": Command("deploy.commands.bootstrap", "run a bootstrap server on its own"),
    "trace": Command("deploy.commands.trace", "write where the time of requests went, for Perfetto"),
    "bench": Command("deploy.commands.bench", "put load on any OpenAI-compatible server and report latencies"),
    "plan": Command("planner.command", "find the smallest cluster for a load, by simulation"),
}

# Errors that the operator can fix, by class name, as their packages are not imported here.
OPERATING_ERRORS = frozenset({"ConfigError", "BackendUnavailable"})
OPERATING_ERRNOS = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.ENOENT, errno.ENOSPC})


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"tandem {metadata.version('tandem-serve')}")
        return 0
    if args[0] not in COMMANDS:
        print(
            f"tandem: unknown command {args[0]!r}; one of: {', '.join(COMMANDS)} (see tandem --help)", file=sys.stderr
        )
        return 2
    return _run(args[0], args[1:])


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tandem COMMAND [FLAGS]    (tandem COMMAND --help lists the flags)",
            "",
            "Serve large language models with prefill and decode in separate processes.",
            "",
            "commands:",
            *lines,
            "",
            "  -V, --version  print the version",
        ]
    )


def operating_error(error: BaseException) -> str | None:
    """A line for an error the operator can fix, None for a bug."""
    if any(cls.__name__ in OPERATING_ERRORS for cls in type(error).__mro__):
        return " ".join(str(error).split())
    if isinstance(error, ImportError):
        return missing_module(error)
    if not isinstance(error, OSError) or error.errno not in OPERATING_ERRNOS:
        return None
    if error.errno == errno.EADDRINUSE:
        return f"{error.strerror or error}: another process listens there; give a port that is free, or 0"
    return str(error)


def _run(name: str, args: list[str]) -> int:
    try:
        module = importlib.import_module(COMMANDS[name].module)
        return int(module.run(args) or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        line = operating_error(error)
        if line is None:
            raise
        print(f"tandem {name}: error: {line}", file=sys.stderr)
        return 1
