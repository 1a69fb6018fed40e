"""Picks the workers of an attempt: who is alive, serves the model, has not failed the request, and would be in time.

Holds a request for which nobody is there to be picked, where that may soon be otherwise. Sends nothing and charges nobody.
Which of several good workers it is, the policies say (router/choice).
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence

from router.admission.admission import Admission
from router.body import ParsedBody, named_model
from router.choice.chooser import Chooser
from router.choice.policies import Choice
from router.pool.silence import ROUNDING_S
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, missing_roles, silent_roles
from router.requests.deadline import time_given
from router.requests.exchange import Exchange
from router.requests.hedging import other_pools

Chosen = tuple[Choice, ...]


class Picker:
    """`wait_s`: as --retry-wait. `silence_s`: as --dead-worker-timeout. It hears of each change of the table."""

    def __init__(
        self,
        *,
        table: WorkerTable,
        chooser: Chooser,
        admission: Admission,
        wait_s: float,
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._chooser = chooser
        self._admission = admission
        self._wait_s = wait_s
        self._silence_s = silence_s or math.inf
        self._clock = clock
        self._held: list[asyncio.Future[None]] = []
        table.on_change = self._on_change

    def model_of(self, parsed: ParsedBody, roles: Sequence[Role]) -> str:
        """Which name its workers must serve; "": any will do. `UnknownModel`."""
        catalogue = self._table.models
        if not catalogue.names:
            return ""
        ready: Iterable[str] = ()
        if catalogue.several:
            ready = (base for base in catalogue.bases if not missing_roles(self._table, roles, base))
        return catalogue.meant(named_model(parsed), ready)

    async def pick_later(self, exchange: Exchange) -> Chosen | None:
        """As `pick`, which has just found nobody; the request waits while that may soon be otherwise:

        - all workers that it could go to are silent. Either they pause, or they are dead, and that is known in seconds: sent to a
          dead one, it would hang there for much longer. Up to `silence_s`, and no longer than its client.
        - none is alive, and it has failed already. What broke its connections may have made their health checks fail as well,
          and be over. Up to `wait_s`.
        """
        began_s = _now_s()
        while (left_s := self._patience_s(exchange) - (_now_s() - began_s)) > ROUNDING_S:
            await self._change(left_s)
            chosen = self.pick(exchange)
            if chosen is not None:
                return chosen
        return None

    def pick(self, exchange: Exchange) -> Chosen | None:
        """One worker of each role as its policy says, among those best tried next; None when a role has none. `Refused`."""
        pools = self._pools(exchange)
        for pool in pools:
            if not pool or pool[0].silent:  # where one is, all are: others would have been preferred
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
        """Roles of which nobody is alive, or, where all have somebody, those of which all are silent."""
        table, roles, model = self._table, exchange.roles, exchange.model
        return missing_roles(table, roles, model) or silent_roles(table, roles, model)

    # ---- inside

    def _patience_s(self, exchange: Exchange) -> float:
        """How long the request may wait in all, as things are now."""
        table, roles, model = self._table, exchange.roles, exchange.model
        if missing_roles(table, roles, model):
            return self._wait_s if exchange.attempts.last is not None else 0.0
        if silent_roles(table, roles, model) and all(self._pools(exchange)):
            return min(self._silence_s, time_given(exchange.call.headers))
        return 0.0

    async def _change(self, within_s: float) -> None:
        """Until the table changes, or so long."""
        bell = asyncio.get_running_loop().create_future()
        self._held.append(bell)
        try:
            async with asyncio.timeout(within_s if within_s < math.inf else None):
                await bell
        except TimeoutError:
            return
        finally:
            self._held.remove(bell)

    def _on_change(self) -> None:
        for bell in self._held:
            if not bell.done():
                bell.set_result(None)

    def _pools(self, exchange: Exchange) -> list[Sequence[Worker]]:
        """Of each role, who may be sent to."""
        table, model, now_s = self._table, exchange.model, self._clock()
        return [exchange.attempts.candidates(table.ready(role, model, now_s=now_s)) for role in exchange.roles]


def _now_s() -> float:
    """The event loop's time."""
    return asyncio.get_running_loop().time()
