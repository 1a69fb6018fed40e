"""The body of GET /v1/loads, as in SGLang."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from service.version import installed_version


def loads_answer(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row per rank. The time is text, as SMG rejects numbers."""
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": installed_version(),
        "dp_rank_count": len(rows),
        "loads": rows,
    }
