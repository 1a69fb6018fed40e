"""Managers of one life of a worker, on threads of its process: their sockets, the engines that they share, what roles see of them."""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from disagg.assembly import RECEIVES, Manager, RoleAssembly, Transfers, TransferWire
from engine.core.scheduler import Scheduler
from tools.simulation.network import End, Network
from tools.simulation.options import EngineBehaviour
from tools.simulation.surroundings import ONE_HOST, SLOT_BYTES, SimPool, Surroundings
from tools.simulation.workers.ranks import Follower, RankView, Whole
from tools.simulation.workers.transfer_engine import SimEngine, make_caps
from tools.simulation.world import Flag, Process, Threads
from transfer_backends.contract import Caps, TargetPages
from transfer_backends.control_port import Event, Frame, LinkClosed, SomeLinkClosed
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.rank_engines import RankEngines
from transfer_backends.engines.registry import SharedEngine
from transfer_backends.environment import Environment
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Engine, KVReceiver
from transfer_backends.prefill.manager import PrefillManager

CONTROL_TURN_S = 0.1  # production: 0.02; fewer events
LOOP, DRIVER = "loop", "driver"
CONTROL, SENDER_CONTROL, PREFIX_CONTROL = "control", "sender control", "prefix control"
FEATURE_CONTROL = "feature control"
PORTS = {CONTROL: 9000, SENDER_CONTROL: 9500}


# ---- the control plane's sockets: what `ListenPort` and `ConnectPort` are over ZMQ

MAX_EVENTS_A_POLL = 256


class _Port:
    """`on_event`: something can be polled now."""

    def __init__(self, network: Network, process: Process, on_event: Callable[[], None]) -> None:
        self._network = network
        self._process = process
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._ends: dict[Any, End] = {}
        self.wake: Callable[[], None] = on_event

    def _push(self, event: Event) -> None:
        self._events.append(event)
        self._on_event()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def poll(self, timeout_s: float) -> list[Event]:
        return [self._events.popleft() for _ in range(min(len(self._events), MAX_EVENTS_A_POLL))]

    def send(self, link: Any, data: bytes) -> bool:
        end = self._ends.get(link)
        return end is not None and end.send(data, f"frame {len(data)}")

    def close(self) -> None:
        for end in self._ends.values():
            end.close()
        self._ends.clear()


class SimListenPort(_Port):
    def __init__(
        self, network: Network, process: Process, on_event: Callable[[], None], *, address: str, secret: bytes | None
    ) -> None:
        super().__init__(network, process, on_event)
        self.address = address
        self._secret = secret
        self._num_links = 0
        network.listen(address, process, self._accept)

    def _accept(self, end: End) -> None:
        if self._secret is not None and end.other is not None and end.other.process.node == "x0":
            end.close()  # CURVE: who does not know the secret gets no connection
            return
        self._num_links += 1
        link = self._num_links.to_bytes(5, "big")
        self._ends[link] = end
        end.on_data = lambda data: self._push(Frame(link, data))
        end.on_close = lambda: self._lose(link)

    def _lose(self, link: bytes) -> None:
        self._ends.pop(link, None)
        self._push(SomeLinkClosed())


class SimConnectPort(_Port):
    def connect(self, link: int, address: str) -> bool:
        self._ends[link] = self._network.connect(
            self._process,
            address,
            on_data=lambda data: self._push(Frame(link, data)),
            on_close=lambda: self._push(LinkClosed(link)),
        )
        return True

    def disconnect(self, link: int) -> None:
        end = self._ends.pop(link, None)
        if end is not None:
            end.close()


# ---- which pages and rows are given to transfers now, so that every write can be judged: from `provide` until `close`,
# which the role calls when it reuses or frees the memory


class WatchedReceivers:
    """What the decode role sees of the manager."""

    def __init__(self, manager: DecodeManager, exposed: dict[str, Counter[int]], seen: Counter[str]) -> None:
        """`seen`: what has come about in this run."""
        self._manager = manager
        self._seen = seen
        self._exposed = exposed

    def __getattr__(self, name: str) -> Any:
        """The rest as it is."""
        return getattr(self._manager, name)

    def receiver(self, room: int, **named: Any) -> "WatchedReceiver":
        return WatchedReceiver(self._manager.receiver(room, **named), self._exposed, self._seen)


class WatchedReceiver:
    """Delegates; counts what is exposed, by kind: pages, the row, then the tail's pools."""

    def __init__(self, receiver: KVReceiver, exposed: dict[str, Counter[int]], seen: Counter[str]) -> None:
        self._seen = seen
        self._receiver = receiver
        self._exposed = exposed
        self._given: list[Sequence[int]] = []

    def __getattr__(self, name: str) -> Any:
        """The rest as it is."""
        return getattr(self._receiver, name)

    def provide(self, target: TargetPages) -> None:
        if target.work is None:
            self._seen["pages not sent"] += target.skip_pages
        beside = [target.metadata_row], *target.tail
        self._given = [list(items) for items in (target.pages, *beside)]
        for kind, given in zip(self._exposed, self._given, strict=True):
            self._exposed[kind].update(given)
        self._receiver.provide(target)

    def close(self) -> None:
        self._receiver.close()
        for kind, given in zip(self._exposed, self._given, strict=False):
            self._exposed[kind].subtract(given)
        self._given = []


# ---- managers


