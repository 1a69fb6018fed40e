"""Bugs of features that encoder workers send, which the simulated cluster must find by its tokens, its memory and its rest."""

from msgspec.structs import replace

from disagg import feature_fetching
from disagg.feature_fetching import FeatureFetch, FeatureFetches
from disagg.incoming import Incoming, TransferStage
from disagg.page_sender import PageSender
from engine.core.image_cache import ImageCache
from engine.core.memory import Detached, Memory
from tools.mutants.planting import Bugs
from transfer_backends.kvpoll import KVPoll

ENCODERS = Bugs()


# ---- pages in which features arrive


@ENCODERS.bug(
    "pages of features are free before they are copied", FeatureFetches._free_copied, "A plan counts as its step."
)
def _(original, fetches):
    fetches._images.take_copied()
    unplanned = [land.pages for land in fetches._images._lands]
    for pages in [pages for pages in fetches._landed if pages not in unplanned]:
        fetches._landed.remove(pages)
        fetches._allocator.free(pages)


@ENCODERS.bug(
    "pages of a late fetch of features are free at once",
    FeatureFetches.detach,
    "The encoder may still write into them.",
)
def _(original, fetches, fetch):
    return Detached()


ENCODERS.skip("pages of copied features stay away", FeatureFetches._free_copied, "The pool of arrivals runs dry.")


@ENCODERS.bug("quarantine of features has no end", Incoming.end_quarantine, "What was late once is lost.")
def _(original, incoming):
    if not any(isinstance(transfer, FeatureFetch) for transfer in incoming.quarantined):
        original(incoming)


# ---- what counts as an image's features


@ENCODERS.bug(
    "features of other weights are accepted",
    feature_fetching.fits_weights,
    "An encoder that was updated, or was not, is believed.",
)
def _(original, first):
    return True


@ENCODERS.bug(
    "two images are swapped", ImageCache.attach, "Of images that land together each has the other's features."
)
def _(original, images, plan):
    original(images, plan)
    sizes = {len(land.pages) for land in plan.lands}
    pages = {size: [land.pages for land in plan.lands if len(land.pages) == size] for size in sizes}
    plan.lands = [replace(land, pages=pages[len(land.pages)].pop()) for land in plan.lands]


@ENCODERS.bug("a partly written image is whole", FeatureFetches.poll, "It lands while its transfer is under way.")
def _(original, fetches, now_s):
    incoming = fetches.incoming
    for fetch in list(incoming.transfers.values()):
        under_way = fetch.receiver.poll() not in (KVPoll.Success, KVPoll.Failed)
        if fetch.stage is TransferStage.RECEIVING and under_way and fetches._images.land(fetch.image, fetch.pages):
            fetches._landed.append(fetch.pages)
            fetches._end_wait(fetch)
            fetch.pages, fetch.stage = [], TransferStage.QUARANTINED
            del incoming._transfers[fetch.key]
            incoming._quarantined.append(fetch)
    original(fetches, now_s)


@ENCODERS.bug("the last page of an image is not sent", PageSender._send_last, "It keeps what was there before.")
def _(original, sender, handover, now_s):
    pages = handover.request.pages
    if len(pages) > 1:
        handover.request.pages = [*pages[:-1], pages[0]]
    original(sender, handover, now_s)
    handover.request.pages = pages


# ---- encoders


@ENCODERS.bug("an image is evicted while it is sent", Memory.lend, "The encoder's cache makes room meanwhile.")
def _(original, memory, request):
    num_pages = original(memory, request)
    memory.cache.unlock(request.lock)
    request.lock = None
    return num_pages


# ---- prompts that wait


@ENCODERS.bug("a prompt waits for an encoder that died", FeatureFetches._end_wait, "Nothing tells it to encode.")
def _(original, fetches, fetch):
    if fetch.receiver.poll() is KVPoll.Failed:
        fetch.waiting.clear()
    original(fetches, fetch)


@ENCODERS.bug("one prompt of several goes on", FeatureFetches._end_wait, "The others wait for what is there.")
def _(original, fetches, fetch):
    for rid in list(fetch.waiting)[1:]:
        del fetch.waiting[rid]
    original(fetches, fetch)


@ENCODERS.bug(
    "a client that leaves takes features along", FeatureFetches.leave, "Its request counts as one that waits."
)
def _(original, fetches, rid):
    return None


@ENCODERS.bug(
    "features land beyond their bound", ImageCache._make_room, "Nothing makes room for them.", called_by=ImageCache.land
)
def _(original, images):
    return None
