"""Parsers of workers' reports: load (several dialects), health, bootstrap, role, events. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from router.pool.worker import LoadReport, PrefixHolder, RankSizes, SharedStore
from service.http.errors import DRAINING, REQUEST_ERRORS, decode_or_none, object_of
from service.http.image_encoders import ImageEncoder
from service.kv_events import VERSION

MAX_INCARNATION_CHARS = 128
MAX_BUSY_S = 1e9
MAX_PIDS = 64
MAX_TEXTS = 1024
MAX_URL_CHARS = 1024
Info = Mapping[str, Any]  # a `/server_info`, whose values are not checked; empty if it is no object
_USED = ("num_used_tokens", "num_tokens")
# Stages in order, and their names in SGLang's /v1/loads, on top or inside `disaggregation`.
_STAGE_NAMES = {
    "bootstrap": "prefill_bootstrap_queue_reqs",
    "waiting": "num_waiting_reqs",
    "inflight": "prefill_inflight_queue_reqs",
    "prealloc": "decode_prealloc_queue_reqs",
    "transfer": "decode_transfer_queue_reqs",
    "running": "num_running_reqs",
    "retracted": "decode_retracted_queue_reqs",  # waiting for memory
}


def parse_load(answer: object) -> LoadReport | None:
    """Read `/get_load` or `/v1/loads`: an object, a list (summed), or {"loads": [...]}."""
    if isinstance(answer, dict) and isinstance(answer.get("loads"), list):
        answer = answer["loads"]
    rows = [row for row in (answer if isinstance(answer, list) else [answer]) if isinstance(row, dict)]
    if not any(key in row for row in rows for key in (*_USED, "num_waiting_reqs", "num_running_reqs", "num_reqs")):
        return None
    return LoadReport(
        running_reqs=_total(rows, "num_running_reqs", "num_reqs"),
        waiting_reqs=_total(rows, "num_waiting_reqs"),
        used_tokens=_total(rows, *_USED),
        waiting_tokens=_total(rows, "num_waiting_uncached_tokens"),
        capacity_tokens=_total(rows, "max_total_num_tokens"),
        stages=_stages(rows),
        prompt_tokens_total=_total(_parts(rows, "totals"), "prompt_tokens"),
        cached_tokens_total=_total(_parts(rows, "totals"), "cached_tokens"),
        output_tokens_total=_total(_parts(rows, "totals"), "generation_tokens"),
        kv_bytes_total=_total(_parts(rows, "totals"), "kv_transfer_bytes"),
        transfer_gb_s=_mean(_parts(rows, "disaggregation"), "kv_transfer_speed_gb_s"),
        transfer_ms=_mean(_parts(rows, "disaggregation"), "kv_transfer_latency_ms"),
        max_running_reqs=_total(rows, "max_running_requests"),
        pending_tokens=sum(_pending(row) for row in rows),
        busy_ms_total=_total(_parts(rows, "totals"), "busy_ms") // max(1, len(rows)),  # mean over ranks
        accept_length=_mean(_parts(rows, "speculative"), "accept_length"),
        store_gb_s=_mean(_parts(rows, "memory"), "storage_read_gb_s"),
        avoided_encoders=_texts(_parts(rows, "disaggregation"), "avoided_encoders"),
    )


def _stages(rows: list[dict[str, Any]]) -> dict[str, int]:
    found = [*rows, *_parts(rows, "disaggregation")]
    return {stage: _total(found, name) for stage, name in _STAGE_NAMES.items() if any(name in part for part in found)}


def _pending(row: dict[str, Any]) -> int:
    """Pending tokens, a share of capacity in SGLang's reports."""
    share = sum(_share(part.get("pending_prealloc_token_usage")) for part in _parts([row], "disaggregation"))
    return int(share * count_of(row.get("max_total_num_tokens")))


