"""How the two machines of a group meet at --dist-init-addr: node 0 listens, node 1 dials, once for each connection that they need.

    node 1 --control--> node 0:   NodeHello (version, flags)
    node 0 --control--> node 1:   NodeWelcome, or NodeRefused; then node 1 dials for each of `wires` (engine/nodes.py); NodeBye at the end

Each connection begins with a proof of the cluster's secret (engine/parallel/meeting.py). The control connection stays: its end of
file without a NodeBye says that the other machine's part has ended.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.nodes import Wire, address_of, check_same, named, ranks_of, wires
from engine.parallel.meeting import MeetingError, dial, listen
from engine.parallel.region_plan import RegionPlan
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed, MessageStream

CONTROL = "nodes 0 and 1"
FLAG = "--dist-init-addr"


class _Frame(msgspec.Struct, frozen=True, tag=True):
    pass


class NodeHello(_Frame, frozen=True):
    """Of node 1. `flags`: of its `EngineConfig`."""

    version: str
    flags: dict[str, Any]


class NodeWelcome(_Frame, frozen=True):
    """`region`: what the ranks of a machine share."""

    region: RegionPlan


class NodeRefused(_Frame, frozen=True):
    """`text`: for the operator, as node 0 says it."""

    text: str


class NodeBye(_Frame, frozen=True):
    """Node 0 has ended in order."""


_DECODER = msgspec.json.Decoder(NodeHello | NodeWelcome | NodeRefused | NodeBye)


class Control:
    """The connection of the two machines' parts. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.peer: str = connection.getpeername()[0]
        self._end = MessageStream(connection)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, frame: _Frame) -> None:
        """Raises ChannelClosed."""
        self._end.put(msgspec.json.encode(frame))

    def receive(self, *, within_s: float | None = None) -> NodeHello | NodeWelcome | NodeRefused | NodeBye:
        """Raises ChannelClosed, also when nothing has come in time."""
        try:
            frame: NodeHello | NodeWelcome | NodeRefused | NodeBye = _DECODER.decode(self._end.get(within_s=within_s))
            return frame
        except msgspec.MsgspecError as error:
            raise ChannelClosed(f"no message of this version ({error})") from None

    def close(self) -> None:
        self._end.close()


@dataclass(frozen=True)
class Met:
    """`wires`: the connections of this machine's ranks."""

    control: Control
    region: RegionPlan
    wires: Mapping[Wire, socket.socket]

    def of_rank(self, rank: int, node: int) -> dict[str, socket.socket]:
        """Its connections for sums and states, by its end of them."""
        ends = ((wire.at(node), sock) for wire, sock in self.wires.items() if wire.kind != "plan")
        return {end: sock for (owner, end), sock in ends if owner == rank}

    def plan_of(self, rank: int) -> socket.socket:
        """Between the leader and `rank` of node 1."""
        return next(sock for wire, sock in self.wires.items() if wire.kind == "plan" and wire.on_node_1 == rank)


@contextmanager
def gathered(config: EngineConfig, region: RegionPlan, *, secret: bytes) -> Iterator[Met]:
    """Wait for node 1, for node 0. Closes all at the end. Raises ConfigError.

    `config`: as its flags say; what is resolved may depend on the machine.
    """
    deadline_s = time.monotonic() + config.dist_timeout_s
    with ExitStack() as stack:
        server = stack.enter_context(_server(config))

        def meet(name: str) -> socket.socket:
            left_s = max(0.0, deadline_s - time.monotonic())
            return stack.enter_context(listen(server, secret=secret, group=name, within_s=left_s))

        try:
            control = Control(meet(CONTROL))
            _admit(config, control, region, within_s=max(0.1, deadline_s - time.monotonic()))
            found = {wire: meet(wire.name) for wire in wires(config)}
        except (MeetingError, ChannelClosed) as error:
            raise ConfigError(
                f"--dist-timeout {config.dist_timeout_s:g}: node 1 of {config.nnodes} ({named(ranks_of(1, config))}) did not "
                f"come to {FLAG} {config.dist_init_addr} ({error}); start it with the same flags and --node-rank 1"
            ) from None
        server.close()
        yield Met(control, region, found)


def _admit(config: EngineConfig, control: Control, region: RegionPlan, *, within_s: float) -> None:
    """Raises ConfigError for other flags on node 1, which gets the same text, and ChannelClosed."""
    hello = control.receive(within_s=within_s)
    if not isinstance(hello, NodeHello):
        raise ChannelClosed(f"{type(hello).__name__} from node 1")
    try:
        if hello.version != (own := _version()):
            raise ConfigError(
                f"--nnodes {config.nnodes}: node 0 runs Tandem {own}, node 1 {hello.version}; install one"
            )
        check_same(_flags(config), hello.flags, ranks=ranks_of(1, config))
    except ConfigError as error:
        control.send(NodeRefused(str(error)))
        raise
    control.send(NodeWelcome(region))


@contextmanager
def joined(config: EngineConfig, *, secret: bytes) -> Iterator[Met]:
    """Meet node 0, for node 1. Closes all at the end. Raises ConfigError."""
    host, port = address_of(config)
    deadline_s = time.monotonic() + config.dist_timeout_s
    with ExitStack() as stack:

        def meet(name: str) -> socket.socket:
            left_s = max(0.0, deadline_s - time.monotonic())
            return stack.enter_context(dial(host, port, secret=secret, group=name, within_s=left_s))

        try:
            control = Control(meet(CONTROL))
            control.send(NodeHello(_version(), _flags(config)))
            answer = control.receive(within_s=max(0.1, deadline_s - time.monotonic()))
            if isinstance(answer, NodeRefused):
                raise ConfigError(answer.text)
            if not isinstance(answer, NodeWelcome):
                raise ChannelClosed(f"{type(answer).__name__} from node 0")
            found = {wire: meet(wire.name) for wire in wires(config)}
        except (MeetingError, ChannelClosed) as error:
            raise ConfigError(
                f"--dist-timeout {config.dist_timeout_s:g}: node 0 is not at {FLAG} {config.dist_init_addr} ({error}); its log "
                "may say why"
            ) from None
        yield Met(control, answer.region, found)


def _server(config: EngineConfig) -> socket.socket:
    """Raises ConfigError."""
    host, port = address_of(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"{FLAG} {config.dist_init_addr}: node 0 cannot listen there: {error.strerror or error}; give an address of its "
            "machine and a free port, the same on all nodes"
        ) from None


def _flags(config: EngineConfig) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(config), type=dict[str, Any])


def _version() -> str:
    return metadata.version("tandem-serve")