@dataclass(eq=False)
class Managers:
    """`by_thread`: by the name of its control thread. `receiver`: what gets KV, `features`: features of images."""

    around: Surroundings
    process: Process
    draw: random.Random
    threads: Threads
    behaviour: EngineBehaviour
    by_thread: dict[str, Manager] = field(default_factory=dict)
    sender: PrefillManager = field(init=False)
    receiver: DecodeManager | None = None
    features: DecodeManager | None = None
    _engines: list[SimEngine] = field(default_factory=list)

    def of_pages(
        self, scheduler: Scheduler, memory: Whole, names: Mapping[str, str], *, followers: Sequence[Follower] = ()
    ) -> Transfers:
        """Start the driver and the engine of a worker's ranks. `names`: of the control threads, by what is done there."""
        driver = self.threads.add(DRIVER, self._drive)
        caps = self._caps()
        self._engines = [self._engine_of(view, driver.wake, caps) for view in memory.views]
        for engine in self._engines[1:]:
            engine.register([])
        many = len(names) > 1
        shared = [SharedEngine(engine, num_users=len(names)) if many else engine for engine in self._engines]
        marks = [follower.mark(self._host) for follower in followers]
        return self._transfers(scheduler, memory, names, RankEngines(shared) if len(shared) > 1 else shared[0], marks)

    def of_features(self, scheduler: Scheduler, memory: Whole) -> Transfers:
        """An engine of their own."""
        wake = partial(self.threads.wake, LOOP)
        engine = self._engine_of(memory.views[0], wake, self._caps(), label=" features")
        self._engines.append(engine)
        return self._transfers(scheduler, memory, {RECEIVES: FEATURE_CONTROL}, engine, ())

    def _transfers(
        self,
        scheduler: Scheduler,
        memory: Whole,
        names: Mapping[str, str],
        engine: Engine,
        followers: Sequence[ProcessMark],
    ) -> Transfers:
        wire = TransferWire(
            wakeup=partial(self.threads.wake, LOOP),
            clock=self.process.clock,
            environment=lambda name: self._environment(names[name], memory),
            start=lambda name, manager: self._start(names[name], manager),
            watched=lambda manager: WatchedReceivers(manager, memory.exposed, self.around.world.seen),
        )
        size = memory.kv_args.page_size
        role = RoleAssembly(scheduler=scheduler, metadata=memory.metadata, page_size=size, page_bytes=size * SLOT_BYTES)
        return Transfers(
            role=role, engine=engine, args=memory.kv_args, config=self.around.config, wire=wire, followers=followers
        )

    def _caps(self) -> Caps:
        options = self.around.options
        return make_caps(
            self.draw, options.engine.settle_s, host_memory=options.host_memory, must_poll=options.must_poll
        )

    def _engine_of(self, view: RankView, on_progress: object, caps: Caps, *, label: str = "") -> SimEngine:
        around = self.around
        return SimEngine(
            world=around.world,
            network=around.network,
            memory=view,
            caps=caps,
            behaviour=self.behaviour,
            directory=around.directory,
            on_progress=on_progress,
            label=label,
        )

    def _environment(self, thread: str, memory: Whole) -> Environment:
        around, process = self.around, self.process
        self.threads.add(thread, partial(self._turn, thread))
        wake = partial(self.threads.wake, thread)

        def listen(host: str, port: int, *, secret: bytes | None) -> SimListenPort:
            number = PORTS[thread] + (0 if around.options.fixed_control_port else process.life)
            return SimListenPort(around.network, process, wake, address=f"{process.node}:{number}", secret=secret)

        return Environment(
            incarnation=lambda: process.name,
            mark=lambda: ProcessMark(self._host, process.life, 1),
            listen=listen,
            connect=lambda *, secret: SimConnectPort(around.network, process, wake),
            pool=lambda num_threads, name: SimPool(around, process, self.draw),
            liveness=lambda mark, control: around.liveness(process.node, mark, control),
            read_item=memory.read_row,
            write_item=memory.write_row,
        )

    @property
    def _host(self) -> str:
        return ONE_HOST if self.around.options.same_host else self.process.node

    def _start(self, thread: str, manager: Manager) -> None:
        self.by_thread[thread] = manager
        if isinstance(manager, PrefillManager):
            self.sender = manager
            manager.driver._event = Flag(partial(self.threads.wake, DRIVER))  # type: ignore[assignment]
        elif thread == FEATURE_CONTROL:
            self.features = manager
        else:
            self.receiver = manager
        self.threads.wake(thread)

    # ---- threads

    def _turn(self, thread: str) -> float:
        control = self.by_thread[thread].control
        control.turn(0)
        self._check()
        if control.has_effects or control.port.has_events:  # type: ignore[attr-defined]
            return self.threads.lag_s()
        return CONTROL_TURN_S

    def _drive(self) -> float | None:
        driver = self.sender.driver
        moved = driver.step()
        self._check()
        if moved:
            return self.threads.lag_s()
        return CONTROL_TURN_S if driver.busy or self.sender.core.wants_driver else None

    def _check(self) -> None:
        for manager in self.by_thread.values():
            self.process.hold(manager.check)

    # ---- what faults ask

    @property
    def under_way(self) -> bool:
        """Bytes are on their way, from here or to here."""
        receivers = [manager for manager in self.by_thread.values() if isinstance(manager, DecodeManager)]
        return self.sender.driver.busy or any(manager.core.rooms.num_exposed for manager in receivers)

    @property
    def faulty(self) -> bool:
        return self._engines[0].faulty

    def stop_faults(self) -> None:
        for engine in self._engines:
            engine.faulty = False
