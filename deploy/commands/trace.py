"""`tandem trace`: the times of requests, as a file for https://ui.perfetto.dev. Needs no collector.

Router and workers retain their last requests; the router collects its workers' records.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import requests

from deploy.flags import Parser, add_flags, config_from
from service.flags import ConfigError, FlagSet, flag
from service.telemetry.context import Record, Records, TracesQuery, query_error
from service.telemetry.exporters import trace_file

TIMEOUT_S = 30.0
SHOWN = 20  # requests listed on the terminal


@dataclass(frozen=True, kw_only=True)
class TraceConfig(FlagSet):
    last: int | None = flag(None, "number of requests, the last that ended; default: 10 if no ID is given")
    url: str = flag("http://127.0.0.1:8000", "URL of the router, or of a worker that runs alone")
    admin_api_key: str | None = flag(None, "admin API key of that server")
    output: str = flag("trace.json", "file to write")


def run(argv: Sequence[str]) -> int:
    """Raises ConfigError."""
    args = build_parser().parse_strict(argv)
    config = config_from(args, TraceConfig)
    query = query_of(args.ids, config.last)
    records = fetch(config.url, query, api_key=config.admin_api_key)
    missing = sorted(set(query.ids or ()) - {record.request_id for record in records})
    if not records or missing:
        which = ", ".join(missing) or "any request"
        raise ConfigError(f"{config.url} knows nothing of {which}; it keeps its last requests only")
    Path(config.output).write_text(json.dumps(trace_file(records)))
    print(summary(records, config.output))
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="tandem trace", description=__doc__.split("\n\n")[0], usage="%(prog)s [ID ...] [FLAGS]")
    parser.add_argument("ids", nargs="*", metavar="ID", help="request ids (the X-Request-Id of an answer)")
    add_flags(parser, TraceConfig, title="trace")
    return parser


def query_of(ids: Sequence[str], last: int | None) -> TracesQuery:
    """Raises ConfigError."""
    if ids and last is not None:
        raise ConfigError("--last: give either request ids or --last")
    query = TracesQuery(ids=list(ids)) if ids else TracesQuery(last=10 if last is None else last)
    if (wrong := query_error(query)) is not None:
        raise ConfigError(f"--{wrong}")
    return query


def fetch(url: str, query: TracesQuery, *, api_key: str | None) -> list[Record]:
    """Raises ConfigError."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    try:
        with requests.Session() as session:
            session.trust_env = False  # never use a proxy for cluster addresses
            data = msgspec.json.encode(query)
            reply = session.post(f"{url.rstrip('/')}/traces", data=data, headers=headers, timeout=TIMEOUT_S)
        if reply.ok:
            return msgspec.json.decode(reply.content, type=Records).records
    except requests.ConnectionError:
        raise ConfigError(f"--url {url}: no answer; is the server up, and is this its address?") from None
    except (requests.RequestException, ValueError) as error:
        raise ConfigError(f"--url {url}: {error}") from None
    remedy = "; give --admin-api-key" if reply.status_code in (401, 403) else ""
    raise ConfigError(f"--url {url}: HTTP {reply.status_code}: {reply.text[:2000]}{remedy}")


def summary(records: Sequence[Record], output: str) -> str:
    lines = [_line(records, name) for name in dict.fromkeys(record.request_id for record in records)]
    return "\n".join([*lines[-SHOWN:], f"{len(lines)} requests: {output} (open it at https://ui.perfetto.dev)"])


def _line(records: Sequence[Record], request_id: str) -> str:
    mine = [record for record in records if record.request_id == request_id]
    whole_s = max(r.end_s for r in mine) - min(r.start_s for r in mine)
    stages = ", ".join(
        f"{r.process} {span.name} {1e3 * (span.end_s - span.start_s):.1f}"
        for r in mine
        if r.process != "router"
        for span in r.spans
        if span.name != "chunk"
    )
    return f"{request_id}: {1e3 * whole_s:.1f} ms ({stages or 'no worker reports it'})"
