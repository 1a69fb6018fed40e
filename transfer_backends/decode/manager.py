"""Decode's manager: runs `DecodeRooms` under a control thread; look-ups and proofs of death run in small thread pools.

The role calls `receiver(...)` from the scheduler's loop; nothing it does there blocks.
"""

import time
from collections.abc import Sequence

from transfer_backends.contract import Clock, KVArgs, LookupFailed, TransferConfig, Work
from transfer_backends.control_port import Event, Frame, LinkClosed
from transfer_backends.decode.lookup_line import MAX_LOOKUPS_A_SERVER
from transfer_backends.decode.rooms import DecodeRooms
from transfer_backends.decode.sessions import Command, Connect, Disconnect, LookUp, Prove
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.fake_pair import FakeReceiver
from transfer_backends.kvpoll import FINAL, KVPoll, RoomKey
from transfer_backends.ports import Engine, KVReceiver, Lookup, LookupAny
from transfer_backends.shell import TICK_S, Shell
from transfer_backends.wire import Bye, Message, encode

EAGER_POLL_S = 0.001  # of an engine that needs it, while somebody waits for that
NUM_LOOKUP_THREADS = 8 * MAX_LOOKUPS_A_SERVER  # started when needed; that many servers may hang and slow nobody
CLOSE_S = 5.0
NO_HANDSHAKE = "it refused the connection; start every worker with the same --cluster-secret-file (or all without)"


