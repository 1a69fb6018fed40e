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
    """`shape`: row-major. `start`: byte in the file."""

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


# ---- EOS tokens of a GGUF file by llama.cpp's rule (llama-vocab.cpp).

# EOS texts in any family.
TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>"}
    | {"<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>"}
    | {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}
)
# EOS of fill-in-the-middle: the metadata's, or the first known text.
_OF_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# If all of the first exist, the second is no EOS.
_NO_ENDS = (
    (("<|return|>", "<|call|>"), "<|end|>"),
    (("<|flush|>", "<|calls|>"), "<|end|>"),
    (("<|tool_response>",), "</s>"),
)


def end_ids(file: GGUFFile) -> list[Any]:
    """Ids from metadata are unchecked."""
    ids = {token: index for index, token in enumerate(file.values("tokenizer.ggml.tokens", str))}
    named = [_named(file, kind) for kind in ("eos", "eot", "eom")]
    named += [_of_files(file, kind, ids) for kind in _OF_FILES]
    no_ends = {text for needed, text in _NO_ENDS if all(one in ids for one in needed)}
    return [*(id for id in named if id is not None), *(ids[text] for text in sorted(TEXTS - no_ends) if text in ids)]


def _named(file: GGUFFile, kind: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{kind}_token_id")


def _of_files(file: GGUFFile, kind: str, ids: Mapping[str, int]) -> Any:
    found = _named(file, kind)
    return next((ids[text] for text in _OF_FILES[kind] if text in ids), None) if found is None else found


# ---- GGUF metadata as config.json fields.

# general.architecture -> class in engine.model_files.families.FAMILIES. Mistral models are "llama",
# too.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1: a divisor per pair of a head
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def config_fields(file: GGUFFile) -> dict[str, Any]:
    """Raises ConfigError."""
    name = file.value("general.architecture", str, "")
    if name not in ARCHITECTURES:
        raise file.error(
            f"general.architecture is {name!r}, which is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    keys = _Keys(file, name)
    if keys.get("expert_count", 0):
        raise file.error(f"{name}.expert_count: mixture-of-experts models are not supported; take a dense one")
    if EMBEDDING not in file.tensors:
        raise file.error(f"tensor {EMBEDDING} is missing; is this a whole model? download it again")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    if _rotary_share(keys, heads=heads, hidden=hidden) != 1.0:
        raise file.error(
            f"{name}.rope.dimension_count: partial RoPE is not supported in GGUF files; take the checkpoint"
        )
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": keys.get("attention.key_length"),
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _rope(keys, file),
        "dtype": stored_dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(file),
    }


def stored_dtype(file: GGUFFile) -> str:
    """Quantized matrices count as bfloat16."""
    kinds = {tensor.storage.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _rope(keys: "_Keys", file: GGUFFile) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base", 10000.0), "rope_type": "default"}
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor")
    if keys.get("rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", keys.get("rope.scale_linear")
    if kind == "none" or factor == 1.0:
        return rope | _rope_factors(file)
    original = keys.get("rope.scaling.original_context_length")
    return rope | {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _rope_factors(file: GGUFFile) -> dict[str, Any]:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return {}
    if tensor.storage.name != "F32" or len(tensor.shape) != 1:
        raise file.error(f"tensor {ROPE_FACTORS} must be one row of F32; convert the model again")
    with file.path.open("rb") as opened:
        opened.seek(tensor.start)
        raw = opened.read(tensor.size_bytes)
    return {"rope_type": "factors", "factors": list(struct.unpack(f"<{tensor.shape[0]}f", raw))}


def _rotary_share(keys: "_Keys", *, heads: Any, hidden: Any) -> float:
    turned = keys.get("rope.dimension_count")
    if not all(isinstance(value, int) and value > 0 for value in (turned, heads, hidden)):
        return 1.0
    dim = keys.get("attention.key_length", hidden // heads)
    return float(turned / dim) if isinstance(dim, int) and dim > 0 else 1.0  # their reader checks the fields


class _Keys:
    """Metadata of one architecture: `need("block_count")` reads "llama.block_count"."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def get(self, name: str, default: Any = None) -> Any:
        """Get a value, or the equal value of all layers."""
        value = self._file.metadata.get(f"{self._prefix}.{name}", default)
        return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self._file.error(f"metadata {self._prefix}.{name} is missing; convert the model again")
        return value
