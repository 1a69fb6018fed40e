"""The cached prefix of a prompt, from the router."""

import msgspec

from engine.frontend.services import SERVICES
from engine.messages import GenerateRequest, PrefixSource
from service.http.prefix_source import PREFIX_HEADER, read_header
from service.http.request import HttpRequest


def with_prefix_source(request: HttpRequest, requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Add the source to samples of the first prompt, if signed and of an allowed worker."""
    value = request.headers.get(PREFIX_HEADER)
    if value is None or not requests:
        return requests
    spec = request[SERVICES].spec
    source = read_header(value, spec.secret)
    if source is None or not spec.bootstrap_allowlist.admits(source.control):
        return requests
    named = PrefixSource(source.control, source.incarnation, source.num_tokens)
    prompt = requests[0].input_ids
    return [msgspec.structs.replace(r, prefix_source=named) if r.input_ids == prompt else r for r in requests]
