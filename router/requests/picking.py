"""Picks the workers of an attempt: who is alive, serves the model, has not failed the request, and would be in time.

Sends nothing and charges nobody. Which of several good ones it is, the policies say (router/choice).
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from router.admission.admission import Admission
from router.choice.chooser import Chooser
from router.choice.policies import Choice
from router.pool.workers import Role, Worker, WorkerTable, missing_roles
from router.requests.exchange import Exchange
from router.requests.hedging import other_pools
from router.requests.rewrite import ParsedBody, named_model

WAIT_POLL_S = 0.02

Chosen = tuple[Choice, ...]


class Picker:
    """`wait_s`: as --retry-wait-s."""

    def __init__(
        self,
        *,
        table: WorkerTable,
        chooser: Chooser,
        admission: Admission,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._chooser = chooser
        self._admission = admission
        self._wait_s = wait_s
        self._clock = clock

    def model_of(self, parsed: ParsedBody, roles: Sequence[Role]) -> str:
        """Which name its workers must serve; "": any will do. `UnknownModel`."""
        catalogue = self._table.models
        if not catalogue.names:
            return ""
        ready: Iterable[str] = ()
        if catalogue.several:
            ready = (base for base in catalogue.bases if not missing_roles(self._table, roles, base))
        return catalogue.meant(named_model(parsed), ready)

    async def pick_soon(self, exchange: Exchange) -> Chosen | None:
        """As `pick`; a request that has failed already waits a little for workers of which none is alive.

        What broke its connections may have made their health checks fail as well, and be over.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (self._wait_s if exchange.attempts.last else 0.0)
        while True:
            chosen = self.pick(exchange)
            if chosen is not None or not self.missing(exchange) or loop.time() >= deadline_s:
                return chosen
            await asyncio.sleep(WAIT_POLL_S)

    def pick(self, exchange: Exchange) -> Chosen | None:
        """One worker of each role as its policy says, among those best tried next; None when a role has none. `Refused`."""
        pools = self._pools(exchange)
        if not all(pools):
            return None  # before a policy remembers what then is sent to nobody
        if exchange.attempts.last is None and exchange.slo.is_set:  # who was let in is not turned away later
            now_s = self._clock()
            pools = [self._admission.in_time(p, exchange.ask, exchange.slo, now_s=now_s) for p in pools]
        return self.choose(exchange, pools)

    def other_pools(self, exchange: Exchange, taken: Sequence[Worker]) -> list[Sequence[Worker]] | None:
        """Where a hedge may go while the attempt at the workers `taken` goes on; None: nobody is free."""
        return other_pools(self._pools(exchange), taken)

    def choose(self, exchange: Exchange, pools: Iterable[Sequence[Worker]]) -> Chosen:
        """One of each, as the policies say; they will remember that the request goes there."""
        return tuple([self._chooser.choose(workers, exchange.ask) for workers in pools])

    def missing(self, exchange: Exchange) -> list[Role]:
        return missing_roles(self._table, exchange.roles, exchange.model)

    def _pools(self, exchange: Exchange) -> list[Sequence[Worker]]:
        """Of each role, who may be sent to."""
        table, model, now_s = self._table, exchange.model, self._clock()
        return [exchange.attempts.candidates(table.ready(role, model, now_s=now_s)) for role in exchange.roles]
