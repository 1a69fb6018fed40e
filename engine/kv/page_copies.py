"""The copies of pages that a plan asks for, in stream order."""

from engine.core.plan import Plan
from engine.kv.host_pool import HostPool
from engine.kv.page_backup import PageBackup


class PageCopies:
    """`host_pool`: the host tier; None: no plan may copy to it."""

    def __init__(self, *, backup: PageBackup, host_pool: HostPool | None) -> None:
        self._backup = backup
        self._host_pool = host_pool

    def run(self, plan: Plan) -> None:
        if plan.to_host or plan.from_host:
            assert self._host_pool is not None, "a plan copies to a host tier, and there is none"
            self._host_pool.run(plan)
        self._backup.run(plan)
