"""Flags that machines of a group must share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.config import DisaggConfig
from engine.config import EngineConfig
from engine.flags.nodes import named, ranks_of
from service.flags import ConfigError, option_of

# Flags that may differ: files are compared by fingerprints, seeds and bootstrap servers are the
# leader's.
OF_A_NODE = frozenset({
    "model_path", "revision", "served_model_name", "random_seed", "num_threads", "node_rank", "mem_fraction_static",
    "prefault_kv", "dist_timeout_s", "watchdog_timeout_s", "cluster_secret_file", "disaggregation_control_host",
    "disaggregation_ib_device", "disaggregation_bootstrap_port", "disaggregation_bootstrap_server",
    "disaggregation_bootstrap_allowed",
})  # fmt: skip


def flags_of(engine: EngineConfig, disagg: DisaggConfig) -> dict[str, Any]:
    return {
        **msgspec.json.decode(msgspec.json.encode(engine), type=dict[str, Any]),
        **msgspec.json.decode(msgspec.json.encode(disagg), type=dict[str, Any]),
    }


def check_same(engine: EngineConfig, disagg: DisaggConfig, theirs: Mapping[str, Any], *, node: int) -> None:
    """Raises ConfigError with the first different flag and both values."""
    mine = flags_of(engine, disagg)
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(DisaggConfig)):
        here, there = mine[field.name], theirs.get(field.name)
        if field.name not in OF_A_NODE and here != there:
            raise ConfigError(
                f"{option_of(field)}: node 0 has {_shown(here)}, node {node} ({named(ranks_of(node, engine))}) "
                f"{_shown(there)}; give all nodes the same flags but for --node-rank"
            )


def _shown(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
