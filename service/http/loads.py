"""The body of GET /v1/loads, of worker and router, as in SGLang."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from service.version import installed_version


def loads_answer(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the body for a row per rank. The time is text: SMG rejects numbers."""
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": installed_version(),
        "dp_rank_count": len(rows),
        "loads": rows,
    }
