"""The engines by which the contract suite moves bytes, each by its name, or with ROWS: as if it carried no host memory."""

from dataclasses import replace
from typing import Any

from transfer_backends.engines.registry import make_engine

ROWS = ", rows by message"


def engine_of(way: str, **options: Any) -> Any:
    engine: Any = make_engine(way.removesuffix(ROWS), **options)
    if way.endswith(ROWS):
        engine.caps = replace(engine.caps, carries_host_memory=False)
    return engine


def moves_rows(way: str) -> bool:
    """Metadata rows arrive: the fake engine moves nothing."""
    return way != "fake"


def moves_pages(way: str) -> bool:
    return not way.startswith("fake")
