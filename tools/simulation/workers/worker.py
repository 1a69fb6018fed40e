"""One life of a worker: the production loop, scheduler, role, manager and registrar over simulated surroundings.

Its threads are activities: scheduler loop, heartbeat (it answers with each message), control threads (decode: of the receiver and of the
sender of requests that move), sender thread, registrar (prefill), HTTP frontend.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np

from bootstrap_server.registry import BootstrapConfig, Registry
from disagg.assembly import RoleAssembly, source_of
from disagg.decode_role import DecodeRole
from disagg.features.feature_fetching import FeatureFetch, FeatureFetches
from disagg.features.feature_serving import EncodeRole
from disagg.features.prefix_fetching import PrefixFetches
from disagg.features.recompute import Bounds
from disagg.incoming import RequestTransfer
from disagg.metadata import ROW, Checksum, MetadataBuffers
from disagg.outgoing import Outgoing, PrefillHandover
from disagg.prefill_role import PrefillRole
from disagg.role import PeerPart, SendingPart
from engine.assembly.worker import Clock, VirtualPorts, WorkerWire, assemble_worker, computing
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.plan import Plan
from engine.loop.heartbeat import IterationClock
from engine.loop.loop import EngineLoop
from engine.loop.services import LoopServices, LoopSettings
from engine.messages import (
    GenerateBatch,
    GenerateRequest,
    GetStep,
    PrefixSource,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    ToScheduler,
)
from engine.ranks.followers import GroupEnded
from engine.ranks.rank_checksum import alone
from tests.core.hash_model import VOCAB
from tests.core.mem_cache.images import SEES
from tools.simulation.activity import Activity, Flag
from tools.simulation.bootstrap import SimBootstrap, SimRegistrar, look_up_in
from tools.simulation.http import serve
from tools.simulation.surroundings import (
    ONE_HOST,
    SLOT_BYTES,
    SimPool,
    Surroundings,
    kv_args_of,
    make_scheduler,
    make_states,
    make_windows,
)
from tools.simulation.watched import WatchedReceivers
from tools.simulation.workers.control_ports import SimConnectPort, SimListenPort
from tools.simulation.workers.executor import CheckedModel, SimExecutor
from tools.simulation.workers.features import Arrivals
from tools.simulation.workers.frontend import Frontend
from tools.simulation.workers.group import GroupExecutor, Shape, SimGroup, SimRank, own_checksum
from tools.simulation.workers.images import PlacedImages, placed_images
from tools.simulation.workers.rank_models import RankModel
from tools.simulation.workers.ranks import Follower, RankView
from tools.simulation.workers.transfer_engine import EngineBehaviour, SimEngine, make_caps
from tools.simulation.workers.weights import OWN, SimWeights
from tools.simulation.world import Process, Violation
from transfer_backends.contract import Caps, KVArgs, Region, Route
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.rank_engines import RankEngines
from transfer_backends.engines.registry import SharedEngine
from transfer_backends.environment import Environment
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager

EOS = 7
CONTROL_TURN_S = 0.1  # production: 0.02; fewer events
MOVE_TIMEOUT_S = 4.0  # production: 30
CONTROL, SENDER_CONTROL, PREFIX_CONTROL = "control", "sender control", "prefix control"
FEATURE_CONTROL = "feature control"
CONTROL_PORT, SENDER_CONTROL_PORT = 9000, 9500
NAMED_RATE = 0.7  # of requests, whose router knows of another worker that may have their prefix
HTTP_PORT, BOOTSTRAP_PORT = 80, 8998

M = TypeVar("M", PrefillManager, DecodeManager)


class Worker:
    """`role_name`: "prefill" | "decode" | "encode" (encoder.py)."""

    manager: PrefillManager | DecodeManager
    sender: PrefillManager
    managers: dict[str, PrefillManager | DecodeManager]

    def __init__(self, around: Surroundings, process: Process, role_name: str) -> None:
        self.around, self.process, self.role_name = around, process, role_name
        self.draw = around.world.rng(f"worker/{process.name}")
        self.threads: dict[str, Activity] = {}
        self.ports = VirtualPorts(self._on_message, self._wake_loop)
        self._arrivals: dict[str, float] = {}  # of the last message on each way
        self.said: dict[str, int] = {}
        self.most_quarantined = 0
        self._num_idle = 0
        self.on_stopped: Callable[[], None] = lambda: None  # the loop has ended
        self.bootstrap: SimBootstrap | None = None
        self.prefix_receiver: DecodeManager | None = None
        self.prefix_fetches: PrefixFetches | None = None
        self.arrivals: Arrivals | None = None
        self.weights = SimWeights(process, self._forget, self.draw, model_path=self._first_weights())
        self._build()
        self.turns = IterationClock(limit_s=0)
        self.turns.loaded()
        self.loop = self._loop()
        self._start_frontend()
        self.threads["loop"] = self._thread("loop", self._turn)
        self.threads["loop"].wake()
        for name in self.managers:
            self.threads[name].wake()

    # ---- parts

    def _build(self) -> None:
        """Memory, scheduler, managers and role."""
        process, around = self.process, self.around
        options, is_prefill = around.options, self.role_name == "prefill"
        self.model = CheckedModel(page_size=options.page_size, name=process.name)
        self.model.window, self.model.image_room = options.window, options.image_room
        if options.step_fail_rate:
            self.model.fails = self._step_fails
            self._failed_seq = -1
        groups: dict[str, Any] = {
            "states": make_states(options, decodes=not is_prefill),
            "windows": make_windows(options, decodes=not is_prefill),
        }
        self.executor = SimExecutor(self.model, layers=options.layers if is_prefill else 1, asked_of=self._asked_of)
        num_pages = options.pages[0 if is_prefill else 1]
        stages = options.stages[0 if is_prefill else 1]
        self.shape = Shape(options.ranks[0 if is_prefill else 1], stages, options.kv_units)
        self.followers = self._start_followers(self.shape.tp * self.shape.pp - 1)
        self.group: SimGroup | None = None
        if self.followers:
            self.group = self.model.ranks = self._start_group(num_pages)
            num_pages = self.group.agree(num_pages + self.draw_of_group.randint(0, 20))
        self.metadata = MetadataBuffers(options.rows, checksum=self._checksum())
        ranks = [process, *self.followers[: self.shape.tp - 1]]
        self.kv_args = kv_args_of(options, num_pages=num_pages, names=[rank.name for rank in ranks], **groups)
        self.views = [RankView(self, i, rank, layers=options.layers) for i, rank in enumerate(ranks)]
        kinds = ("kv", "aux", *(pool.kind for pool in self.kv_args.pools))
        self.exposed: dict[str, Counter[int]] = {kind: Counter() for kind in kinds}
        self.depth, self.watched = options.depth[0 if is_prefill else 1] + stages - 1, stages > 1
        self.scheduler = make_scheduler(
            options, num_pages=num_pages, draw=self.draw, decodes=not is_prefill, stages=stages, **groups
        )
        self._make_managers(prefixes=is_prefill and options.prefix_fetch)
        self.features = self._feature_fetches() if is_prefill and options.num_encode else None
        self.role: PrefillRole | DecodeRole | EncodeRole = self._prefill_role() if is_prefill else self._decode_role()

    def _make_managers(self, *, prefixes: bool) -> None:
        """As disagg/compose.py: of one engine and memory."""
        whole = replace(self.kv_args, groups=())
        if self.role_name == "prefill":
            self._start_engine(2 if prefixes else 1)
            self.sender = self.manager = self._sends(layers=self.executor if self.executor.layers > 1 else None)
            self.executor.wake = self.sender.wake_sender
            self.managers = {CONTROL: self.sender}
            if prefixes:
                self.prefix_receiver = self._receives(PREFIX_CONTROL, whole, self.shared_engine)
                self.managers[PREFIX_CONTROL] = self.prefix_receiver
            return
        self._start_engine(2)
        self.manager = self._receives(CONTROL, self.kv_args, self.shared_engine)
        config = replace(self.around.config, bootstrap_timeout_s=MOVE_TIMEOUT_S)
        port = SENDER_CONTROL_PORT
        self.sender = self._sends(SENDER_CONTROL, port, kv_args=whole, config=config, computes=False)
        self.managers = {CONTROL: self.manager, SENDER_CONTROL: self.sender}

    def _start_followers(self, count: int) -> list[Follower]:
        world, process = self.around.world, self.process
        draw = world.rng(f"followers/{process.name}")
        followers = [Follower(world, process, rank, draw) for rank in range(1, 1 + count)]
        for follower in followers:
            mark = follower.mark("")
            self.around.followers[process.node, mark.pid] = follower
            self.around.network.listen(f"{process.node}:{mark.port}", follower, lambda end: None)
        return followers

    def _start_group(self, num_pages: int) -> SimGroup:
        """Behind the followers of the leader's own stage come those of the stages before it."""
        process, shape = self.process, self.shape
        draw = self.draw_of_group = self.around.world.rng(f"group/{process.name}")
        numbers = [*range(shape.leader + 1, shape.leader + shape.tp), *range(shape.leader)]
        least = draw.choice(numbers)
        ranks = {}
        for number, follower in zip(numbers, self.followers, strict=True):
            of_stage = number > shape.leader
            by_layer = of_stage and self.executor.layers > 1
            model = RankModel(page_size=self.model.page_size, name=follower.name, by_layer=by_layer)
            model.image_room = self.model.image_room
            ranks[number] = SimRank(
                follower,
                model,
                held=shape.held(number),
                ahead=not by_layer and (not of_stage or draw.random() < 0.5),
                pages=num_pages + (0 if number == least else draw.randint(0, 20)),
                draw=draw,
            )
        return SimGroup(process, self.model, ranks, shape=shape, on_end=self._lose_group, draw=draw)

    def _lose_group(self) -> None:
        """As a leader's process ends with its group."""
        self.around.world.seen["workers that lost a rank"] += 1
        self.process.kill()

    @property
    def models(self) -> list[CheckedModel]:
        """Of all ranks."""
        return [model for rank in range(self.shape.tp) for model in self.models_of(rank)]

    def models_of(self, tp_rank: int) -> list[CheckedModel]:
        """Of a rank and those with the same units at the stages before."""
        if self.group is None:
            return [self.model]
        numbers = range(tp_rank, self.shape.tp * self.shape.pp, self.shape.tp)
        return [self.group.ranks[n].model if n != self.shape.leader else self.model for n in reversed(numbers)]

    def _thread(self, label: str, act: Callable[[], float | None]) -> Activity:
        return Activity(self.process, label, act, lag_s=self._lag_s)

    def _lag_s(self) -> float:
        return self.draw.uniform(0.00002, self.around.options.clock_s)

    def _environment(
        self, thread: str = CONTROL, first_port: int = CONTROL_PORT, rows: Arrivals | None = None
    ) -> Environment:
        """`rows`: where metadata rows are that cross as messages; None: they are the worker's."""
        around, process, wake = self.around, self.process, partial(self._wake_control, thread)

        def listen(host: str, port: int, *, secret: bytes | None) -> SimListenPort:
            number = first_port if around.options.fixed_control_port else first_port + process.life
            return SimListenPort(around.network, process, wake, address=f"{process.node}:{number}", secret=secret)

        return Environment(
            incarnation=lambda: process.name,
            mark=lambda: ProcessMark(self._host, process.life, 1),
            listen=listen,
            connect=lambda *, secret: SimConnectPort(around.network, process, wake),
            pool=lambda num_threads, name: SimPool(around, process, self.draw),
            liveness=lambda mark, control: around.liveness(process.node, mark, control),
            read_item=self._read_row if rows is None else rows.read_row,
            write_item=self._write_row if rows is None else rows.write_row,
        )

    @property
    def _host(self) -> str:
        return ONE_HOST if self.around.options.same_host else self.process.node

    def _wake_control(self, name: str = CONTROL) -> None:
        if name not in self.threads:
            self.threads[name] = self._thread(name, partial(self._control, name))
        self.threads[name].wake()

    def _caps(self) -> Caps:
        options = self.around.options
        return make_caps(
            self.draw, options.engine.settle_s, host_memory=options.host_memory, must_poll=options.must_poll
        )

    def _engine(
        self, on_progress: Callable[[], None], share: Callable[[Engine], Engine] = lambda engine: engine
    ) -> Engine:
        caps = self._caps()
        self._engines = [self._engine_of(view, on_progress, caps) for view in self.views]
        for follower in self._engines[1:]:
            follower.register([])
        shared = [share(engine) for engine in self._engines]
        return RankEngines(shared) if len(shared) > 1 else shared[0]

    def _engine_of(self, view: RankView, on_progress: Callable[[], None], caps: Caps, *, label: str = "") -> SimEngine:
        around = self.around
        return SimEngine(
            world=around.world,
            network=around.network,
            memory=view,
            caps=caps,
            behaviour=self._behaviour(),
            directory=around.directory,
            on_progress=on_progress,
            label=label,
        )

    def _behaviour(self) -> EngineBehaviour:
        return self.around.options.engine

    def _step_fails(self, plan: Plan) -> bool:
        """The same of a plan each time."""
        if plan.items and plan.seq > self._failed_seq and self._engines[0].faulty and self._draws_a_failure():
            self._failed_seq = plan.seq
            self.around.world.injected["failed step"] += 1
        return plan.seq == self._failed_seq

    def _draws_a_failure(self) -> bool:
        return self.draw.random() < self.around.options.step_fail_rate

    def stop_engine_faults(self) -> None:
        for engine in self._engines:
            engine.faulty = False

    def _start_engine(self, num_users: int) -> None:
        """Its driver, and the engine that so many managers share."""
        self.threads["driver"] = self._thread("driver", self._drive)
        share = partial(SharedEngine, num_users=num_users) if num_users > 1 else (lambda engine: engine)
        self.shared_engine = self._engine(self.threads["driver"].wake, share)

    def _sends(self, name: str = CONTROL, port: int = CONTROL_PORT, **more: Any) -> PrefillManager:
        """As disagg/compose.py. `more`: in place of what a prefill worker gives."""
        given: dict[str, Any] = {"kv_args": self.kv_args, "config": self.around.config, **more}
        manager = PrefillManager(
            engine=self.shared_engine,
            clock=self.process.clock,
            environment=self._environment(name, port),
            followers=[follower.mark(self._host) for follower in self.followers],
            **given,
        )
        manager.driver._event = Flag(self.threads["driver"].wake)  # type: ignore[assignment]
        return self._started(name, manager)

    def _receives(self, name: str, kv_args: KVArgs, engine: Engine, rows: Arrivals | None = None) -> DecodeManager:
        """As disagg/transfers.py. `rows`: as in `_environment`."""
        environment = self._environment(name, rows=rows)
        clock, config = self.process.clock, self.around.config
        manager = DecodeManager(kv_args, engine, config, lookup=self._look_up, clock=clock, environment=environment)
        return self._started(name, manager)

    def _started(self, name: str, manager: M) -> M:
        manager.set_wakeup(self._wake_loop)
        self._wake_control(name)
        return manager

    def _feature_fetches(self) -> FeatureFetches:
        """As disagg/compose.py: of an engine and memory of their own."""
        around = self.around
        self.arrivals = arrivals = Arrivals(
            self.process, around.options, weights_of=self.weights.number, num_ranks=len(self.models)
        )
        for model in self.models:
            model.arrived = arrivals.features_of
        engine = self._engine_of(arrivals.view, self._wake_loop, self._caps(), label=" features")
        self._engines.append(engine)
        manager = self.managers[FEATURE_CONTROL] = self._receives(FEATURE_CONTROL, arrivals.kv_args, engine, arrivals)
        return arrivals.fetches(self.scheduler.memory, manager)

    @property
    def _assembly(self) -> RoleAssembly:
        size = self.kv_args.page_size
        return RoleAssembly(
            scheduler=self.scheduler, metadata=self.metadata, page_size=size, page_bytes=size * SLOT_BYTES
        )

    def _watched(self, manager: DecodeManager) -> WatchedReceivers:
        return WatchedReceivers(manager, self.exposed, seen=self.around.world.seen)

    def _prefixes(self) -> Sequence[PeerPart]:
        if self.prefix_receiver is None:
            return ()
        source = self.around.prefix_sources[self.process.node] = source_of(self.sender)
        receives = self._watched(self.prefix_receiver)
        parts = self._assembly.prefixes(self.sender, receives, source, token_bytes=SLOT_BYTES)
        self.prefix_fetches = parts[0]
        return parts

    def _wake_loop(self) -> None:
        if "loop" in self.threads:
            self.threads["loop"].wake()

    def _prefill_role(self) -> PrefillRole:
        assert isinstance(self.manager, PrefillManager)
        server = self.around.shared_bootstrap
        if server is None:
            server = f"{self.process.node}:{BOOTSTRAP_PORT}"
            registry = Registry(BootstrapConfig(lease_s=3.0, room_ttl_s=20.0), shared=False)
            self.bootstrap = SimBootstrap(self.process, registry)
        registrar = SimRegistrar(
            self.manager, self.kv_args, server=server, find=self.around.bootstrap_of, reach=self._reach,
            clock=self.process.clock,
        )  # fmt: skip
        self.registrar = registrar
        self.threads["registrar"] = self._thread("registrar", registrar.turn)
        registrar._wake = Flag(self.threads["registrar"].wake)  # type: ignore[assignment]
        self.threads["registrar"].wake()
        return self._assembly.prefill(
            self.manager,
            registrar,
            (*self._prefixes(), *(() if self.features is None else (self.features,))),
            bounds=Bounds(VOCAB, context_length=10_000, vision=SEES if self.around.options.image_room else None),
            layerwise=self.executor.layers > 1,
        )

    def _decode_role(self) -> DecodeRole:
        assert isinstance(self.manager, DecodeManager)
        moves = self._assembly.moves(self.sender, source_of(self.sender))
        timeout_s = self.around.options.prealloc_timeout_s
        return self._assembly.decode(self._watched(self.manager), (moves,), prealloc_timeout_s=timeout_s)

    def _checksum(self) -> Checksum | None:
        if not self.around.options.checksum:
            return None
        if self.group is not None:
            return self.group.checksum()
        return alone(own_checksum(self.model, self.shape.held(0)))

    def _loop(self) -> EngineLoop:
        idle: Any = SimpleNamespace()
        executor: Any = self.executor
        if self.group is not None:
            executor = GroupExecutor(executor, self.group, attention=self._wake_loop if self.watched else None)
        services = LoopServices(weights=self.weights, profiler=idle)
        ended = executor.ended if self.watched else None
        return assemble_worker(
            LoopSettings(eos_ids=frozenset({EOS})),
            WorkerWire(ports=self.ports, role=self.role),
            Clock(now_s=self.process.clock, turns=self.turns),
            computing(self.scheduler, executor, services, depth=self.depth, ended=ended),
        )

    def _first_weights(self) -> str:
        return OWN

    def _forget(self) -> None:
        if self.group is not None:
            self.group.forget()
        self.model.forget()

    def _info(self) -> dict[str, Any]:
        """What /server_info says."""
        info: dict[str, Any] = {
            "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
            "feature_fetch": self.features is not None,
        }
        if self.around.shared_bootstrap is not None:
            info["disaggregation_bootstrap_server"] = self.around.shared_bootstrap
        return info

    def _start_frontend(self) -> None:
        self.frontend = Frontend(
            process=self.process,
            role=self.role_name,
            options=self.around.options,
            send=self._to_scheduler,
            info={"disaggregation_mode": self.role_name, **self._info()},
        )
        address = f"{self.process.node}:{HTTP_PORT}"
        serve(self.around.network, self.process, address, self.frontend.handle)

    def _asked_of(self, slot: int) -> tuple[tuple[str, ...], PlacedImages]:
        request = next(r for r in self.scheduler.stages.live.values() if r.slot == slot)
        self.around.world.seen["recomputes with images"] += bool(request.images) and request.rid.startswith("recompute")
        return request.message.namespace, placed_images(request.images)

    # ---- threads

    def _to_scheduler(self, message: ToScheduler | GetStep) -> None:
        if isinstance(message, GetStep):
            self._pass_on("to heartbeat", "GetStep", self._beat, message)
        else:
            if self.prefix_receiver is not None:
                message = self._naming_sources(message)
            for one in message.requests if isinstance(message, GenerateBatch) else [message]:
                if isinstance(one, GenerateRequest) and one.output_ids:
                    self.said[one.rid] = len(one.output_ids)  # by another worker
            self._pass_on("to scheduler", type(message).__name__, self.ports.deliver, message)

    def _naming_sources(self, message: ToScheduler) -> ToScheduler:
        if isinstance(message, GenerateBatch):
            return GenerateBatch([self._naming_a_source(one) for one in message.requests])
        return self._naming_a_source(message) if isinstance(message, GenerateRequest) else message

    def _naming_a_source(self, message: GenerateRequest) -> GenerateRequest:
        """What a router may believe: that another prefill worker, dead ones too, has more or less of the prompt."""
        others = [source for node, source in sorted(self.around.prefix_sources.items()) if node != self.process.node]
        if not others or message.bootstrap is None or self.draw.random() >= NAMED_RATE:
            return message
        at, num_tokens = self.draw.choice(others), self.draw.randint(1, len(message.input_ids) + 4)
        source = PrefixSource(at.control, at.incarnation, num_tokens)
        return msgspec.structs.replace(message, prefix_source=source)

    def _beat(self, message: GetStep) -> None:
        """As engine/loop/heartbeat.py."""
        if (reply := self.turns.answer(message.call_id, self.process.clock())) is not None:
            self._pass_on("from heartbeat", "StepReply", self.frontend.on_message, reply)

    def _pass_on(self, way: str, label: str, act: Callable[[Any], None], message: Any) -> None:
        """Between processes of the worker, over a socket that keeps the order."""
        arrival_s = max(self.around.world.now_s + self._lag_s(), self._arrivals.get(way, 0.0))
        self._arrivals[way] = arrival_s
        self.process.after(arrival_s - self.around.world.now_s, label, act, message)

    def _turn(self) -> float | None:
        try:
            worked = self.loop.turn()
        except GroupEnded:
            return None
        if self.loop.stopped:
            self.turns.end()
            self.check()
            self.on_stopped()
            return None
        self._num_idle = 0 if worked else self._num_idle + 1
        if self._num_idle <= 2 or self._num_idle % 8 == 0:  # a turn that finds nothing changes nothing
            self.check()
        clock_s = self.around.options.clock_s
        if not worked:
            self.loop._rest()
            return max(self.ports.wait_s, 0.05)
        pause_s = self.draw.uniform(clock_s, 4 * clock_s)
        for _ in range(self.executor.stages):
            self.process.after(self.draw.uniform(0, pause_s), "compute", self._compute)
        return pause_s

    def _compute(self) -> None:
        with contextlib.suppress(GroupEnded):
            self.executor.compute_one()

    def _control(self, name: str) -> float:
        control = self.managers[name].control
        control.turn(0)
        self.check_managers()
        if control.has_effects or control.port.has_events:  # type: ignore[attr-defined]
            return self._lag_s()
        return CONTROL_TURN_S

    def _drive(self) -> float | None:
        moved = self.sender.driver.step()
        self.check_managers()
        if moved:
            return self._lag_s()
        return CONTROL_TURN_S if self.sender.driver.busy or self.sender.core.wants_driver else None

    # ---- surroundings

    def _look_up(self, bootstrap: str, room: int, but: Sequence[str] | None) -> Route:
        return look_up_in(self.around.bootstrap_of(bootstrap), bootstrap, room, but=but, reach=self._reach)

    def _reach(self, address: str) -> bool:
        return self.around.reach(self.process.node, address)

    # ---- outputs

    def say(self, outputs: list[TokenOutput]) -> None:
        """DESIGN.md 5.2, at the scheduler's door: tokens in order, none twice, nothing after the end."""
        for output in outputs:
            before = self.said.get(output.rid, 0)
            if before < 0:
                raise Violation(f"{self.process.name}: {output.rid} speaks after its end")
            if output.new_ids and output.completion_tokens != before + len(output.new_ids):
                raise Violation(f"{self.process.name}: {output.rid} skips or repeats tokens")
            self.around.world.note(f"{output.rid} says {output.new_ids} {output.finish and output.finish.kind}")
            self.said[output.rid] = before + len(output.new_ids) if output.finish is None else -1
        self.tell_frontend(TokenBatch(outputs))

    def _on_message(self, message: ToFrontend) -> None:
        if isinstance(message, TokenBatch):
            self.say(message.outputs)
        else:
            self.tell_frontend(message)

    def tell_frontend(self, message: ToFrontend) -> None:
        self._pass_on("to frontend", type(message).__name__, self.frontend.on_message, message)

    @property
    def transfers(self) -> bool:
        """Bytes are on their way, from here or to here."""
        receivers = [manager for manager in self.managers.values() if isinstance(manager, DecodeManager)]
        return self.sender.driver.busy or any(manager.core.rooms.num_exposed for manager in receivers)

    # ---- memory, for the views of its ranks

    def write_allowed(self, kind: str, idx: int) -> bool:
        return self.exposed[kind][idx] == 1 and self._owner_of(kind, idx) in ("held", "quarantined")

    def read_allowed(self, kind: str, idx: int) -> bool:
        return self._owner_of(kind, idx) in ("held", "cached")

    def _owner_of(self, kind: str, idx: int) -> str:
        """Where a page, slot or metadata row stands: a state of the allocator."""
        if kind == "aux":
            return "free" if idx in self.metadata._free else "held"
        memory = self.scheduler.memory
        group: Any = {"kv": memory, "state": memory.part(StateSlots), "window": memory.part(WindowPages)}[kind]
        return str(group.allocator.state_of(idx))

    def copy_row(self, other: Any, src: int, dst: int) -> None:
        self.metadata._rows[dst] = np.array(other.metadata._rows[src])

    def copy_beside(self, other: Any, kind: str, src: int, dst: int) -> None:
        self.model.land_beside(other.model, kind, src, dst)

    def _read_row(self, region: Region, row: int) -> bytes:
        if not self.read_allowed("aux", row):
            raise Violation(f"{self.process.name} sends metadata row {row}, which it gave up")
        return bytes(self.metadata._rows[row].tobytes())

    def _write_row(self, region: Region, row: int, data: bytes) -> None:
        if not self.write_allowed("aux", row):
            raise Violation(f"a message writes metadata row {row} of {self.process.name}, which moved on")
        self.metadata._rows[row] = np.frombuffer(data, ROW)[0]
        self.around.world.seen["rows by message"] += 1

    # ---- checks

    def check(self) -> None:
        self.scheduler.check()
        quarantined = self.scheduler.memory.allocator.counts()["quarantined"]
        self.most_quarantined = max(self.most_quarantined, quarantined)
        self._hold(self.role.check)

    def check_managers(self) -> None:
        for manager in self.managers.values():
            self._hold(manager.check)

    @property
    def receiver(self) -> DecodeManager | None:
        """What gets KV: a decode worker's, or a prefill worker's that gets prefixes."""
        return self.prefix_receiver if isinstance(self.manager, PrefillManager) else self.manager

    @property
    def feature_receiver(self) -> DecodeManager | None:
        manager = self.managers.get(FEATURE_CONTROL)
        assert manager is None or isinstance(manager, DecodeManager)
        return manager

    def handovers_in(self) -> list[RequestTransfer]:
        """Transfers of KV to this worker."""
        if self.prefix_fetches is not None:
            return [*self.prefix_fetches.incoming.transfers.values()]
        return [*self.role.incoming.transfers.values()] if isinstance(self.role, DecodeRole) else []

    def features_in(self) -> list[FeatureFetch]:
        return [] if self.features is None else [*self.features.incoming.transfers.values()]

    def handovers_out(self) -> list[PrefillHandover]:
        return [handover for outgoing in self._all_outgoing() for handover in outgoing.handovers.values()]

    @property
    def outgoing(self) -> Outgoing:
        """What leaves it for decode workers."""
        return self._all_outgoing()[0]

    def _all_outgoing(self) -> list[Outgoing]:
        own = [self.role._prompts] if isinstance(self.role, PrefillRole) else []
        return [*own, *(part._outgoing for part in self.role.parts if isinstance(part, SendingPart))]

    def _hold(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            raise Violation(f"{self.process.name}: {error}") from error
