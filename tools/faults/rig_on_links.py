"""The rig whose TCP connections all go over links of ours: any part can be cut off from the others."""

from collections.abc import Callable

from tools.faults.cells import MOVERS, Layout, Size, Victim
from tools.faults.network import LOOPBACK, Link
from tools.faults.rig import Rig

LINKS_OF = {
    Victim.PREFILL: ("to-prefill", "registration"),
    Victim.DECODE: ("to-decode", "lookup"),
    Victim.BOOTSTRAP: ("registration", "lookup"),
    Victim.ROUTER: ("to-prefill", "to-decode"),
}


class RigOnLinks(Rig):
    layout = Layout.LINKS

    def __init__(self, backend: str, size: Size = Size.SINGLE) -> None:
        super().__init__(backend, size)
        port, (lookup,) = self._port, self._lookups
        self._links: dict[str, Link] = {"lookup": lookup}
        self._links["registration"] = self._network.registrations(port=port["registration"], target=port["bootstrap"])
        for name in self.workers:
            self._links[f"to-{name}"] = self._network.link(port=port[f"to-{name}"], target=port[name])

    def _url_for_router(self, worker: str) -> str:
        return f"http://{LOOPBACK}:{self._port[f'to-{worker}']}"

    def _registration(self) -> str:
        return f"{LOOPBACK}:{self._port['registration']}"

    def cut(self, victim: Victim) -> None:
        self._on_links(victim, Link.cut)
        if victim in MOVERS:
            self._network.cut_control()

    def heal(self, victim: Victim) -> None:
        if victim in MOVERS:
            self._network.heal_control()
        self._on_links(victim, Link.heal)

    def _on_links(self, victim: Victim, act: Callable[[Link], None]) -> None:
        for name in LINKS_OF[victim]:
            act(self._links[name])
