"""Flags of the hierarchical cache: what follows from them, and where a Mooncake Store is."""

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from engine.config import CacheFlags, EngineConfig, ModelFlags
from service.flags import ConfigError

BACKEND, EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
VARIABLES = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
}
MIN_SEGMENT = 16 << 20
UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
# Host prefixes that a step loads for waiting requests, in 10^6 bytes: 1.3 ms of a PCIe 5 bus, as a step waits for its
# copies. On a CPU a load runs in the step: starting early gains nothing.
LOAD_AHEAD_MB = {"cpu": 0, "cuda": 64}
MASTER_S = 3.0  # to reach it at start


class MooncakeStoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang's names. global_segment_size: memory that this worker gives to the store.

    timeout_s: a longer call pauses the store for pause_s, and its requests compute.
    """

    master_server_address: str
    local_hostname: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: str | int = "1gb"
    protocol: str = "tcp"
    device_name: str = ""
    replica_num: Annotated[int, msgspec.Meta(ge=1)] = 1
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    pause_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0

    @property
    def segment_bytes(self) -> int:
        """Raises ConfigError."""
        text = str(self.global_segment_size).strip().lower()
        digits = text.rstrip("bkmg ")
        unit = UNITS.get(text[len(digits) :].strip())
        if unit is None or not digits.isdigit():
            raise ConfigError(f'{EXTRA}: global_segment_size: give bytes or such as "4gb", got {text!r}')
        found = int(digits) * unit
        if 0 < found < MIN_SEGMENT:
            raise ConfigError(f"{EXTRA}: global_segment_size: Mooncake takes 0, or 16mb and more, got {text!r}")
        return found


def mooncake_store(config: CacheFlags, environ: Mapping[str, str] = os.environ) -> MooncakeStoreConfig:
    """The flag's fields go before a file's, these before variables. Raises ConfigError."""
    found: dict[str, Any] = {field: environ[name] for name, field in VARIABLES.items() if name in environ}
    try:
        if CONFIG_PATH in environ:
            found |= msgspec.json.decode(Path(environ[CONFIG_PATH]).read_bytes(), type=dict[str, Any])
        found |= msgspec.json.decode(config.hicache_storage_backend_extra_config or "{}", type=dict[str, Any])
        store = msgspec.convert(found, MooncakeStoreConfig)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f'{EXTRA}: give JSON such as {{"master_server_address": "127.0.0.1:50051"}}, or set MOONCAKE_MASTER: {error}'
        ) from None
    host, _, port = store.master_server_address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{EXTRA}: master_server_address: give HOST:PORT, got {store.master_server_address!r}")
    assert store.segment_bytes >= 0
    return store


def local_address(master: str) -> str:
    """Our address towards the master; without one its client would hang. Raises ConfigError."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=MASTER_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{BACKEND} mooncake: no mooncake_master answers at {master} ({error}); start it first"
        ) from error


def resolve_hicache(config: EngineConfig) -> EngineConfig:
    """Raises ConfigError."""
    backend, directory = config.hicache_storage_backend, config.hicache_storage_dir
    if not config.enable_hierarchical_cache:
        for name, given in (("--hicache-storage-dir", directory is not None), (BACKEND, backend is not None)):
            if given:
                raise ConfigError(f"{name}: needs --enable-hierarchical-cache")
        return config
    if config.disable_radix_cache:
        raise ConfigError("--enable-hierarchical-cache: needs the radix cache; leave --disable-radix-cache out")
    if backend == "file" and directory is None:
        raise ConfigError(f"{BACKEND} file: needs --hicache-storage-dir")
    if backend == "mooncake":
        if directory is not None:
            raise ConfigError(f"--hicache-storage-dir: is for files, {BACKEND} is mooncake; leave one of them out")
        mooncake_store(config)
    elif config.hicache_storage_backend_extra_config is not None:
        raise ConfigError(f"{EXTRA}: is for {BACKEND} mooncake; leave it out")
    policy = config.hicache_storage_prefetch_policy
    if policy == "auto":
        policy = "timeout" if backend == "mooncake" else "best_effort"
    return replace(
        config, hicache_storage_backend=backend or (directory and "file"), hicache_storage_prefetch_policy=policy
    )


def host_pages(
    config: CacheFlags, *, num_pages: int, page_bytes: int, free_bytes: int, slots: int = 0, slot_bytes: int = 0
) -> tuple[int, int]:
    """Pages and states. Raises ConfigError."""
    name, value = "--hicache-ratio", config.hicache_ratio
    pages, states = int(num_pages * value), int(slots * value)
    if config.hicache_size > 0:
        name, value = "--hicache-size", config.hicache_size
        size_bytes, all_bytes = int(value * 1e9), num_pages * page_bytes + slots * slot_bytes
        pages, states = size_bytes * num_pages // all_bytes, size_bytes * slots // all_bytes
    if pages < 1 or states < min(1, slots):
        beside = f" and state of {slot_bytes}" if slots else ""
        raise ConfigError(f"{name} {value}: holds no page of {page_bytes}{beside} bytes; raise it")
    used_bytes = pages * page_bytes + states * slot_bytes
    if used_bytes > free_bytes:
        raise ConfigError(
            f"{name} {value}: {used_bytes / 1e9:.1f} GB of host memory, {free_bytes / 1e9:.1f} are free; lower it"
        )
    return pages, states


def ahead_pages(config: ModelFlags, *, page_bytes: int) -> int:
    size_bytes = LOAD_AHEAD_MB[config.device] * 10**6
    return max(1, size_bytes // page_bytes) if size_bytes else 0
