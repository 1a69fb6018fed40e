"""Rendezvous of a group's machines: node 0 listens at --dist-init-addr, others dial.

Then ranks connect, once per wire (engine/flags/nodes.py): nodes dial lower numbers, accept higher
ones. Each connection starts with a proof of the cluster secret (engine/parallel/rendezvous.py).
"""

import dataclasses
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import msgspec

from disagg.config import DisaggConfig
from engine.config import EngineConfig
from engine.flags.nodes import ENGINE, PLAN, Wire, address_of, named, ranks_of, wires_at
from engine.parallel.region_plan import RegionPlan
from engine.parallel.rendezvous import PROOF_S, RETRY_S, RendezvousError, dial, listen
from service.flags import ConfigError, option_of
from service.process.message_stream import ChannelClosed, MessageStream

# ---- messages


class _Frame(msgspec.Struct, frozen=True, tag=True):
    pass


class NodeHello(_Frame, frozen=True):
    """First message; nodes of higher numbers connect to `port`.

    Messages between machines of a group, over one permanent connection per node to node 0.

        node -> 0:   NodeHello (version, number, flags)
        0 -> node:   NodeWelcome once all are there, or NodeRefused; NodeBye at the end

    End of file without NodeBye: the other machine's part has ended.
    """

    version: str
    node: int
    port: int
    flags: dict[str, Any]


class NodeWelcome(_Frame, frozen=True):
    """Unique group name, shared memory layout, (host, port) by node."""

    group: str
    region: RegionPlan
    addresses: tuple[tuple[str, int], ...]


class NodeRefused(_Frame, frozen=True):
    """`text` is for the operator."""

    text: str


class NodeBye(_Frame, frozen=True):
    """Node 0 has ended in order."""


_ToRead = NodeHello | NodeWelcome | NodeRefused | NodeBye
_DECODER = msgspec.json.Decoder(_ToRead)


class Control:
    def __init__(self, connection: socket.socket) -> None:
        self.peer: str = connection.getpeername()[0]
        self.here: str = connection.getsockname()[0]
        self._end = MessageStream(connection)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, frame: _Frame) -> None:
        """Raises ChannelClosed."""
        self._end.put(msgspec.json.encode(frame))

    def receive(self, *, within_s: float | None = None) -> _ToRead:
        """Raises ChannelClosed, also on timeout."""
        try:
            frame: _ToRead = _DECODER.decode(self._end.get(within_s=within_s))
            return frame
        except msgspec.MsgspecError as error:
            raise ChannelClosed(f"no message of this version ({error})") from None

    def close(self) -> None:
        self._end.close()


# ---- Flags that machines of a group must share.

