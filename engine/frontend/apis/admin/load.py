"""A worker's load for routers and dashboards. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.frontend.metrics.schedulers import cache_hit_rate, used_tokens
from engine.messages import StateReply, StepReply

PD_QUEUES = {
    "prefill_bootstrap_queue_reqs": "bootstrap",
    "prefill_inflight_queue_reqs": "inflight",
    "decode_prealloc_queue_reqs": "prealloc",
    "decode_transfer_queue_reqs": "transfer",
    "decode_retracted_queue_reqs": "retracted",
}

# since start, for rates
TOTALS = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "generation_tokens": "generation_tokens",
    "kv_transfer_bytes": "kv_sent_bytes",
    "transfer_failed": "transfer_failed",
    "bootstrap_failed": "bootstrap_failed",
}


def _known(s: StateReply, **gauges: str) -> dict[str, float]:
    """Names with gauges' values."""
    return {name: s.gauges[gauge] for name, gauge in gauges.items() if gauge in s.gauges}


def load_summary(s: StateReply) -> dict[str, Any]:
    """Load of /server_info. `num_queued_reqs`: all queues, `num_waiting_reqs`: waiting only."""
    total = s.num_pages * s.page_size
    return {
        "num_running_reqs": s.running,
        "num_waiting_reqs": s.queues.get("waiting", 0),
        "num_queued_reqs": sum(s.queues.values()),
        "num_waiting_uncached_tokens": int(s.gauges.get("waiting_tokens", 0)),
        "num_used_tokens": used_tokens(s),
        "num_total_tokens": total,
        "max_total_num_tokens": total,
        "token_usage": used_tokens(s) / total if total else 0.0,
        "cache_hit_rate": cache_hit_rate(s),
        "gen_throughput": s.gauges.get("gen_throughput", 0.0),
        **_known(s, avg_spec_accept_length="spec_accept_length"),
        "pages": s.pages,
        "queues": s.queues,
        "adapters": s.variants,
    }


def transfer_paths(s: StateReply, *, mode: str) -> dict[str, Any]:
    return {"transfer_paths": [msgspec.structs.asdict(path) for path in s.transfer_paths]} if mode == "prefill" else {}


def step_summary(now: StepReply) -> dict[str, Any]:
    """The current step and its duration, empty if idle."""
    if now.busy_s is None:
        return {}
    busy = {"busy_s": round(now.busy_s, 3)}
    return busy if now.step is None else {**busy, "step": msgspec.structs.asdict(now.step)}


def get_load(states: Sequence[StateReply]) -> list[dict[str, Any]]:
    """GET /get_load for older routers."""
    queued = [sum(s.queues.values()) for s in states]
    return [
        {"dp_rank": rank, "num_reqs": s.running + n, "num_waiting_reqs": n, "num_tokens": used_tokens(s)}
        for rank, (s, n) in enumerate(zip(states, queued, strict=True))
    ]


def v1_loads_entry(
    s: StateReply, *, rank: int = 0, mode: str, max_running_requests: int, num_live: int
) -> dict[str, Any]:
    summary = load_summary(s)
    pages = summary.pop("pages")
    speculative = _known(s, accept_length="spec_accept_length", accept_rate="spec_accept_rate")
    return {
        "dp_rank": rank,
        **summary,
        "num_total_reqs": summary["num_running_reqs"] + summary["num_waiting_reqs"],
        "num_live_reqs": num_live,
        "num_active_tokens": summary["num_used_tokens"],
        "max_running_requests": max_running_requests,
        "utilization": s.running / max_running_requests if max_running_requests else 0.0,
        "memory": {
            "pages": pages,
            "page_size": s.page_size,
            "num_pages": s.num_pages,
            **_known(s, storage_read_gb_s="storage_read_gb_s"),
        },
        "disaggregation": {
            "mode": mode,
            **{name: s.queues.get(queue, 0) for name, queue in PD_QUEUES.items()},
            "kv_transfer_speed_gb_s": s.gauges.get("kv_transfer_speed_gb_s", 0.0),
            "kv_transfer_latency_ms": s.gauges.get("kv_transfer_latency_ms", 0.0),
            "pending_prealloc_token_usage": s.gauges.get("pending_prealloc_token_usage", 0.0),
            **({"avoided_encoders": s.avoided_encoders} if s.avoided_encoders else {}),
        },
        **({"speculative": speculative} if speculative else {}),
        "totals": {
            **{name: int(s.counters.get(counter, 0)) for name, counter in TOTALS.items()},
            "busy_ms": int(1000 * s.counters.get("busy_s", 0.0)),
        },
    }
