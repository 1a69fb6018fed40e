"""The answer of GET /v1/loads, of a worker and of a router, as in SGLang."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from service.version import installed_version


def loads_answer(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`rows`: one for each rank. The time is text (ISO 8601): SMG reads nothing of an answer where it is a number."""
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": installed_version(),
        "dp_rank_count": len(rows),
        "loads": rows,
    }