# Flags that may differ: files are compared by fingerprints, seeds and bootstrap servers are the
# leader's.
OF_A_NODE = frozenset({
    "model_path", "revision", "served_model_name", "random_seed", "num_threads", "node_rank", "mem_fraction_static",
    "dist_timeout_s", "watchdog_timeout_s", "cluster_secret_file", "disaggregation_control_host",
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
    for flag in (*dataclasses.fields(EngineConfig), *dataclasses.fields(DisaggConfig)):
        here, there = mine[flag.name], theirs.get(flag.name)
        if flag.name not in OF_A_NODE and here != there:
            raise ConfigError(
                f"{option_of(flag)}: node 0 has {_shown(here)}, node {node} ({named(ranks_of(node, engine))}) "
                f"{_shown(there)}; give all nodes the same flags but for --node-rank"
            )


def _shown(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# ---- Connections of one machine in a group, after the rendezvous.


@dataclass(frozen=True)
class Met:
    """Controls by node, and connections of this machine's ranks.

    `host`: our address for the others; node 0's is in its flags.
    """

    controls: Mapping[int, Control]
    region: RegionPlan
    wires: Mapping[Wire, socket.socket]
    host: str | None = None

    def of_rank(self, rank: int) -> dict[str, socket.socket]:
        mine = ((wire, sock) for wire, sock in self.wires.items() if not wire.is_the_leaders)
        return {wire.end_of(rank): sock for wire, sock in mine if rank in (wire.first, wire.second)}

    def plan_of(self, rank: int) -> socket.socket:
        return self._of_leader(PLAN, rank)

    def engine_of(self, rank: int) -> socket.socket:
        return self._of_leader(ENGINE, rank)

    def _of_leader(self, kind: str, rank: int) -> socket.socket:
        return next(sock for wire, sock in self.wires.items() if (wire.kind, wire.second) == (kind, rank))


# ---- node meeting

CONTROL = "nodes"
FLAG = "--dist-init-addr"
MIN_WAIT_S = 0.1


@dataclass(kw_only=True)
class _Meeting:
    engine: EngineConfig
    disagg: DisaggConfig
    secret: bytes
    stack: ExitStack
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = time.monotonic() + self.engine.dist_timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def wires(self) -> dict[Wire, int]:
        return wires_at(self.engine.node_rank, self.engine, transfers=self.disagg.disaggregation_mode != "null")

    def accept(self, server: socket.socket, group: str) -> socket.socket:
        """Raises RendezvousError."""
        return self.stack.enter_context(listen(server, secret=self.secret, group=group, within_s=self.left_s))

    def dial(self, host: str, port: int, group: str) -> socket.socket:
        """Raises RendezvousError."""
        return self.stack.enter_context(dial(host, port, secret=self.secret, group=group, within_s=self.left_s))

    def await_wires(self, server: socket.socket | None, group: str) -> dict[Wire, socket.socket]:
        """Raises RendezvousError."""
        wanted = {wire.name: wire for wire, node in self.wires.items() if node > self.engine.node_rank}
        found: dict[Wire, socket.socket] = {}
        while wanted:
            assert server is not None, "there are higher nodes"
            connection = self.accept(server, group)
            with suppress(ChannelClosed, UnicodeDecodeError):
                if (wire := wanted.pop(MessageStream(connection).get(within_s=PROOF_S).decode(), None)) is not None:
                    found[wire] = connection
        return found

    def dial_wires(self, addresses: tuple[tuple[str, int], ...], group: str) -> dict[Wire, socket.socket]:
        """Raises RendezvousError and ChannelClosed."""
        found = {}
        for wire, node in self.wires.items():
            if node < self.engine.node_rank:
                found[wire] = self.dial(*addresses[node], group)
                MessageStream(found[wire]).put(wire.name.encode())
        return found


@contextmanager
def gathered(engine: EngineConfig, disagg: DisaggConfig, region: RegionPlan, *, secret: bytes) -> Iterator[Met]:
    """Gather all nodes, as node 0, for the block. Raises ConfigError.

    `engine` is unresolved, since resolution may depend on the machine.
    """
    with ExitStack() as stack:
        meeting = _Meeting(engine=engine, disagg=disagg, secret=secret, stack=stack)
        server = stack.enter_context(_server(meeting))
        hellos: dict[int, tuple[Control, NodeHello]] = {}
        try:
            while len(hellos) < engine.nnodes - 1:
                _admit(meeting, Control(meeting.accept(server, CONTROL)), hellos)
            controls = {node: control for node, (control, _) in sorted(hellos.items())}
            addresses = [address_of(engine), *((controls[node].peer, hellos[node][1].port) for node in controls)]
            group = secrets.token_hex(8)
            for control in controls.values():
                control.send(NodeWelcome(group, region, tuple(addresses)))
            found = meeting.await_wires(server, group)
        except (RendezvousError, ChannelClosed) as error:
            raise ConfigError(_missing(engine, set(hellos), error)) from None
        server.close()
        yield Met(controls, region, found)


def _admit(meeting: _Meeting, control: Control, hellos: dict[int, tuple[Control, NodeHello]]) -> None:
    """Raises ConfigError for a misfit, which also gets the text, and ChannelClosed."""
    engine = meeting.engine
    hello = control.receive(within_s=max(MIN_WAIT_S, meeting.left_s))
    if not isinstance(hello, NodeHello):
        raise ChannelClosed(f"{type(hello).__name__} from another node")
    try:
        if hello.version != (own := _version()):
            raise ConfigError(
                f"--nnodes {engine.nnodes}: node 0 runs Tandem {own}, node {hello.node} {hello.version}; install one"
            )
        if not 0 < hello.node < engine.nnodes:
            raise ConfigError(
                f"--nnodes: node 0 has {engine.nnodes}, a node with --node-rank {hello.node} has "
                f"{hello.flags.get('nnodes')}; give all nodes the same flags but for --node-rank"
            )
        check_same(engine, meeting.disagg, hello.flags, node=hello.node)
    except ConfigError as error:
        control.send(NodeRefused(str(error)))
        raise
    if hello.node in hellos:  # restarted, or a duplicate number
        with suppress(ChannelClosed):
            hellos[hello.node][0].send(
                NodeRefused(f"--node-rank {hello.node}: another node ({control.peer}) came with it; give each its own")
            )
        hellos[hello.node][0].close()
    hellos[hello.node] = control, hello


def _missing(engine: EngineConfig, there: set[int], error: Exception) -> str:
    missing = [node for node in range(1, engine.nnodes) if node not in there] or list(range(1, engine.nnodes))
    names = ", ".join(f"node {node} of {engine.nnodes} ({named(ranks_of(node, engine))})" for node in missing)
    return (
        f"--dist-timeout {engine.dist_timeout_s:g}: {names} did not come to {FLAG} {engine.dist_init_addr} ({error}); start "
        f"each with the same flags and its --node-rank, such as {missing[0]}"
    )


@contextmanager
def joined(engine: EngineConfig, disagg: DisaggConfig, *, secret: bytes) -> Iterator[Met]:
    """Join as another node, for the block. Raises ConfigError."""
    with ExitStack() as stack:
        meeting = _Meeting(engine=engine, disagg=disagg, secret=secret, stack=stack)
        try:
            control = Control(meeting.dial(*address_of(engine), CONTROL))
            server = _server_for_higher(meeting, control.here)
            port = 0 if server is None else int(server.getsockname()[1])
            control.send(NodeHello(_version(), engine.node_rank, port, flags_of(engine, disagg)))
            answer = control.receive(within_s=max(MIN_WAIT_S, meeting.left_s))
            if isinstance(answer, NodeRefused):
                raise ConfigError(answer.text)
            if not isinstance(answer, NodeWelcome):
                raise ChannelClosed(f"{type(answer).__name__} from node 0")
            found = meeting.dial_wires(answer.addresses, answer.group)
            found |= meeting.await_wires(server, answer.group)
        except (RendezvousError, ChannelClosed) as error:
            raise ConfigError(
                f"--dist-timeout {engine.dist_timeout_s:g}: node 0 is not at {FLAG} {engine.dist_init_addr}, or another node "
                f"did not come ({error}); their logs may say why"
            ) from None
        if server is not None:
            server.close()
        yield Met({0: control}, answer.region, found, control.here)


def _server(meeting: _Meeting) -> socket.socket:
    """Raises ConfigError."""
    engine = meeting.engine
    while True:
        try:
            return _listening(*address_of(engine))
        except OSError as error:
            if isinstance(error, socket.gaierror) and meeting.left_s:
                # DNS learns a new pod's name some time after its start.
                time.sleep(min(RETRY_S, meeting.left_s))
                continue
            raise ConfigError(
                f"{FLAG} {engine.dist_init_addr}: node 0 cannot listen there: {error.strerror or error}; give an address of "
                "its machine and a free port, the same on all nodes"
            ) from None


def _server_for_higher(meeting: _Meeting, host: str) -> socket.socket | None:
    if all(node < meeting.engine.node_rank for node in meeting.wires.values()):
        return None
    return meeting.stack.enter_context(_listening(host, 0))


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError, of it gaierror for an unknown name."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), port), family=family)


def _version() -> str:
    return metadata.version("tandem-serve")
