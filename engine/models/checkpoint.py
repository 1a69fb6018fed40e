"""Reads checkpoint tensors from safetensors (memory-mapped) or GGUF.

Never unpickles. Reads only the rank's rows and columns.
"""

import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm  # type: ignore[import-untyped]

from engine.gguf.file import open_gguf
from engine.kernels.tape import Staging
from engine.kv.kv_pool import DTYPES
from engine.model_files.stored_weights import StoredWeights
from engine.model_files.tensor_names import names_in_files
from engine.models.dummy_weights import DummyTensors
from engine.models.quantized_tensors import QuantizedTensors, keeps_packed, packed_gguf
from engine.parallel.layout import Extent, cut_of
from engine.quant.integers import Integers, stacked
from service.flags import ConfigError

if TYPE_CHECKING:
    from engine.gguf.tensors import GGUFTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHANGED = "new tensors"  # in place of a file in errors
LINE_EVERY_S = 10.0  # between two progress lines of the log
WATCHED_EVERY_S = 1.0  # the same, where a display reads them

# Buffers that old exporters stored with the weights; the config determines them.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq$")

log = logging.getLogger(__name__)


def is_derived(name: str) -> bool:
    """True for a tensor that config.json determines, which is not read."""
    return _DERIVED.match(name) is not None


