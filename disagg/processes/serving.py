"""Serving of an assembled worker until its parent or ranks end it; its facts for /server_info."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from disagg.config import SchedulerSpec, read_secret
from disagg.processes.children import end_by_parent
from engine.assembly.parts import WorkerParts
from engine.core.mem_cache.cache_events import PrefixEvents
from engine.device.machine import machine_facts
from engine.flags.kv_events_config import parse_kv_events_config
from engine.kernels.build import RanksEnded
from engine.loop.heartbeat import IterationClock, Watchdog, dump_of_others, end_with_stacks
from engine.loop.kv_events import ZmqPublisher
from engine.loop.loop import EngineLoop, SocketPorts
from engine.messages import SchedulerReady
from engine.parallel.rendezvous import LOST_S
from engine.ranks.group import Group
from service.process.start import spare_what_lives


def serve(
    spec: SchedulerSpec,
    loop: EngineLoop,
    ports: SocketPorts,
    turns: IterationClock,
    group: Group | None = None,
    *,
    facts: Mapping[str, Any],
    closes: Sequence[Callable[[], None]],
) -> None:
    """Send `facts`, run the loop, and close what it used in the order of `closes`.

    Raises RanksEnded, unless the parent names the first rank. A watchdog names late ranks, too.
    """
    watchdog = Watchdog(turns) if group is None else Watchdog(turns, on_stall=partial(_end_with_late_ranks, group))
    end_by_parent(loop, ports.call_attention)
    spare_what_lives()
    turns.loaded()
    ports.to_frontend(SchedulerReady(dict(facts)))
    watchdog.start()
    try:
        loop.run()
    except RanksEnded:
        if spec.joint is not None:
            _await_parent(loop, ports)
            return
        if group is not None:
            group.followers.await_end(2 * LOST_S)
        raise
    finally:
        for close in (watchdog.close, *closes, ports.close):
            close()


def publisher_of(spec: SchedulerSpec, events: PrefixEvents | None) -> ZmqPublisher | None:
    """Raises ConfigError for a taken address."""
    config = parse_kv_events_config(spec.engine.kv_events_config)
    if config is None:
        return None
    secret = read_secret(spec.disagg.cluster_secret_file)
    if spec.engine.dp_size == 1:
        return ZmqPublisher(config, events=events, secret=secret)
    return ZmqPublisher(config.of_rank(spec.dp_rank), events=events, secret=secret, dp_rank=spec.dp_rank)


def common_facts(parts: WorkerParts, publisher: ZmqPublisher | None = None, *, started_s: float) -> dict[str, Any]:
    allocator, config = parts.scheduler.memory.allocator, parts.config
    return {
        "max_total_num_tokens": allocator.num_pages * allocator.page_size,
        "num_pages": allocator.num_pages,
        "page_bytes": parts.pool.page_bytes,
        "page_size": allocator.page_size,
        "rank_pids": [os.getpid()],
        "device": config.device,
        "dtype": config.dtype,
        "stream": config.stream,
        "overlap_depth": parts.depth,
        "max_prefill_tokens": config.max_prefill_tokens,
        "max_running_requests": config.max_running_requests,
        **{f"memory_{name}_bytes": size for name, size in parts.memory.items()},
        "load_time_s": round(time.monotonic() - started_s, 3),
        "kv_events_config": None if publisher is None else publisher.describe(),
        **machine_facts(config.device, config.dtype),
    }


NAMED_WITHIN_S = 5.0  # the parent looks at its children more often


def _end_with_late_ranks(group: Group, stalled_s: float) -> None:
    late = group.late()
    dump_of_others(group.pids[rank] for rank in late if rank in group.pids and group.pids[rank] != os.getpid())
    end_with_stacks(stalled_s, found=f"waits for {group.late_text(late)}" if late else "")


def _await_parent(loop: EngineLoop, ports: SocketPorts) -> None:
    """With DP attention, wait for the parent to end this rank and name the one that ended first."""
    deadline_s = time.monotonic() + NAMED_WITHIN_S
    while not loop.stopped and (left_s := deadline_s - time.monotonic()) > 0:
        ports.wait(left_s)
