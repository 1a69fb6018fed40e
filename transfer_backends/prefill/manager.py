"""Prefill's manager: a `PrefillCore` under control and sender threads."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from transfer_backends.contract import Clock, KVArgs, PeerPath, RecomputeRequest, SourcePages, TransferConfig
from transfer_backends.control_thread import CLOSE_S, ControlThread
from transfer_backends.engines.rank_engines import RankEngines
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.fake_transfer import FakeTransfer
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Engine, KVSender, LayerClock
from transfer_backends.prefill.core import PrefillCore
from transfer_backends.prefill.driver import EngineDriver
from transfer_backends.prefill.inbox import Chunk
from transfer_backends.prefill.rooms import PrefillRoom
from transfer_backends.prefill.trials import Trials
from transfer_backends.rooms import KVPoll


class PrefillManager:
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
        computes: bool = True,
    ) -> None:
        """`layers` opens gates, calling `wake_sender`; `engine` serves `followers`, too.

        `computes` is False for a decode worker, which sends the KV of requests that leave it.
        """
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
            computes=computes,
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
        self.control.start()

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the callback for changed states, called in any thread; it must not block."""
        self.control.wakeup = wakeup

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender:
        """Open a transfer. Raises `RoomInUse`, and ValueError outside 1..2**63-1."""
        if fake:
            return FakeTransfer()
        with self.control.locked() as now_s:
            opened = self.core.rooms.open(room, room_attempt, now_s)
        return Sender(self, opened)

    def wake_sender(self) -> None:
        """Look for posts; any thread."""
        self.driver.wake()

    def row_to_send(self, row: int) -> bytes | None:
        """Return a metadata row, unless the engine carries it."""
        return None if self._engine.caps.carries_host_memory else self._read_row(row)

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        """Take requests; each needs a `sender`."""
        if not self.core.inbox.num_recompute_requests:  # common case, without the lock
            return []
        with self.control.lock:
            return self.core.inbox.take_recompute_requests()

    @property
    def paths(self) -> list[PeerPath]:
        return self.driver.trials.paths

    def check(self) -> None:
        self.control.check()
        errors = self.driver.num_errors
        assert not errors, f"{errors} internal errors of the sender thread, see the log"

    @property
    def counters(self) -> dict[str, int]:
        return self.control.counters

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
