"""Descriptions of workers."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from router.pool.worker import Role, Worker

SLICE = 50  # workers between two yields to other tasks

_encode = msgspec.json.Encoder().encode


async def describe_all(workers: Sequence[Worker]) -> msgspec.Raw:
    """Return a JSON list, yielding in between (milliseconds for a thousand)."""
    parts = []
    for at in range(0, len(workers), SLICE):
        parts.append(_encode([describe(worker) for worker in workers[at : at + SLICE]])[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def describe(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "url": worker.url,
        "role": worker.role.value,
        "is_healthy": worker.answers,
        "health": worker.health.value,
        "silent": worker.silent,
        "heartbeats": worker.beats,
        "busy_s": worker.busy_s,
        "leaving": worker.leaving,
        "switching_to": None if worker.switching_to is None else worker.switching_to.value,
        "circuit": worker.circuit.state.value,
        "models": worker.models,
        "runtime_type": worker.runtime_type,
        "discovered": worker.discovered,
        "last_error": worker.last_error,
        "bootstrap_host": worker.bootstrap_host if worker.role is Role.PREFILL else None,
        "bootstrap_port": worker.bootstrap_port,
        "load": worker.load_tokens,
        "inflight_requests": worker.inflight_requests,
        "inflight_tokens": worker.inflight_tokens,
        "assigned_total": worker.assigned_total,
        "report": worker.report,
    }
