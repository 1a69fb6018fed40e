"""Sender thread: runs the core's operations on an engine to their end."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from transfer_backends.contract import OpState
from transfer_backends.ports import Engine, LayerClock
from transfer_backends.prefill.core import PrefillCore
from transfer_backends.prefill.inbox import Post
from transfer_backends.prefill.paths import Command, ConnectPeer, FencePeer
from transfer_backends.prefill.trials import Trial, Trials
from transfer_backends.rooms import RoomKey

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


class EngineDriver:
    """Polls frequently while operations end, and less and less otherwise."""

    def __init__(
        self,
        *,
        engine: Engine,
        of_ranks: Engine,
        core: PrefillCore,
        trials: Trials,
        locked: Callable[[], AbstractContextManager[float]],
        layers: LayerClock | None = None,
    ) -> None:
        """`of_ranks` serves peers with several pairs of ranks; `locked()` yields the time."""
        self.trials = trials
        self._layers = layers
        self._engine = engine
        self._of_ranks = of_ranks
        self._core = core
        self._locked = locked
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
        """Return True if no operation is pending."""
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
        if not self._running and not (self._layers is not None and self._layers.ticking):
            self._event.wait(IDLE_S)
            return
        self._naps += 1
        longest_s = self._engine.caps.longest_nap_s if self._running else LONG_BACKOFF_S
        nap_s = min(FIRST_BACKOFF_S * 2 ** min(self._naps, 10), longest_s)
        if self._core.outbox.window_full:  # polls take a core from the engine's threads, and nothing has ended yet
            nap_s = max(nap_s, self._engine.caps.full_window_s)
        self._event.wait(STALE_BACKOFF_S if self._naps > STALE_AFTER_BACKOFFS else nap_s)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> bool:
        """Return True if something moved."""
        with self._locked() as now_s:
            if self._layers is not None:
                self._core.outbox.on_progress(self._layers.progress(), now_s)
            self._request_polls(now_s)
            commands = list(self._core.paths.commands)
            self._core.paths.commands.clear()
            posts = self._core.outbox.next_posts(now_s)
        for command in commands:
            self._execute(command)
        self._post(posts)
        moved = self._poll()
        self._drop_quiet()
        return moved or bool(posts or commands)

    def _request_polls(self, now_s: float) -> None:
        if self._engine.caps.target_must_poll:
            for incarnation in dict.fromkeys(running.task.incarnation for running in self._running):
                self._core.paths.on_pending(incarnation, now_s)

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
                engine = self._of_ranks if command.of_ranks else self._engine
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
        """Start the trial write, or return what ended."""
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
        with self._locked() as now_s:
            for task, ok in tasks:
                self._report(task, ok=ok, error=error, now_s=now_s)

    def _report(self, task: Task, *, ok: bool, error: str, now_s: float) -> None:
        if isinstance(task, Post):
            self._core.completions.on_op_final(task, ok=ok, error=error, now_s=now_s)
        elif isinstance(task, FencePeer):
            self._core.completions.on_fenced(task.incarnation, ok=ok, now_s=now_s)
        elif ok:
            self._core.admission.on_connected(task.incarnation, now_s)
        else:
            self._core.admission.on_connect_failed(task.incarnation, error, now_s)

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
