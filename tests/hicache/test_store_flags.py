"""Where a store is, from flag, file and variables; what is wrong is one line; when a breaker opens and closes."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.hicache import MooncakeStoreConfig, mooncake_store, resolve_hicache
from engine.hicache.mooncake_store import connect
from engine.hicache.storage import Breaker
from service.flags import ConfigError
from tools.faults.stores.processes import free_port

MASTER = {"master_server_address": "host:50051"}


def config(extra: Any = None, **flags: Any) -> EngineConfig:
    text = extra if extra is None or isinstance(extra, str) else json.dumps(extra)
    given = {"enable_hierarchical_cache": True, "hicache_storage_backend": "mooncake", **flags}
    return EngineConfig(hicache_storage_backend_extra_config=text, **given)


def test_the_flag_goes_before_the_file_and_the_file_before_variables(tmp_path: Path) -> None:
    file = tmp_path / "store.json"
    file.write_text(json.dumps({**MASTER, "protocol": "rdma", "global_segment_size": "2 GB"}))
    environ = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_DEVICE": "mlx5_0", "MOONCAKE_PROTOCOL": "nvlink"}
    found = mooncake_store(config({"master_server_address": "other:1"}), environ)
    assert found == MooncakeStoreConfig(
        master_server_address="other:1", protocol="rdma", device_name="mlx5_0", global_segment_size="2 GB"
    )
    assert found.segment_bytes == 2 << 30


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"enable_hierarchical_cache": False}, "--hicache-storage-backend: needs --enable-hierarchical-cache"),
        (
            {"hicache_storage_dir": "/tmp/x"},
            "--hicache-storage-dir: is for files, --hicache-storage-backend is mooncake",
        ),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file: needs --hicache-storage-dir"),
        ({"hicache_storage_backend": None, "extra": MASTER}, "extra-config: is for --hicache-storage-backend mooncake"),
        ({"extra": "{"}, "extra-config: give JSON such as"),
        ({"extra": {}}, "set MOONCAKE_MASTER: Object missing required field `master_server_address`"),
        ({"extra": {**MASTER, "master": 1}}, "contains unknown field `master`"),
        ({"extra": {"master_server_address": "host"}}, "master_server_address: give HOST:PORT, got 'host'"),
        ({"extra": {**MASTER, "global_segment_size": "4 parsecs"}}, "global_segment_size: give bytes or such as"),
        ({"extra": {**MASTER, "global_segment_size": "15mb"}}, "Mooncake takes 0, or 16mb and more, got '15mb'"),
        ({"extra": {**MASTER, "timeout_s": 0}}, "timeout_s"),
    ],
)
def test_what_is_wrong_is_named(flags: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ConfigError, match=said):
        resolve_hicache(config(**flags))


def test_policies_are_those_of_the_backend() -> None:
    files = {"hicache_storage_backend": None, "hicache_storage_dir": "/tmp/x"}
    found = [resolve_hicache(config(MASTER)), resolve_hicache(config(**files))]
    assert [one.hicache_storage_backend for one in found] == ["mooncake", "file"]
    assert [one.hicache_storage_prefetch_policy for one in found] == ["timeout", "best_effort"]


def test_without_a_master_a_worker_does_not_start() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"no mooncake_master answers at {address} .*start it first"):
        connect(MooncakeStoreConfig(master_server_address=address))


def test_a_breaker_opens_after_a_failure_and_lets_one_call_try() -> None:
    breaker = Breaker(patience_s=1.0, pause_s=5.0)
    breaker.begin("reads", 10.0)
    breaker.end("reads", 10.5, ok=False)
    assert breaker.is_open(10.5) and breaker.is_open(15.4) and not breaker.is_open(15.5)
    breaker.begin("reads", 16.0)
    breaker.end("reads", 16.1, ok=True)
    assert not breaker.is_open(16.1) and breaker.num_opened == 1


def test_a_breaker_opens_while_a_call_is_late_and_for_its_pause_after_it() -> None:
    breaker = Breaker(patience_s=1.0, pause_s=5.0)
    breaker.begin("writes", 10.0)
    assert not breaker.is_open(10.9) and all(breaker.is_open(now_s) for now_s in range(11, 41))
    breaker.end("writes", 41.0, ok=True)
    assert breaker.is_open(45.9) and not breaker.is_open(46.0) and breaker.num_opened == 1


def test_files_have_no_breaker() -> None:
    breaker = Breaker()
    breaker.begin("writes", 10.0)
    breaker.end("writes", 99.0, ok=False)
    assert not breaker.is_open(99.0) and breaker.num_opened == 0
