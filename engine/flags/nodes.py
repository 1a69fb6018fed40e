"""Ranks per machine (--nnodes) and connections between machines.

Ranks are numbered by stage. Node 0 has the leader's block, so that it always serves.
"""

from typing import NamedTuple

from engine.config import EngineConfig, ParallelFlags
from service.flags import ConfigError

PLAN, ENGINE, STATES = "plan", "engine", "states"
SUM = "sum"


class Wire(NamedTuple):
    """A connection of two ranks on different machines.

    `kind`: plan (leader to follower), engine (to its transfer engine), states (to the next stage),
    or "sum 0", "sum 1", ... (rounds of an all-reduce).
    """

    kind: str
    first: int
    second: int

    @property
    def name(self) -> str:
        return f"{self.kind} of ranks {self.first} and {self.second}"

    @property
    def is_the_leaders(self) -> bool:
        return self.kind in (PLAN, ENGINE)

    def end_of(self, rank: int) -> str:
        """States go "after" and come from "before"."""
        if self.kind != STATES:
            return self.kind
        return "after" if rank == self.first else "before"


def leader_of(config: ParallelFlags) -> int:
    """The first rank of the last stage, which has the logits."""
    return config.tp_size * (config.pp_size - 1)


def ranks_of(node: int, config: EngineConfig) -> range:
    first = (leader_of(config) // config.ranks_here + node) % config.nnodes * config.ranks_here
    return range(first, first + config.ranks_here)


def node_of(rank: int, config: EngineConfig) -> int:
    return (rank // config.ranks_here - leader_of(config) // config.ranks_here) % config.nnodes


def wires(config: EngineConfig, *, transfers: bool) -> list[Wire]:
    """`transfers`: every rank has a transfer engine."""
    leader, far = leader_of(config), [rank for node in range(1, config.nnodes) for rank in ranks_of(node, config)]
    found = [Wire(kind, leader, rank) for kind in (PLAN, ENGINE)[: 1 + transfers] for rank in far]
    if config.sums_span_nodes:
        return found + _of_sums(config)
    nexts = [(rank, rank + config.tp_size) for rank in range(config.num_ranks - config.tp_size)]
    return found + [Wire(STATES, *pair) for pair in nexts if node_of(pair[0], config) != node_of(pair[1], config)]


def _of_sums(config: EngineConfig) -> list[Wire]:
    """Round n of an all-reduce joins machines whose numbers differ in bit n."""
    found = []
    for number in range(config.nnodes.bit_length() - 1):
        apart = config.ranks_here << number
        pairs = [(rank, rank ^ apart) for rank in range(config.num_ranks) if not rank & apart]
        found += [Wire(f"{SUM} {number}", *pair) for pair in pairs]
    return found


def wires_at(node: int, config: EngineConfig, *, transfers: bool) -> dict[Wire, int]:
    found = {}
    for wire in wires(config, transfers=transfers):
        ends = node_of(wire.first, config), node_of(wire.second, config)
        if node in ends:
            found[wire] = ends[0] if ends[1] == node else ends[1]
    return found


def address_of(config: ParallelFlags) -> tuple[str, int]:
    """The rendezvous address. Raises ConfigError."""
    host, _, port = (config.dist_init_addr or "").rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            f"--dist-init-addr {config.dist_init_addr}: --nnodes {config.nnodes} needs HOST:PORT of node 0, the same on all "
            "machines"
        )
    return host.strip("[]"), int(port)


def check_nodes(config: EngineConfig) -> None:
    """Raises ConfigError for indivisible ranks and for flags of single nodes."""
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
        raise ConfigError(f"--nnodes {nodes}: {sizes} would cut a stage; choose a --pp-size that {nodes} divides, or 1")
    if config.sums_span_nodes and nodes & (nodes - 1):
        raise ConfigError(
            f"--nnodes {nodes}: sums over machines need 2, 4, 8 or more powers of two of them; choose another, or split by "
            "--pp-size"
        )
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


def named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
