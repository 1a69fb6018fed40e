"""The DP rank in a client's header (`X-data-parallel-rank`), as in vLLM and SGLang."""

from collections.abc import Mapping

from service.http.errors import ApiError

RANK_HEADER = "x-data-parallel-rank"
MAX_DIGITS = 9


def rank_in(headers: Mapping[str, str]) -> int | None:
    """Return the rank, if any. Raises ApiError(400)."""
    text = headers.get(RANK_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise ApiError(400, f"{RANK_HEADER}: must be the number of a DP rank, got {text[:40]!r}", field=RANK_HEADER)
    return int(text)
