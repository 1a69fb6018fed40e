"""HTTP reads of the launcher, by the standard library for a fast start."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

MAX_REPLY_BYTES = 8 << 20
# Never use a proxy for cluster addresses.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_healthy(url: str, *, timeout_s: float) -> bool:
    try:
        with _OPENER.open(url, timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


def get_json(url: str, *, timeout_s: float, api_key: str | None = None) -> dict[str, Any]:
    """Return the object at `url`, {} on failure."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            value = json.loads(reply.read(MAX_REPLY_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
