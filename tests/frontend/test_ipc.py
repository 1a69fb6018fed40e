"""Real sockets: typed messages arrive in order whatever their size, foreign bytes are dropped, a stalled peer is an error."""

import asyncio
import os
import select
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.frontend import frames, ipc
from engine.frontend.frames import HEAD, FrameReader, FrameWriter
from engine.frontend.ipc import IPC_PREFIX, IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.messages import AbortRequest, FlushCache, GetState, ToScheduler


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
    stranger = FrameWriter(paths.to_scheduler, max_kept=100)
    try:
        for hostile in (
            b"",
            b"\xc1",
            b"{}",
            msgspec.msgpack.encode(["NoSuchTag", 1]),
            msgspec.msgpack.encode(["AbortRequest", 7]),
        ):
            stranger.send(hostile)
        for m in sent[1:]:
            push.send(m)
        got: list[ToScheduler] = []
        while len(got) < len(sent) or pull.rejected < 5:
            assert select.select([pull.fd], [], [], 5)[0]
            got += pull.recv_all_nowait()
        assert got == sent
        assert pull.rejected == 5
    finally:
        stranger.close()
        push.close()
        pull.close()


def test_attached_socket_delivers_to_the_loop_from_another_thread(paths: IpcPaths) -> None:
    async def main() -> list[ToScheduler]:
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
        return got

    got = asyncio.run(main())
    assert got == [GetState(call_id=str(i)) for i in range(2000)] + [FlushCache(call_id="x")]


def _send_many(endpoint: str) -> None:
    push = PushSocket(endpoint)
    for i in range(2000):
        push.send(GetState(call_id=str(i)))
    push.send(FlushCache(call_id="x"))
    push.close()


def test_a_stalled_peer_is_an_error_and_not_a_wait(paths: IpcPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_QUEUED_MESSAGES", 5)
    push = PushSocket(paths.to_scheduler)
    try:
        with pytest.raises(PeerStalled, match="scheduler"):
            for i in range(100):
                push.send(AbortRequest(rid=str(i)))
    finally:
        push.close()


def test_frames_larger_than_a_socket_holds_come_whole_and_in_order(paths: IpcPaths) -> None:
    """The writer never waits: what does not fit is sent as the reader reads, and what comes later stays behind it."""
    reader = FrameReader(paths.to_scheduler)
    writers = [FrameWriter(paths.to_scheduler, max_kept=100) for _ in range(2)]
    sizes = (0, 3, 5_000_000, 1, 200_000, 65_536, 65_532, 4)
    try:
        for n, writer in enumerate(writers):
            for i, size in enumerate(sizes):
                writer.send(bytes([10 * n + i]) + b"." * size)
        got = _take(reader, 2 * len(sizes))
        for n in range(2):
            assert [f for f in got if f[0] // 10 == n] == [
                bytes([10 * n + i]) + b"." * size for i, size in enumerate(sizes)
            ]
        threads = [t for t in threading.enumerate() if t.name == "frame-writer"]
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()  # nothing is left to send: no thread waits
    finally:
        for writer in writers:
            writer.close()
        reader.close()


def test_a_reader_that_comes_back_gets_what_is_sent_from_then_on(paths: IpcPaths) -> None:
    writer = FrameWriter(paths.to_scheduler, max_kept=1000)
    reader = FrameReader(paths.to_scheduler)
    try:
        writer.send(b"first")
        assert _take(reader, 1) == [b"first"]
        reader.close()
        writer.send(b"second")  # nobody is there
        reader = FrameReader(paths.to_scheduler)
        writer.send(b"third")
        assert _take(reader, 2) == [b"second", b"third"]
    finally:
        writer.close()
        reader.close()


def test_a_writer_whose_reader_has_gone_does_not_wait_for_it(paths: IpcPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LINGER_S", 3600.0)
    writer = FrameWriter(paths.to_scheduler, max_kept=1000)
    reader = FrameReader(paths.to_scheduler)
    writer.send(b"first")
    assert _take(reader, 1) == [b"first"]
    reader.close()
    writer.send(b"second")
    assert writer.num_kept == 1
    writer.close()
    assert writer.num_kept == 0


def test_who_announces_too_long_a_frame_is_cut_off_and_others_are_not(
    paths: IpcPaths, caplog: pytest.LogCaptureFixture
) -> None:
    reader = FrameReader(paths.to_scheduler)
    writer = FrameWriter(paths.to_scheduler, max_kept=10)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(paths.to_scheduler)
        stranger.sendall(HEAD.pack(0xFFFFFFFF) + b"x" * 100)
        while reader.num_dropped == 0:
            assert not reader.take(5)
        assert "4294967295 bytes" in caplog.text
        writer.send(b"fine")
        assert _take(reader, 1) == [b"fine"]
    writer.close()
    reader.close()


def _take(reader: FrameReader, count: int) -> list[bytes]:
    got: list[bytes] = []
    while len(got) < count:
        new = reader.take(10)
        assert new is not None, f"only {len(got)} of {count} frames came"
        got += new
    return got


def test_directories_of_killed_owners_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"{IPC_PREFIX}{ended.pid}-abc"
    left.mkdir()
    (left / "scheduler").touch()
    mine = IpcPaths.create(str(tmp_path))
    second = IpcPaths.create(str(tmp_path))
    assert not left.exists() and Path(mine.dir).exists() and Path(second.dir).exists()
