"""The one form of a path. Every server gives its requests this form before anything looks at them; names in paths are written in it. Pure."""

import re
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

# A path without any of these is in its form already: bytes that need an escape, escapes, backslashes, empty segments, dots, a slash at the end.
_ODD = re.compile(r"[^!-~]|%|\\|//|/\.|./$")
_IN_SEGMENTS = "!$&'()*+,;=:@~"  # RFC 3986 lets them stand in a path; quote() leaves letters, digits and -._~


def plain_path(raw: str) -> str:
    """Return the path as it is sent, with its escapes decoded once, and then without dot segments, empty ones, and a slash at the end.

    Encoded slashes and backslashes are slashes. So a rule for a path holds for each way to write it, also at a server that the path is passed
    on to. Bytes that are no UTF-8 stay as they are.
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
    """Return a name as one segment of a path: no server takes its slashes for the path's own."""
    return quote(name, safe="")