def _share(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 2**20 else 0.0


def _parts(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [part for row in rows if isinstance(part := row.get(name), dict)]


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    values = [float(v) for row in rows if isinstance(v := row.get(name), int | float) and 0 < v < 2**53]
    return sum(values) / len(values) if values else 0.0


def _texts(rows: list[dict[str, Any]], name: str) -> tuple[str, ...]:
    found = [text for row in rows if isinstance(texts := row.get(name), list) for text in texts[:MAX_TEXTS]]
    return tuple(text for text in found[:MAX_TEXTS] if isinstance(text, str))


def _total(rows: list[dict[str, Any]], *names: str) -> int:
    return sum(next((count_of(row[name]) for name in names if name in row), 0) for row in rows)


def count_of(value: object) -> int:
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**53 else 0


def parse_bootstrap(info: Info, *, url_host: str) -> tuple[str, int | None]:
    """In the worker (port None: default) unless `disaggregation_bootstrap_server` names another."""
    alone = info.get("disaggregation_bootstrap_server")
    if isinstance(alone, str) and ":" in alone:
        host, _, text = alone.rpartition(":")
        if (port := port_of(text)) is not None:
            return host.strip("[]"), port
    return url_host, _port(info.get("disaggregation_bootstrap_port"))


def is_bootstrap_server(status: int, body: bytes) -> bool:
    """Return whether /health is a bootstrap server's, ours or SGLang's."""
    return status == 200 and (body == b"OK" or "rooms" in object_of(body))


def reports_draining(body: bytes) -> bool:
    """Return whether a 503 is a draining worker's, by /health or error code."""
    answer = object_of(body)
    return DRAINING in (answer.get("status"), answer.get("code"), _error(answer).get("code"))


def reports_request_failed(body: bytes) -> bool:
    """Return whether a 500 is of a worker that serves others, by our codes."""
    answer = object_of(body)
    return _error(answer).get("code", answer.get("code")) in REQUEST_ERRORS


IS_DRAINING = "it is draining"


def why_draining(body: bytes) -> str:
    released = object_of(body).get("released")
    if isinstance(released, list) and released:
        return f"it has released its memory ({', '.join(map(str, released))}): POST /resume_memory_occupation"
    return IS_DRAINING


def parse_error(body: bytes) -> str | None:
    """An error's message (service/http/routes.py)."""
    answer = object_of(body)
    message = _error(answer).get("message", answer.get("error"))
    return message if isinstance(message, str) else None


def _error(answer: dict[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    return error if isinstance(error, dict) else {}


class HealthReport(NamedTuple):
    """`busy_s`: of the present step. `paused`: mode of a pause."""

    incarnation: str = ""
    busy_s: float | None = None
    paused: str = ""


def parse_health(body: bytes) -> HealthReport:
    health = object_of(body)
    incarnation, busy_s, paused = (health.get(name) for name in HealthReport._fields)
    return HealthReport(
        incarnation[:MAX_INCARNATION_CHARS] if isinstance(incarnation, str) else "",
        float(busy_s) if isinstance(busy_s, int | float) and 0 <= busy_s < MAX_BUSY_S else None,
        paused[:MAX_INCARNATION_CHARS] if isinstance(paused, str) else "",
    )


def parse_mode(info: Info) -> str | None:
    mode = info.get("disaggregation_mode")
    return mode if isinstance(mode, str) else None


def parse_ranks(info: Info) -> RankSizes:
    tp, pp, dp = (max(1, count_of(info.get(f"{name}_size"))) for name in ("tp", "pp", "dp"))
    listed = info.get("rank_pids")
    pids = [count_of(pid) for pid in listed[:MAX_PIDS]] if isinstance(listed, list) else []
    joint = info.get("enable_dp_attention") is True
    return RankSizes(tp=tp, pp=pp, dp=dp, pids=tuple(pid for pid in pids if pid), joint=joint)


@dataclass(frozen=True, slots=True)
class EventSource:
    """`named`: hashes are our keys."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    curve: bool
    named: bool = False


def parse_event_source(info: Info, *, url_host: str) -> EventSource | None:
    """Read `kv_events_config` (JSON, or text as in SGLang). Only its port is used: the router
    connects to no other host.
    """
    config = info.get("kv_events_config")
    if isinstance(config, str):
        config = decode_or_none(config.encode(errors="replace"))
    if not isinstance(config, dict) or config.get("publisher", "zmq") != "zmq":
        return None
    endpoint = _dialled(config.get("endpoint"), url_host)
    topic = config.get("topic", "")
    if endpoint is None or not isinstance(topic, str):
        return None
    return EventSource(
        endpoint,
        _dialled(config.get("replay_endpoint"), url_host),
        topic,
        curve=config.get("curve") is True,
        named=config.get("prefix_names") == VERSION,
    )


def parse_prefix_holder(info: Info) -> PrefixHolder | None:
    text = info.get("prefix_source")
    named = object_of(text.encode(errors="replace")) if isinstance(text, str) else {}
    control, incarnation = named.get("control"), named.get("incarnation")
    if not (isinstance(control, str) and isinstance(incarnation, str)):
        return None
    if max(len(control), len(incarnation)) > MAX_INCARNATION_CHARS:
        return None
    return PrefixHolder(control, incarnation, count_of(named.get("token_bytes")))


def parse_store(info: Info) -> SharedStore | None:
    """Read mooncake://HOST:PORT/PATH?token_bytes=N&wait_s=S&tokens=N."""
    text = info.get("hicache_storage")
    if not isinstance(text, str) or len(text) > MAX_URL_CHARS:
        return None
    try:
        url = urlsplit(text)
        asked = parse_qs(url.query)
        token_bytes, wait_s = int(asked["token_bytes"][0]), float(asked["wait_s"][0])
        tokens = int(asked.get("tokens", "0")[0])
    except (ValueError, KeyError):
        return None
    if url.scheme != "mooncake" or token_bytes < 1 or not 0 < wait_s < MAX_BUSY_S:
        return None
    return SharedStore(url.netloc + url.path, token_bytes, wait_s, max(0, tokens))


def parse_encoder(info: Info) -> ImageEncoder | None:
    text = info.get("image_encoder")
    named: ImageEncoder | None = None
    if isinstance(text, str):
        named = decode_or_none(text.encode(errors="replace"), ImageEncoder)
    return named


def _dialled(endpoint: object, host: str) -> str | None:
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    port = port_of(endpoint.rpartition(":")[2])
    named = f"[{host}]" if ":" in host else host
    return None if port is None else f"tcp://{named}:{port}"


def port_of(text: str) -> int | None:
    return _port(int(text)) if text.isascii() and text.isdigit() and len(text) < 6 else None


def _port(value: object) -> int | None:
    return value if isinstance(value, int) and 0 < value < 65536 else None


# ---- vLLM workers: detection, and routes that differ or are missing. Pure.

VLLM = "vllm"
NO_PAIR = (
    "vLLM's prefill and decode workers share KV in vLLM's own way (kv_transfer_params), which this router does not speak: each would "
    "compute the whole request; give them as unified workers (--worker-urls), or put vllm-router before the pair"
)
ABORT, ABORT_AT_VLLM = "/abort_request", "/inference/v1/abort_requests"
_INSTEAD = {
    ABORT: " with abort_all: they end requests by their ids alone (rid)",
    "/generate": "; ask /v1/completions or /v1/chat/completions",
}


def runtime_of(info: object, listed: object) -> str | None:
    if isinstance(info, dict) and "vllm_config" in info:  # only with VLLM_SERVER_DEV_MODE
        return VLLM
    rows: Any = listed.get("data") if isinstance(listed, dict) else None
    first = rows[0] if isinstance(rows, list) and rows else None
    return VLLM if isinstance(first, dict) and first.get("owned_by") == VLLM else None


def vllm_call(method: str, path: str, body: bytes) -> tuple[str, str, bytes]:
    """vLLM's call, which names sequences by answer id and index."""
    if path == "/health_generate":
        return "GET", "/health", b""
    fields = object_of(body) if path == ABORT else {}
    if isinstance(rid := fields.get("rid"), str) and not fields.get("abort_all"):
        return "POST", ABORT_AT_VLLM, msgspec.json.encode({"request_ids": [rid, f"{rid}-0"]})
    return method, path, body


def lacks_route(status: int, body: bytes) -> bool:
    """Return whether an answer is FastAPI's for an unknown path."""
    return status == 404 and object_of(body).get("detail") == "Not Found"


def lack_of(runtime: str | None, path: str) -> str:
    return f"{'vLLM workers' if runtime == VLLM else 'these workers'} have no {path}{_INSTEAD.get(path, '')}"
