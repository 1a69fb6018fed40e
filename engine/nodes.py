"""Which ranks a machine holds where --nnodes has them share a model, and which pairs of ranks on two machines are connected. Never torch.

Ranks are numbered stage by stage. Node 0 has the leader's block of them, so that it is the one that serves, whatever is split.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.config import EngineConfig
from service.flags import ConfigError, option_of

# What the machines may differ in: files are compared by their fingerprints, seeds are the leader's.
OF_A_NODE = frozenset({
    "model_path", "revision", "served_model_name", "random_seed", "num_threads", "node_rank", "mem_fraction_static",
    "prefault_kv", "dist_timeout_s", "watchdog_timeout_s",
})  # fmt: skip


class Wire(NamedTuple):
    """A connection of two ranks. `kind`: plan (leader and follower), sum, states (from stage to stage)."""

    kind: str
    on_node_0: int
    on_node_1: int

    @property
    def name(self) -> str:
        return f"{self.kind} of ranks {self.on_node_0} and {self.on_node_1}"

    def at(self, node: int) -> tuple[int, str]:
        """The rank there, and what it calls its end: the stages before it are on node 1."""
        if self.kind != "states":
            return (self.on_node_0, self.on_node_1)[node], self.kind
        return ((self.on_node_0, "before"), (self.on_node_1, "after"))[node]


def leader_of(config: EngineConfig) -> int:
    """The rank whose process schedules: the first of the last stage, which has the logits."""
    return config.tp_size * (config.pp_size - 1)


def ranks_of(node: int, config: EngineConfig) -> range:
    first = (leader_of(config) // config.ranks_here + node) % config.nnodes * config.ranks_here
    return range(first, first + config.ranks_here)


def wires(config: EngineConfig) -> list[Wire]:
    """All between node 0 and node 1, in the order in which they are made."""
    if config.nnodes == 1:
        return []
    near, far = ranks_of(0, config), ranks_of(1, config)
    found = [Wire("plan", leader_of(config), rank) for rank in far]
    if config.sums_span_nodes:
        return found + [Wire("sum", *pair) for pair in zip(near, far, strict=True)]
    last = range(far.stop - config.tp_size, far.stop)  # the stage whose states go to the leader's machine
    return found + [Wire("states", rank + config.tp_size, rank) for rank in last]


def address_of(config: EngineConfig) -> tuple[str, int]:
    """Where the machines meet. Raises ConfigError."""
    host, _, port = (config.dist_init_addr or "").rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            f"--dist-init-addr {config.dist_init_addr}: --nnodes {config.nnodes} needs HOST:PORT of node 0, the same on all "
            "machines"
        )
    return host.strip("[]"), int(port)


def check_nodes(config: EngineConfig) -> None:
    """Raises ConfigError for ranks that the machines cannot divide, and for what needs one machine."""
    nodes = config.nnodes
    if config.node_rank >= nodes:
        raise ConfigError(f"--node-rank {config.node_rank}: --nnodes {nodes} has nodes 0 to {nodes - 1}")
    if nodes == 1:
        return
    address_of(config)
    sizes = f"--tp-size {config.tp_size}, --pp-size {config.pp_size}"
    if config.num_ranks % nodes:
        raise ConfigError(f"--nnodes {nodes}: does not divide the {config.num_ranks} ranks of {sizes}")
    if config.pp_size > 1 and config.pp_size % nodes:
        raise ConfigError(f"--nnodes {nodes}: {sizes} would cut a stage in two; choose an even --pp-size, or 1")
    if config.sums_span_nodes and config.ranks_here & (config.ranks_here - 1):
        raise ConfigError(
            f"--nnodes {nodes}: {config.ranks_here} ranks a node of {sizes}; sums need 1, 2, 4, 8 or more powers of two: "
            "choose another --tp-size, or split by --pp-size"
        )
    if config.dp_size > 1:
        raise ConfigError(
            f"--dp-size {config.dp_size}: not with --nnodes {nodes}; start more workers behind the router"
        )
    if config.device == "cuda":
        raise ConfigError(f"--nnodes {nodes}: ranks on several machines are for CPUs yet; give --device cpu")
    if config.sums_span_nodes and config.stream == "threaded" and not config.disable_overlap_schedule:
        raise ConfigError(
            f"--stream threaded: plans a step before the tokens of the last one are there, which --tp-size over --nnodes "
            f"{nodes} cannot; leave the flag out, or split by --pp-size"
        )


def check_same(first: Mapping[str, Any], second: Mapping[str, Any], *, ranks: range) -> None:
    """Compare the flags of node 0 and node 1, which holds `ranks`. Raises ConfigError that names one with both values."""
    for field in dataclasses.fields(EngineConfig):
        mine, theirs = first.get(field.name), second.get(field.name)
        if field.name not in OF_A_NODE and mine != theirs:
            raise ConfigError(
                f"{option_of(field)}: node 0 has {_shown(mine)}, node 1 ({named(ranks)}) {_shown(theirs)}; give all nodes the "
                "same flags but for --node-rank"
            )


def named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _shown(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
