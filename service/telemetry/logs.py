"""Log lines as text or JSON, with the request id of the task or `extra=about(...)`.

{"time": "2026-11-21T07:00:00.123Z", "level": "INFO", "process": "prefill scheduler", ...
 "request_id": "...", "rid": "...", "room": 7, "error": "Traceback ..."}
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from service.telemetry.context import CURRENT

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
