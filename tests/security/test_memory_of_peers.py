"""A transfer peer can only be told addresses inside registered pools: a member that has gone mad, over real sockets and
engines, says what it likes; memory beside its pool and prefill's own stay as they were, and the next transfer is right.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from service.security.browser import is_loopback
from tests.transfer.pool import CANARY, Pool
from tests.transfer.rig import ROOT, until
from transfer_backends.contract import RankMemory, Region, SourcePages, TransferConfig
from transfer_backends.engines.registry import make_engine
from transfer_backends.liveness import ProcessMark, host_id
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import FINAL, KVPoll
from transfer_backends.wire import (
    Message,
    Refused,
    Register,
    Registered,
    Status,
    TransferInfo,
    decode,
    encode,
    layout_of,
)

PAGE_BYTES, NUM_PAGES, FIRST, ROW_BYTES = 4096, 8, 4, 512
DEAD = ProcessMark(host_id(), 2**22 - 1, 1)


class Field:
    """A decode worker's memory: its pool in the middle of canaries, and only that pool is registered with the engine."""

    def __init__(self, backend: str) -> None:
        self.bytes = np.full((FIRST + NUM_PAGES + FIRST, PAGE_BYTES), CANARY, np.uint8)
        self.rows = np.full((64, ROW_BYTES), CANARY, np.uint8)
        self.kv = Region(self.bytes[FIRST:].ctypes.data, NUM_PAGES, PAGE_BYTES, None)
        self.aux = Region(self.rows.ctypes.data, 64, ROW_BYTES, None)
        self.engine = make_engine(backend)
        self.engine.register([self.kv, self.aux])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._progress)
        self._thread.start()

    def _progress(self) -> None:
        while not self._stop.wait(0.001):
            self.engine.progress()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.engine.close()

    @property
    def beside_is_untouched(self) -> bool:
        return bool((self.bytes[:FIRST] == CANARY).all() and (self.bytes[FIRST + NUM_PAGES :] == CANARY).all())


@dataclass
class Scene:
    prefill: PrefillManager
    pool: Pool
    field: Field
    liar: Field
    backend: str

    def register(self, life: str, field: Field, kv: Region, aux: Region | None = None) -> tuple[Any, Message]:
        """A link on which `life`, whose memory is `field`, has registered, and the answer."""
        link = self.context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.RCVTIMEO, 10_000)
        link.connect(f"tcp://{self.prefill.control_address}")
        layout = layout_of(self.pool.args, backend=self.backend)
        rank = RankMemory(kv, 0, 1, 0, 1, field.engine.descriptor())
        message = Register(life, self.prefill.incarnation, layout, (rank,), aux or _wire(field.aux))
        link.send(encode(message))
        return link, answer(link, Registered, Refused)

    def __post_init__(self) -> None:
        self.context = zmq.Context(1)

    def tell(self, link: Any, life: str, room: int, pages: bytes, row: int = 0) -> None:
        link.send(encode(TransferInfo(life, self.prefill.incarnation, room, 0, pages, row)))

    def close(self) -> None:
        self.context.destroy(0)
        self.prefill.check()
        self.prefill.close()
        self.field.close()
        self.liar.close()


def _wire(region: Region, **changes: int) -> Region:
    return msgspec.structs.replace(region, **changes)


def answer(link: Any, *kinds: type) -> Message:
    """The next message of these kinds; heartbeats go by."""
    while not isinstance(message := decode(link.recv()), kinds):
        pass
    return message


def ids(*pages: int) -> bytes:
    return np.array(pages, dtype="<i4").tobytes()


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    pool = Pool(num_pages=NUM_PAGES, page_bytes=PAGE_BYTES, seed=1)
    config = TransferConfig(heartbeat_interval_s=0.2, transfer_timeout_s=20.0)
    prefill = PrefillManager(pool.args, make_engine(request.param), config)
    prefill.start()
    made = Scene(prefill, pool, Field(request.param), Field(request.param), request.param)
    yield made
    made.close()


def test_pages_outside_the_pool_are_refused_and_the_rest_goes_on(scene: Scene) -> None:
    """Beyond the end, before the begin, far away, twice, half an id, and a row that there is not; then good ones."""
    link, said = scene.register("decode-1", scene.field, _wire(scene.field.kv))
    assert isinstance(said, Registered)
    sender = scene.prefill.sender(1)
    outside = (ids(0, NUM_PAGES), ids(-1), ids(2**31 - 1), ids(-(2**31)), ids(3, 3), ids(1)[:3])
    bad = [*((pages, 0) for pages in outside), (ids(1), 64), (ids(1), 2**63 - 1)]
    for pages, row in bad:
        scene.tell(link, "decode-1", 1, pages, row)
        refusal = answer(link, Status)
        assert isinstance(refusal, Status) and refusal.state == KVPoll.Failed and refusal.room == 1, refusal
        assert sender.poll() is KVPoll.Bootstrapping
    scene.tell(link, "decode-1", 1, ids(7, 0))
    until(lambda: sender.poll() is KVPoll.WaitingForInput)
    sender.send(SourcePages([2, 5], metadata_row=3))
    until(lambda: sender.poll() in FINAL, timeout_s=30.0)
    assert sender.poll() is KVPoll.Success, sender.failure()
    until(sender.released)
    sender.close()
    pool = scene.field.bytes[FIRST : FIRST + NUM_PAGES]
    assert (pool[7] == scene.pool.kv[2]).all() and (pool[0] == scene.pool.kv[5]).all()
    assert (pool[1:7] == CANARY).all() and scene.field.beside_is_untouched
    link.close()


def test_a_pool_that_is_said_to_be_longer_than_it_is_stays_as_it_is(scene: Scene) -> None:
    """Prefill cannot know; the engine of the memory's owner does, and no byte beyond what was registered changes."""
    link, said = scene.register("decode-liar", scene.liar, _wire(scene.liar.kv, num_items=NUM_PAGES + FIRST))
    assert isinstance(said, Registered)
    sender = scene.prefill.sender(2)
    scene.tell(link, "decode-liar", 2, ids(NUM_PAGES - 1, NUM_PAGES, NUM_PAGES + 1))
    until(lambda: sender.poll() is KVPoll.WaitingForInput)
    sender.send(SourcePages([0, 1, 2], metadata_row=0))
    until(lambda: sender.poll() is KVPoll.Failed, timeout_s=30.0)
    until(sender.released, timeout_s=30.0)
    assert scene.liar.beside_is_untouched
    sender.close()
    link.close()
    test_pages_outside_the_pool_are_refused_and_the_rest_goes_on(scene)


LISTENING = """
import psutil, sys
from transfer_backends.engines.registry import make_engine
engine = make_engine(sys.argv[1], host="127.0.0.1")
engine.register([])
print(*[c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"])
engine.close()
"""


def test_nixl_of_a_worker_on_loopback_is_not_to_be_reached_from_elsewhere() -> None:
    """Found while fuzzing: UCX listened on every device of the machine. (Mooncake does, and cannot be told not to.)"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-c", LISTENING, "nixl"]
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() and all(is_loopback(address) for address in said.stdout.split()), said.stdout
