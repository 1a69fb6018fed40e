"""vLLM workers: detection, and routes that differ or are missing. Pure."""

from typing import Any

import msgspec

from service.http.json_depth import object_of

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
    """Return VLLM or None, by `/server_info` and `/v1/models`."""
    if isinstance(info, dict) and "vllm_config" in info:  # only with VLLM_SERVER_DEV_MODE
        return VLLM
    rows: Any = listed.get("data") if isinstance(listed, dict) else None
    first = rows[0] if isinstance(rows, list) and rows else None
    return VLLM if isinstance(first, dict) and first.get("owned_by") == VLLM else None


def vllm_call(method: str, path: str, body: bytes) -> tuple[str, str, bytes]:
    """Return vLLM's equivalent call, which names sequences by answer id and index."""
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
