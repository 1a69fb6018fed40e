"""Where a prompt's prefix is cached, as the router names it to a prefill worker."""

import msgspec
from aiohttp import web

from engine.frontend.services import SERVICES
from engine.messages import GenerateRequest, PrefixSource
from service.http.prefix_source import PREFIX_HEADER, read_header


def with_prefix_source(request: web.BaseRequest, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Return `requests`; the samples of the first prompt, which the router went by, name the worker that has its prefix.

    A header that no router of this cluster has written is ignored, and so is a worker that may not be dialled: the prompt is computed.
    """
    value = request.headers.get(PREFIX_HEADER)
    if value is None or not requests:
        return requests
    spec = request[SERVICES].spec
    source = read_header(value, spec.secret)
    if spec.mode != "prefill" or source is None or not spec.bootstrap_allowlist.admits(source.control):
        return requests
    named = PrefixSource(source.control, source.incarnation, source.num_tokens, source.copy)
    prompt = requests[0].input_ids
    return [msgspec.structs.replace(r, prefix_source=named) if r.input_ids == prompt else r for r in requests]
