"""What a worker must look like at rest: nothing open, all memory back, the dead forgotten, right KV in the cache."""

from collections import Counter
from collections.abc import Mapping

from engine.core.mem_cache.host_cache import HostCache
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.radix_cache import TRUNK
from tools.simulation.workers.encoder import Encoder
from tools.simulation.workers.executor import adapter_of
from tools.simulation.workers.features import Arrivals
from tools.simulation.workers.images import contents_by_keys, seen_by_keys
from tools.simulation.workers.worker import Worker


def leftovers(worker: Worker) -> list[str]:
    """What is not at rest; empty when everything has ended and all memory is back."""
    memory, exchange = worker.scheduler.memory, worker.exchange
    counts = memory.allocator.counts()
    beside = [allocator.counts() for allocator in memory.allocators[1:]]
    open_things = {
        "held states and window pages": sum(group["held"] + group["quarantined"] for group in beside),
        "requests": len(worker.scheduler.stages.live),
        "role entries": len(exchange.transfers_in(features=False) + exchange.transfers_in(features=True))
        + len(exchange.handovers_out()),
        "held pages": counts["held"],
        "quarantined pages": counts["quarantined"],
        "locked cached pages": worker.scheduler.memory.cache.num_pages - worker.scheduler.memory.cache.num_evictable,
        "metadata rows": worker.memory.metadata.num_used,
        "rooms": sum(len(manager.core.rooms) for manager in worker.managers.by_thread.values()),
        "exposed pages": sum(sum(exposed.values()) for exposed in worker.memory.exposed.values()),
        "open HTTP requests": worker.frontend.num_open,
        "kept streams": len(worker.frontend.kept),
        "held requests": worker.loop._control.num_held,
        "pending updates of weights": int(worker.loop._control._update is not None),
        "end under way": int(worker.frontend.signals.requested.is_set()),
        "dead peers": len(_dead_peers(worker)),
        "images with other features than the cache knows": _strange_features(worker),
        "ranks with other copies": sum(
            model.copies.keys() != worker.computer.model.copies.keys() for model in worker.computer.models
        ),
    }
    if exchange.arrivals is not None:
        open_things |= _left_of_features(worker, exchange.arrivals)
    return [f"{worker.process.name}: {count} {what}" for what, count in open_things.items() if count]


def _left_of_features(worker: Worker, arrivals: Arrivals) -> dict[str, int]:
    counts = arrivals.allocator.counts()
    return {
        "pages of features that are held": counts["held"],
        "pages of features in quarantine": counts["quarantined"],
        "metadata rows of features": arrivals.memory.metadata.num_used,
        "exposed pages of features": sum(sum(exposed.values()) for exposed in arrivals.memory.exposed.values()),
        "features that no step has copied": len(worker.scheduler.memory.part(ImageCache)._lands),  # type: ignore[union-attr]
    }


def _dead_peers(worker: Worker) -> list[str]:
    """Incarnations that are gone and still known: tables must forget them."""
    known = [peer.incarnation for manager in worker.managers.by_thread.values() for peer in manager.core.peers]
    return [name for name in known if worker.around.find(name) is None]


def _strange_features(worker: Worker) -> int:
    """Count images whose features are used, or there and not known, or known and not there."""
    images = worker.scheduler.memory.part(ImageCache)
    if images is None:
        return 0
    used = {key for key, features in images._features.items() if features.uses}
    return len(used | images._features.keys() ^ worker.computer.model.features.keys())


def check_cached(worker: Worker) -> None:
    """Every page that others may find holds the KV of its prefix, in its namespace; or features by the present weights."""
    cache = worker.scheduler.memory.cache
    assert not (isinstance(worker, Encoder) and cache._tops), f"images have no namespace but {TRUNK}"
    for branch, top in [(TRUNK, cache.root), *cache._tops.items()]:
        stack = [(node, list(node.key), list(node.pages)) for node in top.children.values()]
        while stack:
            node, keys, pages = stack.pop()
            stack += [(c, [*keys, *c.key], [*pages, *c.pages]) for c in node.children.values()]
            if isinstance(worker, Encoder):
                worker.computer.tower.verify_features(pages, contents_by_keys(keys))
                continue
            tokens = seen_by_keys(keys)
            for model in worker.computer.models:
                model.verify(pages, tokens, adapter=adapter_of(branch.namespace))
                if node.state:
                    model.verify_state(node.state, tokens, adapter=adapter_of(branch.namespace))
                model.verify_window(node.pages, node.window)


def _counted_of_features(worker: Worker, roles: Mapping[str, float]) -> dict[str, int]:
    if isinstance(worker, Encoder):
        asked, found = int(roles["mm_cache_queries"]), int(roles["mm_cache_hits"])
        return {"images that encoders compute": asked - found, "images that encoders have": found}
    ends = ("late", "refused", "aborted", "forgone")
    return {
        "features fetched": int(roles.get("features_fetched", 0)),
        "features that land together": worker.computer.model.num_landed_together,
        **{f"feature fetches {end}": int(roles.get(f"feature_fetches_{end}", 0)) for end in ends},
    }


def counted(worker: Worker) -> dict[str, int]:
    """What happened in this life, beyond plain service: says whether a run tested anything."""
    roles, host = worker.role.counters(), worker.scheduler.memory.part(HostCache)
    images = worker.scheduler.memory.part(ImageCache)
    manager = sum((Counter(manager.counters) for manager in worker.managers.by_thread.values()), Counter[str]())
    return {
        "slots verified": worker.computer.model.num_checked,
        "retractions": worker.scheduler.counters.retractions,
        "copies restored, tokens": int(roles.get("backup_restored_tokens", 0)),
        "resumed through prefill": int(roles.get("resumed_through_prefill", 0)),
        "prefixes fetched": int(roles.get("prefix_fetched", 0)),
        "prefixes refused": int(roles.get("prefix_fetches_refused", 0)),
        "prefixes that came too late": int(roles.get("prefix_fetches_late", 0)),
        "moves landed": int(roles.get("moved_in", 0)),
        "moves that failed": int(roles.get("moves_failed", 0)),
        "recomputes that failed": int(roles.get("recompute_failed", 0)),
        "transfers failed": int(manager.get("failed", 0)),
        "late messages": int(manager.get("late_messages", 0)),
        "pages from the host tier": host.counted["hicache_loaded_pages"] if host is not None else 0,
        "images encoded": 0 if images is None else images.num_encoded,
        "features found again": 0 if images is None else images.num_hits,
        "features evicted": 0 if images is None else images.num_evicted,
        **_counted_of_features(worker, roles),
        "preemptions": worker.scheduler.counters.preemptions,
        "damaged pages found": int(roles.get("kv_checksum_failed", 0)),
        "checksums verified": int(roles.get("kv_checksum_verified", 0)),
        "stuck rooms": int(manager.get("stuck_rooms", 0)),
        "junk frames": int(manager.get("junk_frames", 0)),
        "protocol errors": int(manager.get("protocol_errors", 0)),
        "workers with quarantined pages": int(worker.most_quarantined > 0),
    }
