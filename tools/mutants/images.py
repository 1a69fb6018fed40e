"""Bugs in what the core makes of images, which the stories of tests/core/proof must find."""

import math

from msgspec.structs import replace

from engine.core import image_items
from engine.core.image_cache import ImageCache
from engine.core.prefill_adder import PrefillAdder
from engine.core.request import Request
from tools.mutants.planting import Bugs

IMAGES = Bugs()


@IMAGES.bug("images count as their placeholders", Request.key_tokens, "Prompts with other images share KV.")
def _(original, request, start, end):
    return request.tokens(start, end)


@IMAGES.bug("the newest features make room", ImageCache._make_room, "What the step itself reads goes before it.")
def _(original, images):
    while images._num_bytes > images.max_bytes:
        images._forget(next(reversed(images._features)))


@IMAGES.bug("features are freed early", ImageCache.attach, "They go before the last token of their image is computed.")
def _(original, images, plan):
    original(images, plan)
    encoded = [image.key for image in plan.encodes]
    plan.forgets += [key for key, features in images._features.items() if features.uses and key not in encoded]


IMAGES.skip("features are kept beyond their bound", ImageCache._make_room, "Nothing makes room.")
IMAGES.skip("a retracted request keeps its features", ImageCache.free, "What has ended or waits uses features.")
IMAGES.skip("features outlive their weights", ImageCache.forget, "Images are not encoded by other weights.")


@IMAGES.bug("an image is encoded for each request", ImageCache._use, "Features that are there are not found.")
def _(original, images, image, use):
    features = images._features.get(image.key)
    if features is not None and use not in features.uses:
        images._forget(image.key)
        images._forgets.remove(image.key)
    original(images, image, use)


@IMAGES.bug("a chunk begins an image anew", image_items._rows_of, "Behind a cut come the first rows again.")
def _(original, images, start, end):
    return tuple(replace(rows, first=0) for rows in original(images, start, end))


@IMAGES.bug("answers forget the images before them", image_items.with_images, "RoPE positions of an answer are places.")
def _(original, item, request):
    planned = original(item, request)
    return planned if planned.images is None else replace(planned, images=replace(planned.images, rope_delta=0))


@IMAGES.bug(
    "a prompt waits for room that it has itself", ImageCache.may_go_on, "Its own features count as those of others."
)
def _(original, images, request, part):
    return images.has_room(request, part)


@IMAGES.bug(
    "admission looks at no features", PrefillAdder._images_wait, "More is needed at once than there is room for."
)
def _(original, adder, request):
    return False


@IMAGES.bug("a step encodes all that it can", ImageCache.reach, "To encode images costs nothing of a step's budget.")
def _(original, images, request, start, *, part, budget):
    most, _ = original(images, request, start, part=part, budget=math.inf)
    return most, budget
