"""KV memory layouts, equal in a prefill and a decode worker. Pure.

Workers compare them in their handshake, routers in `/server_info`.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated

import msgspec

MAX_LAYERS = 4096
MAX_POOLS = 8  # of extra state

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]

BESIDE = "what a request has beside pages"
SAME_MODEL = "start both workers with the same model and flags"
REMEDIES = {
    "version": "start both workers with one version of Tandem",
    "backend": "start both workers with one --disaggregation-transfer-backend",
    "page_size": "start both workers with one --page-size",
    "dtype": "start both workers with one --dtype and one --kv-cache-dtype",
    "kv_checksum": "start both workers with --no-disaggregation-kv-checksum, or both without",
    "kv_units": "give both workers one --kv-units, a multiple of each --tp-size",
    BESIDE: f"{SAME_MODEL}, and --disable-hybrid-swa-memory if one has pipeline stages",
}


class Layout(msgspec.Struct, frozen=True, array_like=True):
    version: int
    backend: Name
    signature: Text
    page_size: int
    dtype: Name
    kv_checksum: Name = "off"
    kv_units: Count = 1
    layer_bytes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()
    # (kind, bytes of an item)
    pools: Annotated[tuple[tuple[Name, Count], ...], msgspec.Meta(max_length=MAX_POOLS)] = ()


class NamedLayout(Layout, frozen=True, array_like=False):
    """A layout as a JSON object, perhaps of a later version."""


def write_layout(layout: Layout) -> str:
    """`kv_layout` of `/server_info`."""
    return msgspec.json.encode(NamedLayout(**msgspec.structs.asdict(layout))).decode()


def read_layout(info: object) -> Layout | None:
    """Read `kv_layout` of a `/server_info`, if any."""
    text = info.get("kv_layout") if isinstance(info, dict) else None
    return _read(text) if isinstance(text, str) else None


@lru_cache(maxsize=64)  # the workers of a router have few layouts
def _read(text: str) -> Layout | None:
    try:
        return msgspec.json.decode(text, type=NamedLayout)
    except (ValueError, RecursionError):
        return None


def layout_conflict(mine: Layout, theirs: Layout, *, me: str, them: str) -> str | None:
    """An error with both values of the first different field."""
    for name, a, b in _compared(mine, theirs):
        if a != b:
            return f"{name} differs: {me} has {a!r}, {them} has {b!r}; {REMEDIES.get(name, SAME_MODEL)}"
    return None


def _compared(mine: Layout, theirs: Layout) -> Iterator[tuple[str, object, object]]:
    for name in ("version", "backend", "signature", "page_size", "dtype", "kv_checksum", "kv_units"):
        yield name, getattr(mine, name), getattr(theirs, name)
    yield "num_layers", len(mine.layer_bytes), len(theirs.layer_bytes)
    for layer, (a, b) in enumerate(zip(mine.layer_bytes, theirs.layer_bytes, strict=False)):
        yield f"bytes of layer {layer} in a unit of a page", a, b
    yield BESIDE, [kind for kind, _ in mine.pools], [kind for kind, _ in theirs.pools]
    for (kind, a), (_, b) in zip(mine.pools, theirs.pools, strict=False):
        yield f"bytes of an item of {kind}", a, b
