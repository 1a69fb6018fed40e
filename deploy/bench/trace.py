"""Reader of traces in Mooncake's format (FAST'25): JSON lines, perhaps gzipped.

`timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (prefix-chained blocks of 512
tokens: equal ids at equal positions are a shared prefix).
"""

import gzip
from pathlib import Path
from typing import Annotated

import msgspec

from service.flags import ConfigError

GZIP_MAGIC = b"\x1f\x8b"


Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceEntry(msgspec.Struct, frozen=True):
    timestamp_ms: float = msgspec.field(name="timestamp")
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...] = ()


def read_trace(path: str) -> list[TraceEntry]:
    """Return all entries. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from None
    return parse_trace(text, name=path)


def parse_trace(text: bytes, *, name: str) -> list[TraceEntry]:
    entries = []
    decoder = msgspec.json.Decoder(TraceEntry)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                entries.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise ConfigError(f"--trace {name}, line {number}: {error}") from None
    if not entries:
        raise ConfigError(f"--trace {name}: holds no request")
    return entries
