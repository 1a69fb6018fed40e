"""The signed header of a router with a worker that has a prompt's prefix.

X-Tandem-Prefix-Source: SIGNATURE {"control": "host:port", "incarnation": ..., "num_tokens": ...}
"""

from typing import Annotated

import msgspec

from service.http.errors import decode_or_none
from service.security.keys import is_signed, sign

PREFIX_HEADER = "X-Tandem-Prefix-Source"
PURPOSE = "prefix source"


class PrefixSourceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A worker with the prefix, and the estimate `num_tokens` of its length."""

    control: Annotated[str, msgspec.Meta(max_length=300)]
    incarnation: Annotated[str, msgspec.Meta(max_length=300)]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


def write_header(source: PrefixSourceHeader, secret: bytes) -> str:
    text = msgspec.json.encode(source)
    return f"{sign(text, secret, purpose=PURPOSE)} {text.decode()}"


def read_header(value: str, secret: bytes | None) -> PrefixSourceHeader | None:
    """None for a header not from our router."""
    signature, _, text = value.partition(" ")
    raw = text.encode(errors="replace")
    if not is_signed(signature, raw, secret, purpose=PURPOSE):
        return None
    source: PrefixSourceHeader | None = decode_or_none(raw, PrefixSourceHeader)
    return source
