"""Id and trace of the current task's request.

W3C `traceparent` (https://www.w3.org/TR/trace-context/): 00-TRACE(32 hex)-SPAN(16 hex)-FLAGS.
"""

import json
import logging
import re
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

MAX_REQUEST_ID_CHARS = 256
_HEADER = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span. `sampled`: the root requests recording."""

    trace_id: int
    span_id: int
    sampled: bool = True

    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_traceparent(header: str) -> TraceParent | None:
    """Parse the header. If invalid, the trace starts here (standard)."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or header.startswith("ff"):
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    return TraceParent(trace_id, span_id, bool(int(match[3], 16) & _SAMPLED)) if trace_id and span_id else None


def request_id_of(header: str) -> str:
    """Return the id if short, printable ASCII, else ""."""
    return header if len(header) <= MAX_REQUEST_ID_CHARS and header.isascii() and header.isprintable() else ""


class TraceContext(msgspec.Struct, frozen=True):
    """The current request. `operation` is gen_ai.operation.name, empty if not a generation."""

    request_id: str
    operation: str = ""
    traceparent: str = ""


NO_TRACE = TraceContext("")
CURRENT: ContextVar[TraceContext] = ContextVar("request", default=NO_TRACE)

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/encode": "embeddings",
    "/v1/score": "text_completion",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "rerank",
    "/classify": "classify",
    "/v1/classify": "classify",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
}


# ---- log lines

FORMATS = ("text", "json")
_ABOUT = "about"
_OURS = "tandem"  # marks the handler of `set_up_logging`


def set_up_logging(*, level: str, format: str, process: str) -> None:
    """Log to stderr; a second call replaces the first."""
    handler = logging.StreamHandler()
    if format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s"))
    for before in [h for h in logging.root.handlers if getattr(h, _OURS, False)]:
        logging.root.removeHandler(before)
    setattr(handler, _OURS, True)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # else junk fills logs with tracebacks


def about(**fields: str | int | float) -> dict[str, dict[str, str | int | float]]:
    return {_ABOUT: {name: value for name, value in fields.items() if value not in ("", None)}}


class JsonFormatter(logging.Formatter):
    """Log lines as text or JSON, with the request id of the task or `extra=about(...)`.

    {"time": "2026-11-21T07:00:00.123Z", "level": "INFO", "process": "prefill scheduler", ...
     "request_id": "...", "rid": "...", "room": 7, "error": "Traceback ..."}
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := CURRENT.get().request_id:
            line["request_id"] = request_id
        line |= getattr(record, _ABOUT, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