class DecodeManager(Shell):
    """Receives KV pages into this worker's pool.

    `kv_args` describes memory that must stay mapped until the process ends if `close` returned False. `lookup` finds the
    prefill worker behind a bootstrap address; it may block (its own timeout should be a few seconds) and runs off-thread.
    `lookup_any`: for rooms that any prefill worker may serve; default: `lookup`.
    """

    def __init__(
        self,
        kv_args: KVArgs,
        engine: Engine,
        config: TransferConfig,
        *,
        lookup: Lookup,
        lookup_any: LookupAny | None = None,
        clock: Clock = time.monotonic,
        environment: Environment = THIS_MACHINE,
    ) -> None:
        self.incarnation = environment.incarnation()
        self._engine = engine
        self._lookup = lookup
        self._lookup_any = lookup_any or (lambda bootstrap, room, _: lookup(bootstrap, room))
        engine.register([kv_args.kv, kv_args.aux])
        self._rooms = DecodeRooms(
            incarnation=self.incarnation,
            kv_args=kv_args,
            caps=engine.caps,
            descriptor=engine.descriptor(),
            config=config,
        )
        self._links = environment.connect(secret=config.secret)
        super().__init__(name="decode", port=self._links, machine=self._rooms.machine, config=config, clock=clock)
        self._lookups = environment.pool(NUM_LOOKUP_THREADS, "decode-lookup")
        self._proofs = environment.pool(2, "decode-proof")
        self._liveness = environment.liveness

    def start(self) -> None:
        self._thread.start()

    def receiver(self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False) -> KVReceiver:
        """`bootstrap`: "host:port" of the bootstrap server. Raises `RoomInUse`, or ValueError for a bad room."""
        if fake:
            return FakeReceiver()
        with self.core() as now_s:
            key = self._rooms.open(room, room_attempt, bootstrap, now_s)
        return Receiver(self, key)

    def check(self) -> list[str]:
        with self._lock:
            problems = self._rooms.check()
        faults = self._faults["control_errors"]
        return problems + ([f"{faults} internal errors, see the log"] if faults else [])

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            gauges = {
                "rooms": self._rooms.num_rooms,
                "farewells": self._rooms.num_farewells,
                "peers": len(self._rooms.sessions),
                "exposed_rooms": self._rooms.num_exposed,
            }
            return {**self._rooms.effects.counters, **self._faults, **gauges}

    def close(self) -> bool:
        """Abort what is open, wait (some seconds) for it to drain, end the threads.

        False: some room did not drain, a peer may still write into the pool; the engine stays up then.
        """
        if not self._first_close():
            return self.is_quiet
        self.fail_open()
        deadline_s = time.monotonic() + CLOSE_S
        while not self.is_quiet and time.monotonic() < deadline_s:
            time.sleep(0.001)
        drained = self.is_quiet
        if drained:
            with self.core():
                self.say_goodbye()
        self._end()
        for pool in (self._lookups, self._proofs):
            pool.shutdown(wait=False, cancel_futures=True)
        if drained:
            self._engine.close()
        return drained

    def fail_open(self) -> None:
        """First step of `close`: every live transfer ends, prefill is told."""
        with self.core() as now_s:
            for key in list(self._rooms.machine):
                self._rooms.abort(key, "the decode worker is shutting down", now_s)

    @property
    def is_quiet(self) -> bool:
        """No peer can write into the pool."""
        return self._rooms.num_exposed == 0

    def say_goodbye(self) -> None:
        """Last step, in `core()`."""
        for session in self._rooms.sessions.live():
            self._rooms.sessions.say(session, Bye(self.incarnation, session.incarnation))

    # ---- control thread

    def _has_effects(self) -> bool:
        return bool(self._rooms.effects.queue)

    def _pause_s(self) -> float:
        eager = self._engine.caps.target_must_poll and self._rooms.sessions.eager(self._clock())
        return EAGER_POLL_S if eager else TICK_S

    def _on_event(self, event: Event, now_s: float) -> None:
        if isinstance(event, Frame):
            self._read(event.data, lambda message: self._rooms.on_message(event.link, message, now_s))
        elif isinstance(event, LinkClosed):
            self._rooms.on_link_closed(
                event.link, now_s, reason=NO_HANDSHAKE if event.refused else "the connection was lost"
            )

    def _tick(self, now_s: float) -> None:
        self._rooms.tick(now_s)

    def _flush(self) -> None:
        if self._engine.caps.target_must_poll:
            self._engine.progress()
        while True:
            with self._lock:
                work = list(self._rooms.effects.queue)
                self._rooms.effects.queue.clear()
            if not work:
                return
            lost = [link for item in work if (link := self._do(item)) is not None]
            if lost:
                with self.core() as now_s:
                    for link in lost:
                        self._rooms.on_link_closed(link, now_s)

    def _do(self, item: Command | tuple[int, Message]) -> int | None:
        """Returns the link when it turned out to be lost."""
        if isinstance(item, tuple):
            link, message = item
            return None if self._links.send(link, encode(message)) else link
        if isinstance(item, Connect):
            return None if self._links.connect(item.link, item.control) else item.link
        if isinstance(item, Disconnect):
            self._links.disconnect(item.link)
        elif isinstance(item, LookUp):
            self._lookups.submit(self._look_up, item)
        else:
            self._proofs.submit(self._prove, item)
        return None

    # ---- off-thread

    def _look_up(self, item: LookUp) -> None:
        try:
            if item.any_but is None:
                route = self._lookup(item.bootstrap, item.room)
            else:
                route = self._lookup_any(item.bootstrap, item.room, item.any_but)
        except LookupFailed as error:
            self._on_lookup_failed(item, str(error), permanent=error.permanent)
        except Exception as error:
            self._on_lookup_failed(item, f"bootstrap look-up: {type(error).__name__}: {error}", permanent=False)
        else:
            with self.core() as now_s:
                self._rooms.on_route(item.bootstrap, item.room, route, now_s)

    def _on_lookup_failed(self, item: LookUp, error: str, *, permanent: bool) -> None:
        with self.core() as now_s:
            self._rooms.on_lookup_failed(item.bootstrap, item.room, error, permanent=permanent, now_s=now_s)

    def _prove(self, item: Prove) -> None:
        proof = self._liveness(item.mark, item.control)
        with self.core() as now_s:
            self._rooms.on_proof(item.incarnation, proof, now_s)


class Receiver:
    """`KVReceiver` of a real transfer."""

    def __init__(self, manager: DecodeManager, key: RoomKey) -> None:
        self._manager = manager
        self._key = key
        self._rooms = manager._rooms
        self._last = KVPoll.Bootstrapping

    def poll(self) -> KVPoll:
        if self._last not in FINAL:
            self._last = self._rooms.machine.state(self._key)
        return self._last

    def provide(self, dst_pages: Sequence[int], metadata_row: int, *, skip_pages: int = 0) -> None:
        with self._manager.core() as now_s:
            self._rooms.provide(self._key, dst_pages, metadata_row, now_s, skip_pages=skip_pages)

    def recompute(self, dst_pages: Sequence[int], metadata_row: int, work: Work) -> None:
        with self._manager.core() as now_s:
            self._rooms.provide(self._key, dst_pages, metadata_row, now_s, work)

    def abort(self, reason: str) -> None:
        with self._manager.core() as now_s:
            self._rooms.abort(self._key, reason, now_s)

    def failure(self) -> str | None:
        return self._rooms.failure(self._key)

    def retries(self) -> int:
        return self._rooms.retries(self._key)

    def drained(self) -> bool:
        return self._rooms.drained(self._key)

    def close(self) -> None:
        with self._manager.core():
            self._rooms.close(self._key)
