"""A disaggregated cluster whose parts are started one by one, so that each can die alone and come back at its address.

    bootstrap server (on its own)  <--register-- prefill   router --> prefill, decode
               ^------- look-up link ------- decode --control--> prefill

With two workers of each role there are prefill-2 and decode-2 as well, and the victim is the first of its role.

The look-up link is always ours (clogged, it holds requests in their handshake). Where it stands, and what else can be
cut, is the layout's:

    plain       all on loopback
    links       all HTTP legs, the registration and the control plane go over links of ours, too, so that any part can be
                cut off; what the transfer engine moves its bytes by (shared memory, CMA, Mooncake's sockets) goes over none
    machines    prefill and decode in network namespaces; all that leaves them goes over a cable, KV by TCP too
                (`rig_on_machines.py`)
"""

from collections.abc import Mapping

import httpx2 as httpx
import psutil

from deploy.launcher.probe import free_ports
from tests.e2e.cluster import READY_S, wait_until
from tools.faults.cells import CHILDREN, Layout, Size, Victim
from tools.faults.household import Household, State
from tools.faults.network import LOOPBACK, Link, Network
from tools.faults.switches import switched

WORKERS = ("prefill", "decode")
POOL_TOKENS = 8192
SHIPPED = ("--chunked-prefill-size", "256", "--log-level", "warning", "--max-total-tokens", str(POOL_TOKENS))
DEATH_S = 60.0


def workers_of(size: Size) -> tuple[str, ...]:
    """Their names: those of the first of each role are the roles'."""
    more = range(2, size.workers + 1)
    return (*WORKERS, *(f"{role}-{number}" for number in more for role in WORKERS))


def role_of(worker: str) -> str:
    return worker.partition("-")[0]


class Rig:
    """`close()` must be called; it returns what was left behind."""

    layout = Layout.PLAIN
    switched: tuple[str, ...] = ("prefill",)  # roles of workers that `switch` reaches
    beside: tuple[str, ...] = ()  # workers of other roles

    def __init__(self, backend: str, size: Size = Size.SINGLE) -> None:
        self.backend, self.workers = backend, (*workers_of(size), *self.beside)
        self.household = Household()
        self.parts = self.household.parts
        self._switches = self.household.folder / "s"
        self._switches.mkdir()
        self._network = Network()
        self._begun_first = ("bootstrap", *self.workers)
        names = (*self._begun_first, "router", "lookup", "registration", *(f"to-{name}" for name in self.workers))
        self._port = dict(zip(names, free_ports(len(names)), strict=True))
        self._lookups = self._lookup_links()

    def _lookup_links(self) -> list[Link]:
        """The ways on which decode workers ask for prefill workers."""
        return [self._network.link(port=self._port["lookup"], target=self._port["bootstrap"])]

    def of_role(self, role: str) -> list[str]:
        return [name for name in self.workers if role_of(name) == role]

    # ---- parts

    @property
    def router(self) -> str:
        return f"http://127.0.0.1:{self._port['router']}"

    def start_all(self) -> None:
        """All parts, and wait until the router has found its workers."""
        for name in self._begun_first:
            self.begin(name)
        for name in self._begun_first:
            wait_until(self.parts[name].is_ready, within_s=READY_S, what=f"{name} ready")
        self.begin("router")
        wait_until(self.parts["router"].is_routable, within_s=READY_S, what="the router has found its workers")

    def begin(self, name: str) -> None:
        """Start a part at its address, the one that it always has."""
        self.household.begin(
            name,
            self._command(name),
            url=f"http://{self._host(name)}:{self._port[name]}",
            env={**(switched(self._switches) if role_of(name) in self.switched else {}), **self._env},
            health="/health" if name == "bootstrap" else None,
            before=self._before(name),
        )

    def is_balanced(self) -> bool:
        """Whether the router gives each worker its share: none is silent, and no circuit is open."""
        known = httpx.get(f"{self.router}/workers", timeout=10.0).json()["workers"]
        return all(one["is_healthy"] and one["circuit"] == "closed" for one in known)

    _env: Mapping[str, str] = {}

    def _host(self, name: str) -> str:
        """The address a part listens on."""
        return LOOPBACK

    def _before(self, name: str) -> list[str]:
        """What goes before its command."""
        return []

    def _url_for_router(self, worker: str) -> str:
        return f"http://{self._host(worker)}:{self._port[worker]}"

    def _registration(self) -> str:
        """Where prefill registers."""
        return f"{self._host('bootstrap')}:{self._port['bootstrap']}"

    def _off_loopback(self, name: str) -> list[str]:
        return []

    def _command(self, name: str) -> list[str]:
        port = self._port
        common = ["--host", self._host(name), "--port", str(port[name]), *self._off_loopback(name)]
        if name == "bootstrap":
            return ["bootstrap", *common, "--log-level", "warning"]
        if name == "router":
            prefill = [("--prefill", self._url_for_router(one), str(port["lookup"])) for one in self.of_role("prefill")]
            decode = [("--decode", self._url_for_router(one)) for one in self.of_role("decode")]
            ends = [word for words in (*prefill, *decode) for word in words]
            return ["router", *ends, *common, "--route", "pair", "--log-level", "warning"]
        role = role_of(name)
        own = ["--disaggregation-bootstrap-server", self._registration()] if role == "prefill" else []
        mode = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", self.backend]
        return ["serve", *mode, *common, *own, *SHIPPED]

    def close(self) -> list[str]:
        for name in ("hold", "fail"):
            self.switch(name, None)
        left = self.household.close()
        self._network.close()
        return left

    # ---- faults

    def processes(self, victim: str) -> list[psutil.Process]:
        """What freezes with `victim`: a part as a whole, or one child of a worker."""
        if victim in CHILDREN:
            part, word = CHILDREN[Victim(victim)]
            return [self.parts[part].child(word)]
        return self.parts[str(victim)].tree()

    def kill(self, victim: str) -> None:
        """SIGKILL to the victim alone (stopped or not); its children notice by themselves. Returns when all of them are gone."""
        dying = self.processes(victim)
        dying[0].kill()
        _, living = psutil.wait_procs(dying, timeout=DEATH_S)
        assert not living, f"outlive the {victim} that was killed: {living}"

    def stop(self, victim: str) -> None:
        for process in self.processes(victim):
            process.suspend()

    def resume(self, victim: str) -> None:
        for process in self.processes(victim):
            process.resume()

    def drain(self, victim: str) -> None:
        """SIGTERM."""
        self.parts[str(victim)].process.terminate()

    def cut(self, victim: Victim) -> None:
        raise AssertionError(f"nothing of this layout can be cut: {self.layout}")

    def heal(self, victim: Victim) -> None:
        raise AssertionError(f"nothing of this layout can be cut: {self.layout}")

    def clog_lookups(self) -> None:
        """No handshake can end until they are loosened; nothing of it is lost."""
        for link in self._lookups:
            link.clog()

    def loosen_lookups(self) -> None:
        for link in self._lookups:
            link.loosen()

    @property
    def num_looked_up(self) -> int:
        return sum(link.num_answered for link in self._lookups)

    def switch(self, name: str, text: str | None) -> None:
        """Set a switch of the transfer engine, or take it away (None)."""
        path = self._switches / name
        path.unlink(missing_ok=True) if text is None else path.write_text(text)

    def state(self, worker: str) -> State:
        return self.parts[worker].check()
