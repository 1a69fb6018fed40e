"""Real ipc sockets: typed messages arrive in order, foreign bytes are dropped, a stalled peer is an error."""

import asyncio
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from engine import ipc
from engine.ipc import IPC_PREFIX, IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.messages import AbortRequest, FlushCache, GenerateRequest, GetState, ToScheduler
from engine.sampling_params import SamplingParams
from service.process.message_stream import LENGTH
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
        with stranger(paths.to_scheduler) as other:
            for frames in HOSTILE:
                other.sendall(b"".join(LENGTH.pack(len(frame)) + frame for frame in frames))
        for m in sent[1:]:
            push.send(m)
        got: list[ToScheduler] = []
        while len(got) < len(sent) or pull.rejected < sum(map(len, HOSTILE)):
            batch, before = pull.recv(5), pull.rejected
            assert batch or pull.rejected > before or got == sent
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
    """A receiver that never comes, and one that comes and reads nothing."""
    monkeypatch.setattr(ipc, "MAX_QUEUED_BYTES", 1000)
    monkeypatch.setattr(ipc, "LINGER_S", 0.0)
    for has_receiver in (False, True):
        receivers = [PullSocket[ToScheduler](paths.to_scheduler, ToScheduler)] if has_receiver else []
        push = PushSocket(paths.to_scheduler)
        with pytest.raises(PeerStalled, match="scheduler"):
            for i in range(100_000):
                push.send(AbortRequest(rid=str(i)))
        push.close()
        for receiver in receivers:
            receiver.close()


def test_what_the_receiver_has_not_taken_waits_and_a_closing_sender_waits_for_it(
    paths: IpcPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more than a socket holds, in small and in large messages."""
    monkeypatch.setattr(ipc, "LINGER_S", 60.0)
    pull: PullSocket[ToScheduler] = PullSocket(paths.to_scheduler, ToScheduler)
    sent: list[ToScheduler] = [
        GenerateRequest(rid=str(i), input_ids=list(range(i * 200)), sampling=SamplingParams()) for i in range(100)
    ]
    push = PushSocket(paths.to_scheduler)
    for message in sent:
        push.send(message)
    closing = threading.Thread(target=push.close)
    closing.start()
    got: list[ToScheduler] = []
    while len(got) < len(sent) and (batch := pull.recv(5)):
        got += batch
    closing.join()
    pull.close()
    assert got == sent


def test_a_sender_finds_the_next_receiver_once_the_first_has_gone(paths: IpcPaths) -> None:
    first: PullSocket[ToScheduler] = PullSocket(paths.to_scheduler, ToScheduler)
    push = PushSocket(paths.to_scheduler)
    push.send(GetState(call_id="1"))
    assert first.recv(5) == [GetState(call_id="1")]
    first.close()
    push.send(GetState(call_id="2"))
    second: PullSocket[ToScheduler] = PullSocket(paths.to_scheduler, ToScheduler)
    push.send(GetState(call_id="3"))
    got: list[ToScheduler] = []
    while len(got) < 2 and (batch := second.recv(5)):
        got += batch
    push.close()
    second.close()
    assert got == [GetState(call_id="2"), GetState(call_id="3")]


def test_a_sender_that_announces_too_much_is_cut_off_and_the_others_are_not(
    paths: IpcPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_MESSAGE_BYTES", 1000)
    pull: PullSocket[ToScheduler] = PullSocket(paths.to_scheduler, ToScheduler)
    push = PushSocket(paths.to_scheduler)
    try:
        with stranger(paths.to_scheduler) as other:
            other.sendall(LENGTH.pack(1001))
            while True:
                assert pull.recv(0.0) == []
                other.settimeout(0.01)
                with suppress(TimeoutError):
                    assert other.recv(1) == b""
                    break
        push.send(GetState(call_id="1"))
        assert pull.recv(5) == [GetState(call_id="1")]
    finally:
        push.close()
        pull.close()


def stranger(endpoint: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(endpoint)
    return connection


def test_directories_of_killed_owners_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"{IPC_PREFIX}{ended.pid}-abc"
    left.mkdir()
    (left / "scheduler").touch()
    mine = IpcPaths.create(str(tmp_path))
    second = IpcPaths.create(str(tmp_path))
    assert not left.exists() and Path(mine.dir).exists() and Path(second.dir).exists()
