"""Bugs in how workers share images and what stands for them. The simulated cluster must find them by tokens and KV."""

import msgspec

from disagg import recompute
from disagg.resumption import Resumption
from engine import images
from engine.core.departures import Departures
from engine.core.page_keys import RequestKeys
from engine.core.request import Request
from engine.core.state import SchedulerState
from engine.frontend.apis.shared.resumable import going_on
from engine.images import ImageInput
from engine.ranks.messages import step_of
from tools.mutants.images import IMAGES
from tools.mutants.planting import Bugs

IMAGE_SHARING = Bugs()
for name in (
    "images count as their placeholders",
    "features are freed early",
    "features are kept beyond their bound",
    "features outlive their weights",
):
    IMAGE_SHARING[name] = IMAGES[name]


# ---- key ids


@IMAGE_SHARING.bug(
    "other images have the same key ids", images._ids_of, "Key ids follow from sizes alone: hashes collide."
)
def _(original, image):
    return original(msgspec.structs.replace(image, key=bytes(len(image.key))))


@IMAGE_SHARING.bug(
    "keys of pages count images as their placeholders",
    Request.key_tokens,
    "Prompts with other images find the same pages in the host tier.",
    called_by=RequestKeys.of,
)
def _(original, request, start, end):
    return request.tokens(start, end)


# ---- RoPE positions


@IMAGE_SHARING.bug(
    "lose the RoPE delta at the hand-over", SchedulerState.register, "Decode places its tokens as behind as much text."
)
def _(original, state, request):
    original(state, request)
    request.rope_delta *= request.prefill_only


@IMAGE_SHARING.bug(
    "lose the RoPE delta with the memory", Departures.retract, "What was retracted goes on as behind as much text."
)
def _(original, departures, request):
    original(departures, request)
    request.rope_delta = 0


@IMAGE_SHARING.bug(
    "turn the tokens of an image as a row of text",
    ImageInput.rope_positions,
    "Rows and columns of an image are lost.",
)
def _(original, image, base):
    return iter([(base + k, base + k, base + k) for k in range(image.num_tokens)])


@IMAGE_SHARING.bug("followers get no RoPE deltas", step_of, "Other ranks place an answer as behind as much text.")
def _(original, plan, **how):
    step = original(plan, **how)
    placed = [(i, msgspec.structs.replace(images, rope_delta=0)) for i, images in step.images]
    return msgspec.structs.replace(step, images=placed)


# ---- images that stay behind


@IMAGE_SHARING.bug(
    "ask for placeholders again",
    recompute.packed,
    "Prefill computes what decode has retracted without its images.",
    called_by=Resumption._request,
)
def _(original, images):
    return b""


@IMAGE_SHARING.bug(
    "go on without images", going_on, "An answer that goes on at other workers is one to its text alone."
)
def _(original, resume, requests):
    found = original(resume, requests)
    return found if resume is None else [msgspec.structs.replace(request, images=[]) for request in found]
