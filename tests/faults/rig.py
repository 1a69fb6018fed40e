"""A disaggregated cluster whose parts are started one by one, so that each can die alone and come back at its address.

    bootstrap server (on its own)  <--register-- prefill   router --> prefill, decode
               ^------- look-up link ------- decode --control--> prefill

The look-up link is always ours (clogged, it holds requests in their handshake). With `network_links` all HTTP legs, the
registration and the control plane go over links of ours, too, so that any part can be cut off. What the transfer engine
moves its bytes by (shared memory, CMA, Mooncake's own sockets) goes over no link: see `inject/sitecustomize.py`.
"""

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import psutil

from deploy.launcher.ports import free_ports
from tests.e2e.cluster import READY_S, wait_until
from tests.faults.cells import CHILDREN, Victim
from tests.faults.household import ROOT, Household
from tests.faults.network import Link, Network

WORKERS = ("prefill", "decode")
PARTS = ("bootstrap", *WORKERS, "router")
POOL_TOKENS = 8192
SHIPPED = ("--chunked-prefill-size", "256", "--log-level", "warning", "--max-total-tokens", str(POOL_TOKENS))
DEATH_S = 10.0
LINKS_OF = {
    Victim.PREFILL: ("to-prefill", "registration"),
    Victim.DECODE: ("to-decode", "lookup"),
    Victim.BOOTSTRAP: ("registration", "lookup"),
    Victim.ROUTER: ("to-prefill", "to-decode"),
}


class Rig:
    """`close()` must be called; it returns what was left behind."""

    def __init__(self, backend: str, network_links: bool) -> None:
        self.backend, self.network_links = backend, network_links
        self.household = Household()
        self.parts = self.household.parts
        self._switches = self.household.folder / "s"
        self._switches.mkdir()
        self._network = Network()
        names = (*PARTS, "lookup", "registration", "to-prefill", "to-decode")
        self._port = port = dict(zip(names, free_ports(len(names)), strict=True))
        self.lookup = self._network.link(port=port["lookup"], target=port["bootstrap"])
        self._links: dict[str, Link] = {"lookup": self.lookup}
        if network_links:
            self._links["registration"] = self._network.registrations(
                port=port["registration"], target=port["bootstrap"]
            )
            for name in WORKERS:
                self._links[f"to-{name}"] = self._network.link(port=port[f"to-{name}"], target=port[name])

    # ---- parts

    @property
    def router(self) -> str:
        return f"http://127.0.0.1:{self._port['router']}"

    def start_all(self) -> None:
        """All parts, and wait until the router has found its workers."""
        for name in PARTS[:-1]:
            self.begin(name)
        for name in PARTS[:-1]:
            wait_until(self.parts[name].is_ready, within_s=READY_S, what=f"{name} ready")
        self.begin("router")
        wait_until(self._is_routable, within_s=READY_S, what="the router has found its workers")

    def begin(self, name: str) -> None:
        """Start a part at its address, the one that it always has."""
        switched = {
            "TANDEM_FAULTS_DIR": str(self._switches),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "faults" / "inject"), str(ROOT)]),
        }
        self.household.begin(
            name,
            self._command(name),
            url=f"http://127.0.0.1:{self._port[name]}",
            env=switched if name == "prefill" else None,
            health="/health" if name == "bootstrap" else None,
        )

    def _is_routable(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.router}/readiness").status_code == 200
        return False

    def _command(self, name: str) -> list[str]:
        port, quiet = self._port, ("--log-level", "warning")
        if name == "bootstrap":
            return ["bootstrap", "--port", str(port["bootstrap"]), *quiet]
        if name == "router":
            ends = {w: f"http://127.0.0.1:{port[f'to-{w}' if self.network_links else w]}" for w in WORKERS}
            prefill = ["--prefill", ends["prefill"], str(port["lookup"])]
            return ["router", *prefill, "--decode", ends["decode"], "--port", str(port["router"]), *quiet]
        server = f"127.0.0.1:{port['registration' if self.network_links else 'bootstrap']}"
        own = ["--disaggregation-bootstrap-server", server] if name == "prefill" else []
        common = ["--disaggregation-transfer-backend", self.backend, "--port", str(port[name])]
        return ["serve", "--disaggregation-mode", name, *common, *own, *SHIPPED]

    def close(self) -> list[str]:
        for name in ("hold", "fail"):
            self.switch(name, None)
        left = self.household.close()
        self._network.close()
        return left

    # ---- faults

    def processes(self, victim: Victim) -> list[psutil.Process]:
        """What freezes with `victim`: a worker as a whole, or one child."""
        if victim in CHILDREN:
            part, word = CHILDREN[victim]
            return [self.parts[part].child(word)]
        return self.parts[str(victim)].tree()

    def kill(self, victim: Victim) -> None:
        """SIGKILL to the victim alone; its children notice by themselves. Returns when all of them are gone."""
        dying = self.processes(victim)
        dying[0].kill()
        _, living = psutil.wait_procs(dying, timeout=DEATH_S)
        assert not living, f"outlive the {victim} that was killed: {living}"

    def stop(self, victim: Victim) -> None:
        for process in self.processes(victim):
            process.suspend()

    def resume(self, victim: Victim) -> None:
        for process in self.processes(victim):
            process.resume()

    def cut(self, victim: Victim) -> None:
        self._on_links(victim, Link.cut)
        if victim in (Victim.PREFILL, Victim.DECODE):
            self._network.cut_control()

    def heal(self, victim: Victim) -> None:
        if victim in (Victim.PREFILL, Victim.DECODE):
            self._network.heal_control()
        self._on_links(victim, Link.heal)

    def _on_links(self, victim: Victim, act: Callable[[Link], None]) -> None:
        for name in LINKS_OF[victim]:
            act(self._links[name])

    def switch(self, name: str, text: str | None) -> None:
        """Set a switch of the transfer engine, or take it away (None)."""
        path = self._switches / name
        path.unlink(missing_ok=True) if text is None else path.write_text(text)

    def state(self, worker: str) -> dict[str, Any]:
        """GET /check of a worker, asked directly."""
        answer = httpx.get(f"{self.parts[worker].url}/check", timeout=10.0)
        assert answer.status_code == 200, f"{worker}: {answer.text}"
        return json.loads(answer.text)  # type: ignore[no-any-return]
