"""Decode's manager: a `DecodeCore` under a control thread, with pools for blocking calls."""

import time
from collections.abc import Callable
from functools import partial

from transfer_backends.contract import Clock, KVArgs, LookupFailed, Route, TargetPages, TransferConfig
from transfer_backends.control_thread import TICK_S, ControlThread
from transfer_backends.decode.core import DecodeCore
from transfer_backends.decode.lookup import Connect, Disconnect, LookUp
from transfer_backends.decode.proof import Prove
from transfer_backends.decode.rooms import MAX_LOOKUPS_A_SERVER, DecodeRoom, DecodeRooms
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.fake_transfer import FakeTransfer
from transfer_backends.liveness import of_worker
from transfer_backends.peers import Link
from transfer_backends.ports import Engine, KVReceiver, Lookup
from transfer_backends.rooms import KVPoll
from transfer_backends.wire import Origin

EAGER_POLL_S = 0.001  # of an engine that needs it, while a peer waits for that
NUM_LOOKUP_THREADS = 8 * MAX_LOOKUPS_A_SERVER  # started on demand; 7 hanging servers slow no other look-up

Command = Connect | Disconnect | LookUp | Prove


class DecodeManager:
    """Receiver of KV pages. Only `close` blocks; `lookup` runs off-thread."""

    def __init__(
        self,
        kv_args: KVArgs,
        engine: Engine,
        config: TransferConfig,
        *,
        lookup: Lookup,
        clock: Clock = time.monotonic,
        environment: Environment = THIS_MACHINE,
        is_apart: bool = False,
    ) -> None:
        """`is_apart`: the ranks run on several machines."""
        self.incarnation = environment.incarnation()
        self._engine = engine
        self._clock = clock
        self._lookup = lookup
        engine.register(engine.caps.carried(kv_args))
        self.core = DecodeCore(
            incarnation=self.incarnation,
            kv_args=kv_args,
            caps=engine.caps,
            descriptor=engine.descriptor(),
            config=config,
            land_row=partial(environment.write_item, kv_args.aux),
            origin=Origin(environment.mark().host, config.control_host),
            is_apart=is_apart,
        )
        self._port = environment.connect(secret=config.secret)
        self.control = ControlThread(
            self.core,
            self._port,
            name="decode",
            clock=clock,
            execute=self._execute,
            on_turn=self._poll_engine,
            pause_s=self._pause_s,
        )
        self._lookup_pool = environment.pool(NUM_LOOKUP_THREADS, "decode-lookup")
        self._proof_pool = environment.pool(2, "decode-proof")
        self._liveness = environment.liveness

    def start(self) -> None:
        self.control.start()

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the callback for changed states, called in any thread; it must not block."""
        self.control.wakeup = wakeup

    def receiver(
        self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False, route: Route | None = None
    ) -> KVReceiver:
        """Open a transfer. Raises `RoomInUse`, and ValueError for a bad room."""
        if fake:
            return FakeTransfer()
        with self.control.locked() as now_s:
            opened = self.core.open(room, room_attempt, bootstrap, now_s, route=route)
        return Receiver(self.core.rooms, self.control, opened)

    def check(self) -> None:
        self.control.check()

    @property
    def counters(self) -> dict[str, int]:
        return self.control.counters

    def close(self) -> bool:
        """Abort open transfers, wait some seconds for writes to end, stop the threads.

        Returns False if a peer may still write: keep the memory mapped.
        """
        if not self.control.first_close():
            return self.control.is_quiet
        self.control.abort_all()
        drained = self.control.drain()
        if drained:
            self.control.send_bye()
        self.control.close()
        for pool in (self._lookup_pool, self._proof_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if drained:
            self._engine.close()
        return drained

    # ---- control thread

    def _pause_s(self) -> float:
        return EAGER_POLL_S if self._is_eager() else TICK_S

    def _is_eager(self) -> bool:
        return self._engine.caps.target_must_poll and self.core.connections.eager(self._clock())

    def _poll_engine(self) -> None:
        if self._engine.caps.target_must_poll:
            self._engine.progress(eager=self._is_eager())

    def _execute(self, command: Command) -> Link | None:
        if isinstance(command, Connect):
            return None if self._port.connect(command.link, command.control) else command.link
        if isinstance(command, Disconnect):
            self._port.disconnect(command.link)
        elif isinstance(command, LookUp):
            self._lookup_pool.submit(self._look_up, command)
        else:
            self._proof_pool.submit(self._prove, command)
        return None

    # ---- thread pools

    def _look_up(self, item: LookUp) -> None:
        try:
            route = self._lookup(item.bootstrap, item.room, item.any_but)
        except Exception as error:
            failure = error
            if not isinstance(failure, LookupFailed):
                failure = LookupFailed(f"bootstrap look-up: {type(error).__name__}: {error}")
            with self.control.locked() as now_s:
                self.core.finder.on_lookup_failed(item.bootstrap, item.room, failure, now_s)
        else:
            with self.control.locked() as now_s:
                self.core.finder.on_route(item.bootstrap, item.room, route, now_s)

    def _prove(self, item: Prove) -> None:
        proof = of_worker([self._liveness(mark, item.control) for mark in item.marks])
        with self.control.locked() as now_s:
            self.core.proofs.on_proof(item.incarnation, proof, now_s)


class Receiver:
    def __init__(self, rooms: DecodeRooms, control: ControlThread, room: DecodeRoom) -> None:
        self._rooms = rooms
        self._control = control
        self._room = room

    def poll(self) -> KVPoll:
        return self._room.state

    def provide(self, target: TargetPages) -> None:
        with self._control.locked() as now_s:
            self._rooms.provide(self._room, target, now_s)

    def abort(self, reason: str) -> None:
        with self._control.locked() as now_s:
            self._rooms.abort(self._room, reason, now_s)

    def failure(self) -> str | None:
        return self._room.reason

    def retries(self) -> int:
        return self._room.write_try

    def written_pages(self) -> int:
        return self._room.written_pages

    def drained(self) -> bool:
        return self._room.drained

    def close(self) -> None:
        with self._control.locked():
            self._rooms.close(self._room)
