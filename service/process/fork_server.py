"""Fork server: imports modules once (torch: two seconds), and forks children on request.

No thread, GPU or OpenMP region may precede a fork.

    client -> server   request, descriptors   fork: child gets environment, cwd, ...
    server -> client   pid, pidfd
    server -> client   status                 the child has ended
    client -> server   end of file            the client has ended: SIGKILL to the child

A child ends with client and server, the server with its parent. Requests wait for imports. The
abstract socket serves this user and given modules only.

    usage: python -m service.process.fork_server DESCRIPTOR ROOM MODULE...
    ROOM: any word as long as a child's command line
"""

import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from service.process.child_process import ForkReply, ForkRequest, is_own_user, receive
from service.process.start import allow_many_files, die_with_parent, no_collections, set_command_line

# ---- Setup of a forked process, as in a new interpreter.

STARTED_BY = "--started-by="  # in the command line of `ps`: the requesting process
FIRST_FREE = 3  # after stdin, stdout, stderr


def become(request: ForkRequest, received: Sequence[int]) -> None:
    """Take over descriptors (`received`: stdout, stderr, others) and the request's environment."""
    _place(received, (1, 2, *request.descriptors))
    with suppress(OSError):  # a group of another session
        os.setpgid(0, request.group)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None  # depends on the environment
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for ignored in request.ignored:
        signal.signal(ignored, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [request.module, *request.argv]
    set_command_line((sys.executable, "-m", request.module, f"{STARTED_BY}{request.client}", *request.argv))


def _place(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Renumber descriptors; close others but stdin."""
    above = max(FIRST_FREE, *wanted, *received) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    os.closerange(FIRST_FREE, above)
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run(request: ForkRequest) -> int:
    """Run `python -m module argv`; return the status."""
    try:
        return int(importlib.import_module(request.module).main(request.argv))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1


# ---- fork server


class ForkServer:
    """Serves clients of `listener` in one thread."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        self._listener, self._modules = listener, frozenset(modules)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._children: dict[socket.socket, tuple[int, int]] = {}  # client -> pid, pidfd

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():  # an earlier event may have closed it
                    key.data()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if not is_own_user(client):
            client.close()
            return
        self._selector.register(client, selectors.EVENT_READ, lambda: self._hear(client))

    def _hear(self, client: socket.socket) -> None:
        data, received = receive(client)
        request = msgspec.json.decode(data, type=ForkRequest) if data and client not in self._children else None
        if request is not None and request.module in self._modules and not _is_gone(client):
            self._fork(client, request, received)
        else:
            self._drop(client)
        for descriptor in received:
            os.close(descriptor)

    def _fork(self, client: socket.socket, request: ForkRequest, received: Sequence[int]) -> None:
        ends_with_server = die_with_parent()
        pid = os.fork()
        if pid == 0:
            ends_with_server()
            _play(request, received)
        pidfd = os.pidfd_open(pid)
        self._children[client] = pid, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(client))
        with suppress(OSError):  # the client's end is the next event
            socket.send_fds(client, [msgspec.json.encode(ForkReply(pid=pid))], [pidfd])

    def _ended(self, client: socket.socket) -> None:
        status = self._reap(client)
        with suppress(OSError):
            client.send(msgspec.json.encode(ForkReply(status=status)))
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        if client in self._children:
            os.kill(self._children[client][0], signal.SIGKILL)
            self._reap(client)
        self._selector.unregister(client)
        client.close()

    def _reap(self, client: socket.socket) -> int:
        pid, pidfd = self._children.pop(client)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _is_gone(client: socket.socket) -> bool:
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _play(request: ForkRequest, received: Sequence[int]) -> NoReturn:
    status = 1
    try:
        become(request, received)
        gc.enable()
        status = run(request)
    except BaseException:
        traceback.print_exc()
    if not request.exits_hard:
        sys.exit(status)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def main(argv: Sequence[str]) -> NoReturn:
    listener = socket.socket(fileno=int(argv[0]))
    set_command_line((sys.executable, "-m", "service.process.fork_server"))
    allow_many_files()
    with no_collections():
        for name in argv[2:]:
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(f"fork server: {name}: {error}; who needs it will say more", file=sys.stderr, flush=True)
    gc.disable()  # no collection may write into shared memory
    gc.freeze()
    ForkServer(listener, argv[2:]).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
