"""Tells the prefill worker of an attempt which other one has more of the prompt's prefix (--prefix-fetch)."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.choice.policies import Placement, RoutingHints
from router.choice.prefix_sources import Holder, PrefixSources
from router.choice.replication import Replication
from service.http.prefix_source import PREFIX_HEADER, write_header


@dataclass(eq=False, kw_only=True)
class PrefixHeaders:
    """`secret`: by which workers know their router. `replication`: of hot prefixes; None: nothing is copied ahead.

    `num_named`: attempts whose prefill worker gets the address of another one.
    """

    sources: PrefixSources
    secret: bytes
    replication: Replication | None = None
    num_named: int = 0

    def added_to(self, headers: Mapping[str, str], chosen: Placement, hints: RoutingHints) -> Mapping[str, str]:
        """Return the headers for the chosen prefill worker."""
        holder = self.sources.better(chosen, hints)
        if holder is None:
            return headers
        self.num_named += 1
        return self.naming(holder, headers)

    def naming(self, holder: Holder, headers: Mapping[str, str], *, copy: bool = False) -> Mapping[str, str]:
        return {**headers, PREFIX_HEADER: write_header(holder.header(copy=copy), self.secret)}