class Checkpoint:
    """The tensors of `model_path`, each taken once. A context manager.

    `progress`: the load is watched (`LoadProgress`). `stored`: quantization of the files. `dummy`:
    generate float weights. `changed`: safetensors files by canonical names, whose tensors replace
    those of `model_path`, later ones first. Raises ConfigError naming tensor and file.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        device: str,
        progress: bool,
        stored: StoredWeights | None = None,
        dummy: bool = False,
        changed: Sequence[str] = (),
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: not supported; supported: {', '.join(DTYPES)}")
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self.device = torch.device(device)
        self.is_dummy = dummy
        self._packs_gguf = not dummy and Path(model_path).is_file() and keeps_packed(self.device, self.dtype)
        self._tensors = (
            _open_dummies(model_path, changed) if dummy else _open_tensors(Path(model_path), stored, changed)
        )
        self._staging = Staging()
        self._opened, self._stamp = (model_path, dtype, device, stored, changed), _stamp(model_path, changed)
        self._left = {name for name in self._tensors.names() if not is_derived(name)}
        self._progress = LoadProgress(len(self._left), watched=progress)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.close()
        self._staging.close()
        self._tensors.close()

    def again(self) -> "Checkpoint":
        """Open the same files. Raises ConfigError if they changed."""
        path, dtype, device, stored, changed = self._opened
        if _stamp(path, changed) != self._stamp:
            raise ConfigError(f"{path}: its files are not those that were loaded; update the weights, or restore them")
        own: dict[str, Any] = {"stored": stored, "dummy": self.is_dummy, "changed": changed}
        return Checkpoint(path, dtype=dtype, device=device, progress=False, **own)

    def take(self, name: str, shape: Sequence[Extent], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor. `shape`: expected; a `Cut` takes a part."""
        return self.take_rows([name], [shape[0]], shape[1:], dtype=dtype)

    def take_rows(
        self,
        names: Sequence[str],
        rows: Sequence[Extent],
        rest: Sequence[Extent],
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Tensors of shapes [rows[i], *rest], concatenated.

        Names may repeat. "NAME[3]": the fourth tensor in the stack NAME.
        """
        cuts = [[cut_of(extent) for extent in (count, *rest)] for count in rows]
        fills = [
            self._tensors.open(name, [cut.total for cut in of_one], [cut.taken for cut in of_one])
            for name, of_one in zip(names, cuts, strict=True)
        ]
        counts, sizes = [len(of_one[0]) for of_one in cuts], [len(cut) for cut in cuts[0][1:]]
        merged = self._staging.empty([sum(counts), *sizes], dtype=dtype or self.dtype, device=self.device)
        for part, fill in zip(torch.split(merged, counts), fills, strict=True):
            fill(part)
        self._leave({name.partition("[")[0] for name in names})
        return merged

    def has(self, name: str) -> bool:
        """False for dummy weights."""
        return name in self._left

    def shape_of(self, name: str) -> list[int]:
        assert isinstance(self._tensors, Safetensors | QuantizedTensors | OverDummies), "a GGUF file"
        return self._tensors.shape_of(name)

    def take_bytes(self, name: str, shape: Sequence[Extent]) -> torch.Tensor:
        """A packed tensor (uint8) on the host, cut like `take`."""
        cuts = [cut_of(extent) for extent in shape]
        fill = self._tensors.open(name, [cut.total for cut in cuts], [cut.taken for cut in cuts])
        taken = torch.empty([len(cut) for cut in cuts], dtype=torch.uint8)
        fill(taken)
        self._leave({name})
        return taken

    def take_ids(self, name: str, count: int) -> torch.Tensor:
        """`count` integers as int64."""
        assert isinstance(self._tensors, Safetensors), "a drafter's weights are floats"
        found = self._tensors.stored(name)
        if list(found.shape) != [count] or found.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                f"{self._tensors.where(name)}: tensor {name} is {str(found.dtype).removeprefix('torch.')} {list(found.shape)}, and "
                f"must be {count} whole numbers; check that both belong together"
            )
        self._leave({name})
        return found.to(torch.int64).to(self.device)

    def take_integers(
        self, names: Sequence[str], rows: Sequence[Extent], inputs: Extent, factors: Sequence[float] = ()
    ) -> Integers | None:
        """`take_rows` of integer matrices with equal groups, otherwise None."""
        columns, parts = cut_of(inputs), []
        for name, cut, factor in zip(names, map(cut_of, rows), factors or [1.0] * len(names), strict=True):
            shape, taken = (cut.total, columns.total), (cut.taken, columns.taken)
            part = self._integers(name, shape, taken)
            if part is None or (parts and not part.stacks_with(parts[0])):
                return None
            parts.append(part.times(factor).to(self.device))
        self._leave(set(names))
        return stacked(parts)

    def _integers(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Integers | None:
        if isinstance(self._tensors, QuantizedTensors):
            return self._tensors.integers(name, shape, taken, self.dtype, device=self.device)
        return packed_gguf(self._tensors, name, shape, taken, self.dtype) if self._packs_gguf else None

    def ignore(self, name: str) -> None:
        """A trailing dot makes `name` a prefix."""
        self._leave({left for left in self._left if left == name or (name.endswith(".") and left.startswith(name))})

    def ignore_all_but(self, prefixes: tuple[str, ...]) -> None:
        self._leave({left for left in self._left if not left.startswith(prefixes)})

    def _leave(self, names: set[str]) -> None:
        self._progress.update(len(self._left & names))
        self._left -= names

    def check_all_taken(self) -> None:
        if self._left:
            name = min(self._left)
            more = f" (and {len(self._left) - 1} more)" if len(self._left) > 1 else ""
            raise ConfigError(
                f"{self._tensors.where(name)}: tensor {name}{more} is not part of the model that "
                f"{self._tensors.described_by} describes; check that both belong together"
            )


def _stamp(model_path: str, changed: Sequence[str]) -> list[tuple[str, int, int]]:
    """Raises ConfigError if a file of `changed` has gone."""
    path = Path(model_path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stamps = [(file.name, status.st_size, status.st_mtime_ns) for file in files if (status := file.stat())]
    try:
        return stamps + [(name, status.st_size, status.st_ino) for name in changed if (status := Path(name).stat())]
    except OSError:
        raise ConfigError(f"{model_path}: its changed tensors were changed again") from None


def _open_dummies(model_path: str, changed: Sequence[str]) -> "DummyTensors | OverDummies":
    dummies = DummyTensors(model_path)
    return OverDummies(dummies, Safetensors(None, changed)) if changed else dummies


def _open_tensors(
    path: Path, stored: StoredWeights | None, changed: Sequence[str]
) -> "Safetensors | QuantizedTensors | GGUFTensors":
    if path.is_file():
        assert not changed, "tensors of a GGUF file cannot be changed"
        from engine.gguf.tensors import GGUFTensors  # the `gguf` package is for GGUF files only

        return GGUFTensors(open_gguf(path))
    files = Safetensors(path, changed)
    return files if stored is None else QuantizedTensors(files, stored)


class Safetensors:
    """model.safetensors in `folder`, or the files in its index; `changed`: as of `Checkpoint`."""

    described_by = "config.json"

    def __init__(self, folder: Path | None, changed: Sequence[str] = ()) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        files = {} if folder is None else _tensor_files(folder, self._files)
        self._name_in_file = names_in_files(files)
        self._file_of = {name: files[there] for name, there in self._name_in_file.items()}
        self._changed = frozenset(map(Path, changed))
        for file in map(Path, changed):
            self._files[file] = _open(file)
            names = self._files[file].keys()
            self._file_of.update(dict.fromkeys(names, file))
            self._name_in_file.update(zip(names, names, strict=True))

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def name_in_file(self, name: str) -> str:
        return self._name_in_file[name]

    def where(self, name: str) -> str:
        file = self._file_of[name]
        return CHANGED if file in self._changed else str(file)

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[torch.Tensor], object]:
        """A function that copies the `taken` part. Raises ConfigError on another shape."""
        name, _, index = name.partition("[")
        source = self._stored(name, index.removesuffix("]"), list(shape))
        source = source[tuple(slice(part.start, part.stop) for part in taken)]
        return lambda out: out.copy_(source)  # a view of the mapped file: pages outside it are not read

    def shape_of(self, name: str) -> list[int]:
        shape: list[int] = self._files[self._file_of[name]].get_slice(self._name_in_file[name]).get_shape()
        return shape

    def close(self) -> None:
        self._files.clear()

    def stored(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        try:
            tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(self._name_in_file[name])
        except (SafetensorError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"{self.where(name)}: tensor {name} cannot be read: {error}; download the file again"
            ) from None
        return tensor

    def _stored(self, name: str, index: str, shape: list[int]) -> torch.Tensor:
        if not index:
            return self._read(name, shape)
        file = self._file_of.get(name)
        count = 0 if file is None else self._files[file].get_slice(self._name_in_file[name]).get_shape()[0]
        return self._read(name, [max(count, int(index) + 1), *shape])[int(index)]

    def _read(self, name: str, shape: list[int]) -> torch.Tensor:
        if name not in self._file_of:
            raise ConfigError(f"{self._folder}: tensor {name} is in no *.safetensors file; download the files again")
        tensor = self.stored(name)
        if list(tensor.shape) != shape:
            raise ConfigError(
                f"{self.where(name)}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {shape}; "
                "check that both belong together"
            )
        if tensor.dtype not in (*DTYPES.values(), torch.uint8):
            raise ConfigError(
                f"{self.where(name)}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}; "
                f"supported: {', '.join(DTYPES)} (config.json names no quantization)"
            )
        return tensor


class OverDummies:
    """Changed tensors, and generated ones for the rest."""

    described_by = "config.json"

    def __init__(self, dummies: DummyTensors, changed: Safetensors) -> None:
        self._dummies = dummies
        self._changed = changed

    def names(self) -> Collection[str]:
        return self._changed.names()

    def where(self, name: str) -> str:
        return CHANGED

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[torch.Tensor], object]:
        is_changed = name.partition("[")[0] in self._changed.names()
        return self._changed.open(name, shape, taken) if is_changed else self._dummies.open(name, shape, taken)

    def shape_of(self, name: str) -> list[int]:
        return self._changed.shape_of(name)

    def close(self) -> None:
        self._changed.close()
        self._dummies.close()


def _tensor_files(folder: Path, files: dict[Path, Any]) -> dict[str, Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        files[single] = _open(single)
        return dict.fromkeys(files[single].keys(), single)
    if not index.is_file():
        raise ConfigError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors checkpoints can be read")
    file_of = {name: folder / file for name, file in _weight_map(index).items()}
    for file in sorted(set(file_of.values())):
        files[file] = _open(file)
    for name, file in file_of.items():
        if name not in files[file].keys():  # noqa: SIM118 (not a mapping)
            raise ConfigError(
                f"{file}: tensor {name} is missing, though {INDEX_FILE} lists it; download the file again"
            )
    return file_of


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{index}: is not a safetensors index with a weight_map; download the file again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map must be an object of tensor names; download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{index}: weight_map: {name}: {file!r} is not a file name in this directory")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing, though {INDEX_FILE} lists it; download the file again") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: is not a readable safetensors file ({error}); download it again") from None


class LoadProgress:
    """By log lines, `watched` by a bar on a terminal."""

    def __init__(self, total: int, *, watched: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._clock = total, 0, clock
        self._begin_s = self._said_s = clock()
        # `tandem up` reads the lines of its workers
        has_bar = watched and sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="Loading weights", unit="tensor", disable=not has_bar)
        self._every_s = math.inf if has_bar else WATCHED_EVERY_S if watched else LINE_EVERY_S

    def update(self, count: int) -> None:
        self._done += count
        self._bar.update(count)
        now_s = self._clock()
        if now_s - self._said_s >= self._every_s:
            self._said_s = now_s
            share, taken_s = 100 * self._done // self._total, now_s - self._begin_s
            log.info("loading weights: %d of %d tensors (%d%%) in %.0f s", self._done, self._total, share, taken_s)

    def close(self) -> None:
        self._bar.close()
