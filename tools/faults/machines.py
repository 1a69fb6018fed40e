"""Machines of our own inside this one: network namespaces, each on a cable to one bridge, and cables can be pulled.

    root namespace (router, bootstrap server, the test)  10.x.y.1  bridge --- cable --- 10.x.y.2  machine "prefill"
                                                                      +------ cable --- 10.x.y.3  machine "decode"

A pulled cable is the link set down: nothing gets through in either direction, nothing is reset, and the machine's own
interface loses its carrier. Everything that leaves the machine is cut, whatever opened the connection. Needs root with
CAP_NET_ADMIN and iproute2; knows nothing of what runs on the machines.
"""

import contextlib
import ctypes
import os
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000  # sched.h
SUBNETS = 60_000
TRIES = 20


class Machines:
    """`close()` must be called. `host`: this side's address, `address[name]`: a machine's."""

    def __init__(self, names: Sequence[str]) -> None:
        self._number, prefix = _free_subnet()
        self.host = f"{prefix}.1"
        self.address = {name: f"{prefix}.{i}" for i, name in enumerate(names, start=2)}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _ip(f"link add {self._bridge} type bridge")
        _ip(f"addr add {self.host}/24 dev {self._bridge}")
        _ip(f"link set {self._bridge} up")
        for name, address in self.address.items():
            space, cable = self._space(name), self._cable(name)
            _ip(f"netns add {space}")
            _ip(f"link add {cable} type veth peer name eth0 netns {space}")
            _ip(f"link set {cable} master {self._bridge} up")
            _ip(f"-n {space} addr add {address}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")

    @property
    def _bridge(self) -> str:
        return f"tf{self._number}"

    def _cable(self, name: str) -> str:
        return f"{self._bridge}-{list(self.address).index(name)}"  # an interface has at most 15 letters

    def _space(self, name: str) -> str:
        return f"{self._bridge}-{name}"

    def command_on(self, name: str) -> list[str]:
        """What goes before a command that is to run there; it keeps the process id."""
        return ["ip", "netns", "exec", self._space(name)]

    def pull(self, name: str) -> None:
        _ip(f"link set {self._cable(name)} down")

    def plug(self, name: str) -> None:
        _ip(f"link set {self._cable(name)} up")

    def bytes_to(self, name: str) -> int:
        """That have gone over its cable, to it."""
        return int(Path(f"/sys/class/net/{self._cable(name)}/statistics/tx_bytes").read_text())

    def listen(self, name: str, port: int) -> socket.socket:
        """A socket of this process that listens on that machine."""
        made: list[socket.socket] = []
        self._inside(name, lambda: made.append(socket.create_server((self.address[name], port), backlog=1024)))
        (sock,) = made
        return sock

    def _inside(self, name: str, work: Callable[[], None]) -> None:
        """`work` in a thread that has moved there; a socket stays where it was made."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with open(f"/run/netns/{self._space(name)}") as space:
                    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=f"on {name}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Takes all of it down, cables with their machines; what was never built is no error."""
        for words in (*(f"netns del {self._space(name)}" for name in self.address), f"link del {self._bridge}"):
            with contextlib.suppress(AssertionError):
                _ip(words)


def _free_subnet() -> tuple[int, str]:
    """(a number, the first three parts of its addresses), of which nothing is on this machine."""
    taken = _ip("-4 -o addr")
    for _ in range(TRIES):
        number = random.SystemRandom().randrange(SUBNETS)
        prefix = f"10.{number // 250 + 10}.{number % 250}"
        if f" {prefix}." not in taken:
            return number, prefix
    raise AssertionError("no free subnet for the machines")


def _ip(words: str) -> str:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {words}: {done.stderr.strip()} (needs root, CAP_NET_ADMIN and iproute2)"
    return done.stdout
