"""SageMaker's POST /invocations, for any API. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from service.http.errors import ApiError, decode_body

INVOCATIONS = "/invocations"


class InvocationBody(msgspec.Struct, kw_only=True):
    """Fields that decide the API, in order. `input` is an embedding's, as in vLLM."""

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
    """Return the body's path. Raises ApiError(400)."""
    fields = decode_body(body, dict[str, msgspec.Raw])
    for field, path in _PATHS.items():
        if field in fields:
            return path
    raise ApiError(400, f"the body fits no API: it needs one of {', '.join(_PATHS)}", code="unknown_body")
