"""Prefill's manager: a `PrefillCore` under control and sender threads."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transfer_backends.contract import (
    Clock,
    KVArgs,
    OpState,
    PeerPath,
    PeerWork,
    RecomputeRequest,
    SourcePages,
    TransferConfig,
)
from transfer_backends.control_thread import CLOSE_S, ControlThread, Manager
from transfer_backends.engines.rank_engines import RankEngines
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.fake_transfer import FakeTransfer
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Engine, KVSender, LayerClock
from transfer_backends.prefill.core import PrefillCore
from transfer_backends.prefill.inbox import Chunk, Post
from transfer_backends.prefill.paths import Command, ConnectPeer, FencePeer
from transfer_backends.prefill.rooms import PrefillRoom
from transfer_backends.prefill.trials import Trial, Trials
from transfer_backends.sides import KVPoll, RoomKey

# ---- sender thread: runs the core's operations on an engine to their end

FIRST_BACKOFF_S = 0.0001
LONG_BACKOFF_S = 0.002  # while only layers of a step are pending
STALE_BACKOFF_S = 0.02  # after a while without progress: a peer hangs
STALE_AFTER_BACKOFFS = 500
IDLE_S = 5.0  # every kind of work wakes it

log = logging.getLogger(__name__)

Task = Post | ConnectPeer | Trial | FencePeer


class Connected(NamedTuple):
    engine: Engine
    peer: Any


class Running(NamedTuple):
    task: Task
    engine: Engine
    op: Any


@dataclass(eq=False, kw_only=True)
class EngineDriver:
    """Polls frequently while operations end, and less and less otherwise.

    `of_ranks` serves peers with several pairs of ranks; `locked()` yields the time.
    """

    engine: Engine
    of_ranks: Engine
    core: PrefillCore
    trials: Trials
    locked: Callable[[], AbstractContextManager[float]]
    layers: LayerClock | None = None

    def __post_init__(self) -> None:
        self._peers: dict[str, Connected] = {}
        self._running: list[Running] = []
        self._dropping: list[str] = []
        self._event = threading.Event()
        self._stop = False
        self._naps = 0
        self._thread = threading.Thread(target=self._run, name="prefill-sender", daemon=True)
        self.num_errors = 0

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._event.set()

    def close(self, timeout_s: float) -> bool:
        """True if no operation is pending."""
        self._stop = True
        self._event.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._running and not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop:
            self._event.clear()
            try:
                moved = self.step()
            except Exception:  # our own bug must not end the transfers of all other rooms
                self.num_errors += 1
                log.exception("sender thread: an error was survived")
                moved = False
            self._rest(moved)
        if not self._running:  # a library may hold a connected peer's memory
            for incarnation in list(self._peers):
                self._disconnect(incarnation)

    def _rest(self, moved: bool) -> None:
        if moved:
            self._naps = 0
            return
        if not self._running and not self.ticking:
            self._event.wait(IDLE_S)
            return
        self._naps += 1
        longest_s = self.engine.caps.longest_nap_s if self._running else LONG_BACKOFF_S
        nap_s = min(FIRST_BACKOFF_S * 2 ** min(self._naps, 10), longest_s)
        if self.core.outbox.window_full:  # polls take a core from the engine's threads, and nothing has ended yet
            nap_s = max(nap_s, self.engine.caps.full_window_s)
        self._event.wait(STALE_BACKOFF_S if self._naps > STALE_AFTER_BACKOFFS else nap_s)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def ticking(self) -> bool:
        return self.layers is not None and self.layers.ticking

    def step(self) -> bool:
        """True if something moved."""
        with self.locked() as now_s:
            if self.layers is not None:
                self.core.outbox.on_progress(self.layers.progress(), now_s)
            self._request_polls(now_s)
            commands = list(self.core.paths.commands)
            self.core.paths.commands.clear()
            posts = self.core.outbox.next_posts(now_s)
        for command in commands:
            self._execute(command)
        self._post(posts)
        moved = self._poll()
        self._drop_quiet()
        return moved or bool(posts or commands)

    def _request_polls(self, now_s: float) -> None:
        if self.engine.caps.target_must_poll:
            for incarnation in dict.fromkeys(running.task.incarnation for running in self._running):
                self.core.paths.on_pending(incarnation, now_s)

    def _post(self, posts: list[Post]) -> None:
        """Start posts; a refusal ends later ones of its try."""
        refused: set[tuple[RoomKey, int]] = set()
        for post in posts:
            if (post.key, post.write_try) in refused:
                self._finish([(post, False)], error="a write before it was refused")
            elif not self._start(post):
                refused.add((post.key, post.write_try))

    def _execute(self, command: Command) -> None:
        if isinstance(command, ConnectPeer):
            if command.incarnation in self._dropping:
                self._dropping.remove(command.incarnation)
            self._connect(command)
        elif isinstance(command, FencePeer):
            self._start(command)
        else:
            self._dropping.append(command.incarnation)

    def _connect(self, command: ConnectPeer) -> None:
        try:
            if command.incarnation not in self._peers:
                self.trials.before_connect(command.incarnation)
                engine = self.of_ranks if command.of_ranks else self.engine
                peer = engine.connect(command.incarnation, command.descriptor)
                self._peers[command.incarnation] = Connected(engine, peer)
        except Exception as error:
            self._finish([(command, False)], error=f"{type(error).__name__}: {error}")
            return
        self._start(command)

    def _start(self, task: Task) -> bool:
        try:
            engine, peer = self._peers[task.incarnation]
            self._running.append(Running(task, engine, self._begin(task, engine, peer)))
            return True
        except KeyError:
            self._finish([(task, False)], error="the engine is not connected")
        except Exception as error:
            self._finish([(task, False)], error=f"{type(error).__name__}: {error}")
        return False

    def _begin(self, task: Task, engine: Engine, peer: Any) -> Any:
        if isinstance(task, Post):
            return engine.post(peer, task.pieces)
        return engine.fence(peer) if isinstance(task, FencePeer) else engine.probe(peer)

    def _poll(self) -> bool:
        pending: list[Running] = []
        ended: list[tuple[Task, bool]] = []
        for running in self._running:
            state = running.engine.poll(running.op)
            if state is OpState.PENDING:
                pending.append(running)
            else:
                ended.append((running.task, state is OpState.DONE))
        if ended:
            self._running = pending
            results = [result for task, ok in ended if (result := self._after_probe(task, ok)) is not None]
            self._finish(results, error="the connection to its memory broke")
        return bool(ended)

    def _after_probe(self, task: Task, ok: bool) -> tuple[Task, bool] | None:
        if not ok or not isinstance(task, ConnectPeer):
            return task, ok
        try:
            engine, peer = self._peers[task.incarnation]
            started = self.trials.start(task, engine, peer)
            if started is None:
                return task, True
            trial, op = started
            # at once: a copy that is complete on return is timed without this thread's latency
            state = engine.poll(op)
        except Exception as error:
            log.warning("decode worker %r: the trial write was refused: %s", task.origin.address, error)
            return task, False
        if state is OpState.PENDING:
            self._running.append(Running(trial, engine, op))
            return None
        return trial, state is OpState.DONE

    def _finish(self, tasks: list[tuple[Task, bool]], *, error: str = "") -> None:
        """Pass all results at once: one message per peer."""
        for task, ok in tasks:
            if not ok and not isinstance(task, Post):
                self._disconnect(task.incarnation)
            elif isinstance(task, Trial):
                self.trials.end(task)
        with self.locked() as now_s:
            for task, ok in tasks:
                self._report(task, ok=ok, error=error, now_s=now_s)

    def _report(self, task: Task, *, ok: bool, error: str, now_s: float) -> None:
        if isinstance(task, Post):
            self.core.completions.on_op_final(task, ok=ok, error=error, now_s=now_s)
        elif isinstance(task, FencePeer):
            self.core.completions.on_fenced(task.incarnation, ok=ok, now_s=now_s)
        elif ok:
            self.core.admission.on_connected(task.incarnation, now_s)
        else:
            self.core.admission.on_connect_failed(task.incarnation, error, now_s)

    def _drop_quiet(self) -> None:
        if self._dropping:
            busy = {running.task.incarnation for running in self._running}
            for incarnation in [name for name in self._dropping if name not in busy]:
                self._dropping.remove(incarnation)
                self._disconnect(incarnation)

    def _disconnect(self, incarnation: str) -> None:
        connected = self._peers.pop(incarnation, None)
        self.trials.forget(incarnation)
        if connected is not None:
            try:
                connected.engine.disconnect(connected.peer)
            except Exception:
                self.num_errors += 1
                log.exception("sender thread: disconnecting a decode worker failed")


# ---- manager


class PrefillManager(Manager):
    """Sender of KV pages, mapped until `close` returns. Only `close` blocks."""

    def __init__(
        self,
        kv_args: KVArgs,
        engine: Engine,
        config: TransferConfig,
        clock: Clock = time.monotonic,
        *,
        environment: Environment = THIS_MACHINE,
        layers: LayerClock | None = None,
        followers: Sequence[ProcessMark] = (),
        takes: PeerWork = PeerWork.ANY,
    ) -> None:
        """`layers` opens gates, calling `on_mark`; `engine` serves `followers`, too."""
        self.incarnation = environment.incarnation()
        self._engine = engine
        engine.register(engine.caps.carried(kv_args))
        mark = environment.mark()
        self.core = PrefillCore(
            incarnation=self.incarnation,
            marks=(mark, *followers),
            kv_args=kv_args,
            caps=engine.caps,
            config=config,
            takes=takes,
        )
        port = environment.listen(config.control_host, config.control_port, secret=config.secret)
        self._read_row = partial(environment.read_item, kv_args.aux)
        self.control_address: str = port.address  # "host:port" for decode workers
        self.control = ControlThread(self.core, port, name="prefill", clock=clock, on_turn=self._wake_driver)
        self.driver = EngineDriver(
            engine=engine,
            of_ranks=engine if isinstance(engine, RankEngines) else RankEngines((engine,)),
            core=self.core,
            trials=Trials(caps=engine.caps, machine=mark.host, on_gpu=kv_args.kv.device is not None, clock=clock),
            locked=self.control.locked,
            layers=layers,
        )

    def start(self) -> None:
        self.driver.start()
        super().start()

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender:
        """Raises `RoomInUse`, and ValueError outside 1..2**63-1."""
        if fake:
            return FakeTransfer()
        with self.control.locked() as now_s:
            opened = self.core.rooms.open(room, room_attempt, now_s)
        return Sender(self, opened)

    def wake_sender(self) -> None:
        """Any thread may call it."""
        self.driver.wake()

    def on_mark(self) -> None:
        """Layers were written; any thread may call it. Without pages to send it wakes none."""
        if self.core.has_chunks or self.driver.ticking:
            self.driver.wake()

    def row_to_send(self, row: int) -> bytes | None:
        """None if the engine carries it."""
        return None if self._engine.caps.carries_host_memory else self._read_row(row)

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        """Each needs a `sender`."""
        if not self.core.inbox.num_recompute_requests:  # common case, without the lock
            return []
        with self.control.lock:
            return self.core.inbox.take_recompute_requests()

    @property
    def paths(self) -> list[PeerPath]:
        return self.driver.trials.paths

    def check(self) -> None:
        super().check()
        errors = self.driver.num_errors
        assert not errors, f"{errors} internal errors of the sender thread, see the log"

    def close(self) -> None:
        """Abort open transfers, wait some seconds for operations, send `Bye`, stop the threads."""
        if not self.control.first_close():
            return
        self.control.abort_all()
        self.driver.wake()
        self.control.drain()
        quiet = self.driver.close(CLOSE_S)
        if quiet:
            self.control.send_bye()
        self.control.close()
        if quiet:
            self._engine.close()

    def _wake_driver(self) -> None:
        if self.core.wants_driver:
            self.driver.wake()


class Sender:
    def __init__(self, manager: PrefillManager, room: PrefillRoom) -> None:
        self._manager = manager
        self._rooms = manager.core.rooms
        self._control = manager.control
        self._room = room

    @property
    def num_pages(self) -> int | None:
        return self._room.num_pages

    @property
    def skip_pages(self) -> int:
        return self._room.skip_pages

    def poll(self) -> KVPoll:
        return self._room.state

    def send(self, source: SourcePages) -> None:
        row = None if source.metadata_row is None else self._manager.row_to_send(source.metadata_row)
        tail = tuple(np.asarray(ids, dtype=np.int64) for ids in source.tail)
        pages = np.asarray(source.pages, dtype=np.int64)
        chunk = Chunk(pages, source.start, source.metadata_row, source.gate, row, tail)
        with self._control.locked() as now_s:
            self._rooms.send(self._room, chunk, now_s)
            self._manager.wake_sender()  # before the control thread: bytes first, messages can wait

    def abort(self, reason: str) -> None:
        with self._control.locked():
            self._rooms.abort(self._room, reason)

    def failure(self) -> str | None:
        return self._room.reason

    def released(self) -> bool:
        return self._room.released

    def close(self) -> None:
        with self._control.locked() as now_s:
            self._rooms.close(self._room, now_s)
