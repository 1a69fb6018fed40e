"""Bugs of prefixes that prefill workers exchange, which tests of the roles and of the router must find: FINDERS."""

from types import SimpleNamespace

from disagg.fetch_policy import FetchPolicy
from disagg.incoming import Incoming, RequestTarget
from disagg.prefix_fetching import PrefixFetches
from disagg.prefix_serving import PrefixServer
from engine.core.held import HeldRequests
from engine.core.host_cache import HostCache
from engine.core.memory import Detached, Memory
from router.choice.prefix_sources import PrefixSources
from router.choice.replication import Replication
from tools.mutants.planting import Bugs

PREFIXES = Bugs()
FINDERS = ("tests/disagg/test_prefix_fetch.py", "tests/router/test_prefix_fetch.py")


@PREFIXES.bug("pages of a late fetch are free at once", RequestTarget.detach, "The source may still write into them.")
def _(original, target, transfer):
    return Detached()


@PREFIXES.bug("copies to and from the host count as made", HostCache.is_settled, "A peer reads or writes before them.")
def _(original, host, pages):
    return True


@PREFIXES.bug("the source does not lock what it sends", Memory.lend, "It is evicted while a peer reads it.")
def _(original, memory, request):
    num_pages = original(memory, request)
    memory.cache.unlock(request.lock)
    request.lock = None
    return num_pages


@PREFIXES.bug("a request waits for a prefix that will not come", PrefixFetches.failed, "Nothing tells it to compute.")
def _(original, fetches, fetch, failure, reason):
    fetch.waiting.clear()
    original(fetches, fetch, failure, reason)


PREFIXES.skip("a fetch has no end", Incoming._expire, "What is too late goes on, and its requests wait.")


@PREFIXES.bug("a client that leaves takes others' prefix along", PrefixFetches.leave, "All that wait for it compute.")
def _(original, fetches, request):
    for fetch in list(fetches.incoming.transfers.values()):
        if request.rid in fetch.waiting:
            fetches.incoming.cancel(fetch, "the client has gone")


@PREFIXES.bug("each request fetches for itself", PrefixFetches._same, "Two with one prefix get it twice.")
def _(original, fetches, request):
    return None


@PREFIXES.bug("the tree has what did not land", HeldRequests.keep, "Pages behind what the source had are shared.")
def _(original, held, carrier, *, num_pages):
    original(held, carrier, num_pages=len(carrier.pages))


@PREFIXES.bug(
    "a source sends to any number", PrefixServer.__len__, "A hot one is slowed by all.", called_by=PrefixServer.take
)
def _(original, server):
    return 0


@PREFIXES.bug("what is cheaper to compute is fetched", FetchPolicy.wait_s, "Costs are not compared.")
def _(original, policy, num_tokens, now_s):
    return 1.0


@PREFIXES.bug("the chosen worker is its own source", PrefixSources.holders, "Its own prefix counts as another's.")
def _(original, sources, hints, *, like):
    yield from original(sources, hints, like=SimpleNamespace(models=like.models))


@PREFIXES.bug("hits do not fade", Replication.note, "What was hot yesterday is copied.")
def _(original, policy, key, now_s):
    return original(policy, key, 0.0)


@PREFIXES.bug("copies cost nothing", Replication.begin, "Bytes are not counted.")
def _(original, policy, key, size_bytes, now_s):
    return original(policy, key, 0, now_s)
