"""Copies of a step's KV pages between device and host, in `Plan` order."""

from engine.core.plan import Plan
from engine.kv.arrival import Arrival
from engine.kv.host_pool import HostPool
from engine.kv.page_backup import PageBackup


class Copies:
    """Copies for retracted requests (`backup`), and for the host tier."""

    def __init__(self, *, backup: PageBackup | None, host_pool: HostPool | None) -> None:
        self._backup = backup
        self._host_pool = host_pool

    def begin(self, plan: Plan) -> Arrival:
        """Return loads that the forward awaits by layer."""
        if self._host_pool is None:
            assert not plan.to_host and not plan.from_host, "a plan copies to a host tier, and there is none"
            arrival = Arrival()
        else:
            arrival = self._host_pool.begin(plan)
        if self._backup is None:
            assert not plan.saves, "a plan keeps copies of pages, and there is no room for them"
        else:
            self._backup.run(plan)
        return arrival

    def wait(self, seq: int) -> None:
        """Block until host pages of steps up to `seq` are complete."""
        for pool in self._host_pools():
            pool.wait(seq)

    def close(self) -> None:
        for pool in self._host_pools():
            pool.close()

    def _host_pools(self) -> list[HostPool]:
        tier = [] if self._host_pool is None else [self._host_pool]
        return tier + ([] if self._backup is None else self._backup.hosts)
