"""Real ipc sockets: typed messages arrive in order, foreign bytes are dropped, a stalled peer is an error."""

import asyncio
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from engine import ipc
from engine.ipc import IPC_PREFIX, IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.messages import AbortRequest, FlushCache, GetState, ToScheduler
from tests.hostile.table import FRAMES

HOSTILE = [*FRAMES.values(), [msgspec.msgpack.encode(["AbortRequest", 7])]]


@pytest.fixture
def paths() -> Iterator[IpcPaths]:
    p = IpcPaths.create()
    yield p
    p.remove()


def test_directory_is_private_and_removed(paths: IpcPaths) -> None:
    assert stat.S_IMODE(os.stat(paths.dir).st_mode) == 0o700
    paths.remove()
    assert not os.path.exists(paths.dir)


def test_messages_arrive_in_order_and_foreign_bytes_are_dropped(paths: IpcPaths) -> None:
    push = PushSocket(paths.to_scheduler)
    sent: list[ToScheduler] = [AbortRequest(rid=str(i)) for i in range(1000)]
    push.send(sent[0])  # before the receiver exists
    pull: PullSocket[ToScheduler] = PullSocket(paths.to_scheduler, ToScheduler)
    try:
        for frames in HOSTILE:
            push.socket.send_multipart(frames)
        for m in sent[1:]:
            push.send(m)
        got: list[ToScheduler] = []
        while len(got) < len(sent):
            batch = pull.recv(5)
            assert batch or pull.rejected
            got += batch
        assert got == sent
        assert pull.rejected == sum(map(len, HOSTILE))
    finally:
        push.close()
        pull.close()


async def test_attached_socket_delivers_to_the_loop_from_another_thread(paths: IpcPaths) -> None:
    pull: PullSocket[ToScheduler] = PullSocket(paths.to_scheduler, ToScheduler)
    got: list[ToScheduler] = []
    done = asyncio.Event()

    def handler(m: ToScheduler) -> None:
        got.append(m)
        if isinstance(m, FlushCache):
            done.set()
        if len(got) == 3:
            raise ValueError("a handler's error must not end the delivery")

    pull.attach(asyncio.get_running_loop(), handler)
    thread = threading.Thread(target=_send_many, args=(paths.to_scheduler,))
    thread.start()
    await asyncio.wait_for(done.wait(), 20)
    thread.join()
    pull.close()
    assert got == [GetState(call_id=str(i)) for i in range(2000)] + [FlushCache(call_id="x")]


def _send_many(endpoint: str) -> None:
    push = PushSocket(endpoint)
    for i in range(2000):
        push.send(GetState(call_id=str(i)))
    push.send(FlushCache(call_id="x"))
    push.close()


def test_a_stalled_peer_is_an_error_and_not_a_wait(paths: IpcPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_QUEUED_MESSAGES", 5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = PushSocket(paths.to_scheduler, context=context)
    try:
        with pytest.raises(PeerStalled, match="scheduler"):
            for i in range(100):
                push.send(AbortRequest(rid=str(i)))
    finally:
        push.socket.close(0)
        context.term()


def test_directories_of_killed_owners_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"{IPC_PREFIX}{ended.pid}-abc"
    left.mkdir()
    (left / "scheduler").touch()
    mine = IpcPaths.create(str(tmp_path))
    second = IpcPaths.create(str(tmp_path))
    assert not left.exists() and Path(mine.dir).exists() and Path(second.dir).exists()
