"""Identity of this engine's KV, without which no process finds its pages."""

import hashlib
from itertools import groupby
from pathlib import Path

from engine.config import DUMMY, EngineConfig
from engine.core.page_keys import KVIdentity
from engine.kv.held import HeldKV
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import ModelConfig
from service.flags import ConfigError

LAYOUT_VERSION = 2  # of engine/kv/kv_pool.py
SAMPLE_BYTES, NUM_SAMPLES = 16 << 10, 64  # per file of a checkpoint


def kv_identity(
    pool: KVPool,
    model: ModelConfig,
    *,
    dtype: str,
    version: str,
    fingerprint: str,
    held: HeldKV | None = None,
    tp_size: int = 1,
    reduce_units: int = 0,
    whole_experts: bool = False,
) -> KVIdentity:
    """Build the identity from weights, and the part `held` by `pool`.

    `tp_size` (or `reduce_units`) and `whole_experts` change the order of sums, and so last bits.
    """
    held = held or pool.held
    layers = "+".join(
        f"{len(list(group))}x{kv_heads}x{head_dim}:{kind}"
        for (kv_heads, head_dim, kind), group in groupby((s.num_kv_heads, s.head_dim, s.kept_name) for s in pool.specs)
    )
    return KVIdentity(
        layout=hashed_if_long(
            f"v{LAYOUT_VERSION}/{pool.device.type}/{layers}"
            f"/units {held.units.start}-{held.units.stop} of {held.num_units}"
            f"/layers {held.layers.start}-{held.layers.stop} of {held.num_layers}"
            f"/sums of {f'{reduce_units} units' if reduce_units else f'{tp_size} ranks'}"
            f"{'/whole experts' if whole_experts and not reduce_units else ''}"
        ),
        dtype=dtype,
        page_size=pool.page_size,
        page_bytes=pool.page_bytes,
        model=model.signature(),
        weights=f"{version[:64]}/{fingerprint}",
    )


def hashed_if_long(text: str) -> str:
    return text if len(text) <= 128 else hashlib.sha256(text.encode()).hexdigest()


def fingerprint(model_path: str, *, dummy: bool = False) -> str:
    """Hash names, sizes, times and content samples of a checkpoint. Raises ConfigError.

    Full reads would take minutes, and images may give all files one time.
    """
    return _hash(model_path, times=True, dummy=dummy)[:32]


def fingerprint_of(config: EngineConfig) -> str:
    """Fingerprints of model and drafter, both in pages. Raises ConfigError."""
    dummy, drafter = config.load_format == DUMMY, config.speculative_draft_model_path
    own = fingerprint(config.model_path, dummy=dummy)
    return own if drafter is None else f"{own}+{fingerprint(drafter, dummy=dummy)}"


def weights_number(model_path: str, *, dummy: bool = False) -> int:
    """Hash to 64 bits without times, equal for copies elsewhere. Raises ConfigError."""
    return int(_hash(model_path, times=False, dummy=dummy)[:16], 16)


def _hash(model_path: str, *, times: bool, dummy: bool) -> str:
    digest = hashlib.sha256(DUMMY.encode() if dummy else b"")
    try:
        for file in _files(Path(model_path)):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns if times else ''}\0".encode())
            with file.open("rb") as opened:
                for at in range(0, status.st_size, max(SAMPLE_BYTES, status.st_size // NUM_SAMPLES)):
                    opened.seek(at)
                    digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{model_path}: {error}") from error
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted([*model.glob("*.safetensors"), model / "config.json"])
