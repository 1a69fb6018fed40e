"""GGUF headers: metadata and tensor locations. Never torch.

`gguf.GGUFReader` is slow (2 s for 49,000 tokens) and reads past the end of a truncated file.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

from service.flags import ConfigError

Value = TypeVar("Value")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
SPLIT_NAME = re.compile(r".*-(\d{5})-of-(\d{5})\.gguf$")

# Metadata value types: struct codes, and two of variable size.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Storage:
    """A tensor type: `elements` of a row take `size_bytes`."""

    name: str
    elements: int
    size_bytes: int


# Supported types, by number in the file.
STORAGES = {
    0: Storage("F32", 1, 4),
    1: Storage("F16", 1, 2),
    2: Storage("Q4_0", 32, 18),
    3: Storage("Q4_1", 32, 20),
    8: Storage("Q8_0", 32, 34),
    12: Storage("Q4_K", 256, 144),
    13: Storage("Q5_K", 256, 176),
    14: Storage("Q6_K", 256, 210),
    30: Storage("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a GGUF file. `shape`: row-major. `start`: byte in the file."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header: tensors have supported types and lie inside the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {message}")

    def value(self, key: str, kind: type[Value], default: Value) -> Value:
        """A metadata value. Raises ConfigError for another type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(
                f"metadata {key} must be of type {kind.__name__}, got {value!r:.100}; convert the model again"
            )
        return value

    def values(self, key: str, kind: type[Value]) -> tuple[Value, ...]:
        """A metadata array, perhaps empty. Raises ConfigError for another type."""
        values = self.value(key, tuple, ())
        if not all(isinstance(value, kind) for value in values):
            raise self.error(f"metadata {key} must be an array of type {kind.__name__}; convert the model again")
        return values


def open_gguf(path: str | Path) -> GGUFFile:
    """The header of `path`, cached while unchanged. Raises ConfigError of one line."""
    path = Path(path)
    if split := SPLIT_NAME.match(path.name):
        raise ConfigError(
            f"{path}: is part {int(split[1])} of {int(split[2])} of a split model; "
            "join the parts first: llama-gguf-split --merge FIRST_PART OUTPUT"
        )
    try:
        status = path.stat()
        return _open(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from None


@lru_cache(maxsize=2)
def _open(path: Path, size_bytes: int, _mtime_ns: int) -> GGUFFile:
    if not size_bytes:
        raise ConfigError(f"{path}: is empty; download it again")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return _Header(path, data).read()


class _Header:
    def __init__(self, path: Path, data: mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def read(self) -> GGUFFile:
        if self._data[:4] != MAGIC:
            raise self._error("is not a GGUF file (it does not begin with GGUF); give a .gguf file or a directory")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise self._error(f"is GGUF version {version}; supported: 2 and 3, little-endian; convert the model again")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text("a metadata key")
            metadata[key] = self._value(key, self._number("I"))
        if metadata.get("split.count", 0) > 1:
            raise self._error("is one part of a split model; join the parts first: llama-gguf-split --merge")
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"general.alignment is {alignment!r}; it must be a positive integer; download it again")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        return GGUFFile(path=self._path, metadata=metadata, tensors=tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        storage = STORAGES.get(kind)
        if storage is None:
            known = ", ".join(known.name for known in STORAGES.values())
            raise self._error(
                f"tensor {name} has type {_type_name(kind)}, which is not supported; take a file whose tensors are "
                f"{known} (for example the Q8_0 or Q4_K_M file of the same model)"
            )
        if not shape or shape[-1] % storage.elements:
            raise self._error(f"tensor {name} of shape {list(shape)} cannot be {storage.name}; download the file again")
        size_bytes = math.prod(shape) // storage.elements * storage.size_bytes
        if start + size_bytes > len(self._data):
            raise self._error(
                f"is cut off: tensor {name} ends at byte {start + size_bytes}, the file at {len(self._data)}; "
                "download it again"
            )
        return TensorInfo(name, shape, storage, start, size_bytes)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor name")
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {dimensions} dimensions; the file is corrupt; download it again")
        shape = self._numbers("Q", dimensions)[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            return self._number(self._code(key, kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return tuple([self._text(key) for _ in range(count)])
        return self._numbers(self._code(key, kind), count)

    def _code(self, key: str, kind: int) -> str:
        if kind not in _CODES:
            raise self._error(f"metadata {key!r} has the unknown type {kind}; the file is corrupt; download it again")
        return _CODES[kind]

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self._check_room(size)
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += size
        return values

    def _text(self, what: str) -> str:
        size = self._number("Q")
        self._check_room(size)
        raw = self._data[self._at : self._at + size]
        self._at += size
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8; the file is corrupt; download it again") from None

    def _check_room(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise self._error(
                f"is cut off or corrupt: its header goes beyond byte {len(self._data)}; download it again"
            )

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path}: {message}")


def _type_name(kind: int) -> str:
    import gguf  # only to put a name to what cannot be served

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return str(kind)
