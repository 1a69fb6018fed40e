"""Merges reports of DP ranks. Pure."""

from collections.abc import Sequence

import msgspec

from engine.messages import ControlReply, StateReply, StepReply

# Shares and times are averaged, the rest is summed.
_MEANS = (
    "new_token_ratio",
    "cache_hit_rate",
    "spec_accept_length",
    "spec_accept_rate",
    "kv_transfer_speed_gb_s",
    "kv_transfer_latency_ms",
    "kv_transfer_total_mb",
    "kv_transfer_bootstrap_ms",
    "pending_prealloc_token_usage",
    "decode_share",
)
_ALL_OR_NOT = ("paused", "batch_is_full")  # 1: all ranks


def rank_name(rank: int, num_ranks: int) -> str:
    return f"DP rank {rank} of {num_ranks}"


def total_of(states: Sequence[StateReply]) -> StateReply:
    first = states[0]
    if len(states) == 1:
        return first
    num_ranks = len(states)
    return msgspec.structs.replace(
        first,
        running=sum(s.running for s in states),
        queues={name: int(value) for name, value in _sums([s.queues for s in states]).items()},
        num_pages=sum(s.num_pages for s in states),
        pages={name: int(value) for name, value in _sums([s.pages for s in states]).items()},
        counters=_sums([s.counters for s in states]),
        gauges=_gauges([s.gauges for s in states]),
        problems=[f"{rank_name(r, num_ranks)}: {text}" for r, s in enumerate(states) for text in s.problems],
        transfer_paths=[path for s in states for path in s.transfer_paths],
        avoided_encoders=list(dict.fromkeys(control for s in states for control in s.avoided_encoders)),
    )


def longest_of(steps: Sequence[StepReply]) -> StepReply:
    """The most critical report: stalled, then longest step."""
    return max(steps, key=lambda step: (step.stalled, step.loading, -1.0 if step.busy_s is None else step.busy_s))


def joined(replies: Sequence[ControlReply]) -> ControlReply:
    """Sum counts, join different texts (files) of accepted replies."""
    first = replies[0]
    values = {name: _joined_values([r.values.get(name, "") for r in replies]) for name in first.values}
    return msgspec.structs.replace(first, values=values)


def _joined_values(values: Sequence[int | str]) -> int | str:
    counts = [value for value in values if isinstance(value, int)]
    return sum(counts) if len(counts) == len(values) else ", ".join(dict.fromkeys(map(str, values)))


def _sums(tables: Sequence[dict[str, int]] | Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(table.get(name, 0) for table in tables) for name in dict.fromkeys(n for t in tables for n in t)}


def _gauges(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    sums = _sums(tables)
    for name in sums.keys() & set(_MEANS):
        sums[name] /= len(tables)
    for name in sums.keys() & set(_ALL_OR_NOT):
        sums[name] = min(table.get(name, 0.0) for table in tables)
    return sums
