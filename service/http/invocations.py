"""SageMaker's POST /invocations: the body determines the API. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from service.http.errors import ApiError, decode_body

INVOCATIONS = "/invocations"


class InvocationBody(msgspec.Struct, kw_only=True):
    """The fields that name the API; the first present one counts. `input` is an embedding's, as in
    vLLM.
    """

    messages: Any = None
    prompt: Any = None
    input: Any = None
    text: Any = None
    input_ids: Any = None


_PATHS: Mapping[str, str] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text": "/generate",
    "input_ids": "/generate",
}


def invoked_path(body: bytes) -> str:
    """Return the path that would accept this body. Raises ApiError(400)."""
    fields = decode_body(body, dict[str, msgspec.Raw])
    for field, path in _PATHS.items():
        if field in fields:
            return path
    raise ApiError(400, f"the body fits no API: it needs one of {', '.join(_PATHS)}", code="unknown_body")
