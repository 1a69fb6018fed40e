"""The header in which a router names the prefill worker that has a prompt's prefix: its text, signed. Workers ignore any other.

X-Tandem-Prefix-Source: SIGNATURE {"control": "host:port", "incarnation": ..., "num_tokens": ..., "copy": false}
"""

import hashlib
import hmac
from typing import Annotated

import msgspec

from service.http.json_depth import decode_or_none
from service.security.secret import derive

PREFIX_HEADER = "X-Tandem-Prefix-Source"


class PrefixSourceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """`control`: of the worker that has it, and its `incarnation`. `num_tokens`: as far as the router knows.

    `copy`: nothing is to be computed and no decode worker is there: the answer comes when the worker has the prefix, or cannot get it.
    """

    control: Annotated[str, msgspec.Meta(max_length=300)]
    incarnation: Annotated[str, msgspec.Meta(max_length=300)]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    copy: bool = False


def write_header(source: PrefixSourceHeader, secret: bytes | None) -> str:
    """Without a secret workers check no signature."""
    text = msgspec.json.encode(source)
    return f"{_sign(text, secret)} {text.decode()}"


def read_header(value: str, secret: bytes | None) -> PrefixSourceHeader | None:
    """Return None for what no router with this secret has written."""
    signature, _, text = value.partition(" ")
    raw = text.encode(errors="replace")
    if secret is not None and not hmac.compare_digest(signature.encode(errors="replace"), _sign(raw, secret).encode()):
        return None
    source: PrefixSourceHeader | None = decode_or_none(raw, PrefixSourceHeader)
    return source


def _sign(text: bytes, secret: bytes | None) -> str:
    return "-" if secret is None else hmac.new(derive(secret, "prefix source"), text, hashlib.sha256).hexdigest()
