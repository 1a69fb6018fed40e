"""Normalization of request paths before any rule. Pure."""

import re
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

# Matches paths that may not be normal: escapes, or bytes that need one, backslashes, empty
# segments, dots, a trailing slash.
_ODD = re.compile(r"[^!-~]|%|\\|//|/\.|./$")
_IN_SEGMENTS = "!$&'()*+,;=:@~"  # allowed in a path by RFC 3986, beyond those that quote() leaves


def plain_path(raw: str) -> str:
    """Decode escapes once; drop dot and empty segments and a trailing slash.

    Encoded slashes and backslashes count as slashes, so a rule holds for each spelling, also at a
    server that gets the path passed on. Bytes that are not UTF-8 stay.
    """
    if not raw.startswith("/") or not _ODD.search(raw):
        return raw
    kept: list[bytes] = []
    for part in unquote_to_bytes(raw.encode(errors="surrogateescape")).replace(b"\\", b"/").split(b"/"):
        if part == b"..":
            del kept[-1:]
        elif part not in (b"", b"."):
            kept.append(part)
    return "/" + "/".join(quote_from_bytes(part, safe=_IN_SEGMENTS) for part in kept)


def segment(name: str) -> str:
    return quote(name, safe="")
