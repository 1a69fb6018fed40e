"""Prefill's manager: runs `PrefillRooms` under a control thread (sockets) and a sender thread (engine).

The role calls `sender(...)` from the scheduler's loop; nothing it does there blocks.
"""

import time
from collections.abc import Sequence

from transfer_backends.contract import Clock, Gate, KVArgs, RecomputeRequest, TransferConfig
from transfer_backends.control_port import Event, Frame, LinkClosed, PeersRefused
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.fake_pair import FakeSender
from transfer_backends.kvpoll import FINAL, KVPoll, RoomKey
from transfer_backends.ports import Engine, KVSender, LayerClock
from transfer_backends.prefill.driver import EngineDriver
from transfer_backends.prefill.rooms import PrefillRooms
from transfer_backends.shell import TICK_S, Shell
from transfer_backends.wire import Bye, Message, Ping, encode

CLOSE_S = 5.0


class PrefillManager(Shell):
    """Sends KV pages of this worker's pool to decode workers.

    `kv_args` describes memory that must stay mapped until `close` returned. The engine belongs to the manager.
    """

    def __init__(
        self,
        kv_args: KVArgs,
        engine: Engine,
        config: TransferConfig,
        clock: Clock = time.monotonic,
        *,
        environment: Environment = THIS_MACHINE,
        layers: LayerClock | None = None,
    ) -> None:
        """`layers`: what opens gates; its ticks call `wake_sender`."""
        self.incarnation = environment.incarnation()
        self._engine = engine
        engine.register([kv_args.kv, kv_args.aux])
        self._rooms = PrefillRooms(
            incarnation=self.incarnation, mark=environment.mark(), kv_args=kv_args, caps=engine.caps, config=config
        )
        self._listen = environment.listen(config.control_host, config.control_port, secret=config.secret)
        super().__init__(name="prefill", port=self._listen, machine=self._rooms.machine, config=config, clock=clock)
        self._driver = EngineDriver(engine=engine, rooms=self._rooms, core=self.core, layers=layers)
        self._recheck = 0

    def start(self) -> None:
        self._driver.start()
        self._thread.start()

    @property
    def control_address(self) -> str:
        """ "host:port" for decode workers."""
        return self._listen.address

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> KVSender:
        """Raises `RoomInUse` for a live room and ValueError for one that is not between 1 and 2**63-1."""
        if fake:
            return FakeSender()
        with self.core() as now_s:
            key = self._rooms.open(room, room_attempt, now_s)
        return Sender(self, key)

    def wake_sender(self) -> None:
        """There may be something to post. From any thread; costs nothing to speak of."""
        self._driver.wake()

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        """What decode workers want computed, in order; each needs a `sender` of its room and attempt."""
        if not self._rooms.num_recompute_requests:  # the usual case needs no lock
            return []
        with self._lock:
            return self._rooms.take_recompute_requests()

    def check(self) -> list[str]:
        with self._lock:
            problems = self._rooms.check()
        faults = self._faults["control_errors"] + self._driver.num_errors
        return problems + ([f"{faults} internal errors, see the log"] if faults else [])

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            gauges = {"rooms": len(self._rooms.machine), "peers": len(self._rooms.peers)}
            return {**self._rooms.effects.counters, **self._faults, **gauges}

    def close(self) -> None:
        """Fail what is open, let posted operations end, say goodbye, end the threads. Blocks for some seconds at most."""
        if not self._first_close():
            return
        self.fail_open()
        deadline_s = time.monotonic() + CLOSE_S
        while not self.is_quiet and time.monotonic() < deadline_s:
            time.sleep(0.001)
        quiet = self._driver.close(CLOSE_S)
        if quiet:
            with self.core():
                self.say_goodbye()
        self._end()
        if quiet:
            self._engine.close()

    def fail_open(self) -> None:
        """First step of `close`: every live transfer ends, decode is told."""
        with self.core():
            for key in list(self._rooms.machine):
                self._rooms.abort(key, "the prefill worker is shutting down")
        self._driver.wake()

    @property
    def is_quiet(self) -> bool:
        """Nothing that was posted can still write."""
        with self._lock:
            return self._rooms.is_quiet

    def say_goodbye(self) -> None:
        """Last step, in `core()`. Goodbye says that nothing of this process is written any more; who is not told it will

        look whether the process has died, and wait for its last bytes.
        """
        for peer in self._rooms.quiet_peers():
            self._rooms.peers.say(peer, Bye(self.incarnation, peer.incarnation))

    # ---- control thread

    def _has_effects(self) -> bool:
        return bool(self._rooms.effects.outbox)

    def _pause_s(self) -> float:
        return TICK_S

    def _on_event(self, event: Event, now_s: float) -> None:
        if isinstance(event, Frame):
            self._read(event.data, lambda message: self._rooms.on_message(event.link, message, now_s))
        elif isinstance(event, LinkClosed):
            self._rooms.on_link_closed(event.link, now_s)
        elif isinstance(event, PeersRefused):
            text = "a stranger at the control plane was refused (do all workers have the same --cluster-secret-file?)"
            self._fault("refused_connections", text, count=event.count)
        else:
            self._recheck = 3

    def _tick(self, now_s: float) -> None:
        self._rooms.tick(now_s)
        if self._recheck:  # some link is gone: a send to it fails
            self._recheck -= 1
            for link in self._rooms.peers.links():
                peer = self._rooms.peers.by_link(link)
                if peer is not None:
                    self._rooms.peers.say(peer, Ping(self.incarnation, peer.incarnation, 0))

    def _flush(self) -> None:
        while True:
            with self._lock:
                work = self._take()
            if not work:
                break
            lost = [link for link, message in work if not self._listen.send(link, encode(message))]
            if lost:
                with self.core() as now_s:
                    for link in lost:
                        self._rooms.on_link_closed(link, now_s)
        if self._rooms.wants_driver:
            self._driver.wake()

    def _take(self) -> list[tuple[object, Message]]:
        outbox = self._rooms.effects.outbox
        work = list(outbox)
        outbox.clear()
        return work


class Sender:
    """`KVSender` of a real transfer."""

    def __init__(self, manager: PrefillManager, key: RoomKey) -> None:
        self._manager = manager
        self._key = key
        self._rooms = manager._rooms
        self._last = KVPoll.Bootstrapping

    @property
    def num_pages(self) -> int | None:
        return self._rooms.num_pages(self._key)

    @property
    def skip_pages(self) -> int:
        return self._rooms.skip_pages(self._key)

    def poll(self) -> KVPoll:
        if self._last not in FINAL:
            self._last = self._rooms.machine.state(self._key)
        return self._last

    def send(
        self,
        src_pages: Sequence[int],
        *,
        start: int,
        last: bool,
        metadata_row: int | None = None,
        gate: Gate | None = None,
    ) -> None:
        with self._manager.core() as now_s:
            self._rooms.send(
                self._key, src_pages, start=start, last=last, metadata_row=metadata_row, now_s=now_s, gate=gate
            )
            self._manager._driver.wake()  # before the control thread, whose news can wait: bytes first

    def abort(self, reason: str) -> None:
        with self._manager.core():
            self._rooms.abort(self._key, reason)

    def failure(self) -> str | None:
        return self._rooms.failure(self._key)

    def released(self) -> bool:
        return self._rooms.released(self._key)

    def close(self) -> None:
        with self._manager.core() as now_s:
            self._rooms.close(self._key, now_s)
