"""The rig with each worker on a machine of its own (network namespaces): a cut is their cable pulled.

The engines' own data paths are cut as well: between machines there is no shared memory, so both move KV by TCP (NIXL is told
so, as processes in two namespaces of one kernel still look like one host to UCX). Off loopback the cluster has a secret.
"""

import random
import secrets

import httpx2 as httpx

from tests.e2e.workload import recall_body
from tools.faults.cells import Layout, Size, Victim
from tools.faults.machines import Machines
from tools.faults.network import LOOPBACK, Link
from tools.faults.rig import Rig, workers_of

PROMPT_PAIRS = 110
LEAST_TOKEN_BYTES = 500  # the shipped model's KV is twice that, a request's own body a hundredth


class RigOnMachines(Rig):
    layout = Layout.MACHINES
    _env = {"UCX_TLS": "tcp"}

    def __init__(self, backend: str, size: Size = Size.SINGLE) -> None:
        self._machines = Machines(workers_of(size))
        try:
            super().__init__(backend, size)
        except BaseException:
            self._machines.close()
            raise
        self._secret = self.household.folder / "cluster.secret"
        self._secret.write_text(secrets.token_hex(32))
        self._secret.chmod(0o600)

    def start_all(self) -> None:
        super().start_all()
        self._assert_kv_goes_by_cable()

    def _assert_kv_goes_by_cable(self) -> None:
        """Else a pulled cable would cut less than this layout says."""
        body, _ = recall_body(random.Random(1), PROMPT_PAIRS)
        before = self._bytes_to_decode()
        answer = httpx.post(f"{self.router}/generate", json=body, timeout=30.0)
        assert answer.status_code == 200, answer.text
        moved = self._bytes_to_decode() - before
        assert moved > LEAST_TOKEN_BYTES * len(body["input_ids"]), f"only {moved} bytes went to decode's machines"

    def _bytes_to_decode(self) -> int:
        return sum(self._machines.bytes_to(name) for name in self.of_role("decode"))

    def _lookup_links(self) -> list[Link]:
        """At prefill's address, where the router tells decode to ask: as if the bootstrap server were inside prefill."""
        target = (self._machines.host, self._port["bootstrap"])
        socks = [self._machines.listen(name, self._port["lookup"]) for name in self.of_role("prefill")]
        return [self._network.link_from(sock, target=target) for sock in socks]

    def _host(self, name: str) -> str:
        return LOOPBACK if name == "router" else self._machines.address.get(name, self._machines.host)

    def _before(self, name: str) -> list[str]:
        return self._machines.command_on(name) if name in self.workers else []

    def _off_loopback(self, name: str) -> list[str]:
        http = ["--allow-insecure"] if name in self.workers else []
        return ["--cluster-secret-file", str(self._secret), *http]

    def cut(self, victim: Victim) -> None:
        self._machines.pull(str(victim))

    def heal(self, victim: Victim) -> None:
        self._machines.plug(str(victim))

    def close(self) -> list[str]:
        for worker in self.workers:
            self._machines.plug(worker)
        left = super().close()
        self._machines.close()
        return left
