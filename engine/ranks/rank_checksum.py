"""Checksum of one rank's part of transferred KV: pages and `Memory.tail`."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import torch

from engine.kernels.checksum import checksum_kernel
from engine.kv.cache_spec import CopiesDiffer, KVShard, total
from engine.kv.kv_pool import KVPool
from engine.kv.page_checksum import (
    WINDOWS,
    Concurrent,
    Later,
    PageChecksum,
    StateChecksum,
    WordSums,
    at_once,
    word_sums,
)
from engine.ranks.followers import OnAllRanks
from engine.ranks.rank_parts import RankPools

Tail = Sequence[Sequence[int]]
Parts = Callable[[], Mapping[str, int] | None]  # by part of the model's memory; None: not computed yet, poll again
OwnChecksum = Callable[
    [Sequence[int], Tail, int | None], Parts
]  # (pages, extra state, tokens up to the end of the last page)
Value = Callable[[], int | None]


class RankChecksum:
    def __init__(self, pools: RankPools, *, wakeup: Callable[[], None] = lambda: None) -> None:
        held, apart = pools.held, pools.windows is not None
        sums, later = _sums_of(pools.kv.device, wakeup)

        def of_pages(pool: KVPool | None, *, begin: int = 0) -> PageChecksum | None:
            if pool is None or not pool.specs:  # all layers have windows
                return None
            own = KVShard(held.units, held.num_units, range(pool.num_parts), pool.num_parts) if apart else held
            return PageChecksum(pool, held=own, sums=sums, begin=begin, later=later)

        self._pages, self._windows = of_pages(pools.kv), of_pages(pools.windows, begin=WINDOWS)
        self._states = None
        if pools.states is not None:
            self._states = StateChecksum(pools.states, layers=held.state_layers, sums=sums, later=later)
        self._name = held.name

    def __call__(self, pages: Sequence[int], tail: Tail = (), num_tokens: int | None = None) -> Parts:
        beside = iter(tail)
        of_state = None if self._states is None else self._states(next(beside)[0])
        sums = [] if self._pages is None else [("pages", self._pages(pages, num_tokens))]
        if self._windows is not None:
            sums.append(("windows", self._windows(next(beside), num_tokens)))

        def found() -> Mapping[str, int] | None:
            parts = {} if of_state is None else of_state()
            values = {f"{kind} of {self._name}": value() for kind, value in sums}
            there = {name: value for name, value in values.items() if value is not None}
            return None if parts is None or len(there) < len(values) else {**parts, **there}

        return found


def alone(own: OwnChecksum) -> Callable[[Sequence[int], Tail, int | None], Value]:

    def of(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Value:
        parts = own(pages, tail, num_tokens)

        def value() -> int | None:
            found = parts()
            return None if found is None else total([found])

        return value

    return of


# ---- Checksum of transferred KV over all ranks of a group.

log = logging.getLogger(__name__)


class GroupChecksum(OnAllRanks[OwnChecksum]):
    """Checksum over all ranks' parts, the leader's by `own`.

    Peers write every copy of a part, so each is checked; different copies give a random value.
    """

    def __call__(self, pages: Sequence[int], tail: Tail = (), num_tokens: int | None = None) -> Value:
        beside = [list(items) for items in tail]
        theirs = self._followers.apply("checksum", pages=list(pages), tail=beside, num_tokens=num_tokens)
        own, found = self._own(pages, tail, num_tokens), list[int]()  # once available; answers are gone then

        def value() -> int | None:
            mine = own()
            if mine is None or not (found or theirs.there()):
                return None
            if not found:
                try:
                    found.append(total([mine, *theirs.wait().values()]))
                except CopiesDiffer as error:
                    log.error("ranks hold the same %s, and their bytes differ", error)
                    found.append(secrets.randbits(63))
            return found[0]

        return value


def _sums_of(device: torch.device, wakeup: Callable[[], None]) -> tuple[WordSums, Later]:
    """The device's kernel, by default torch's operators, and where sums are computed."""
    if device.type == "cpu":
        kernel = checksum_kernel()
        return (word_sums, at_once) if kernel is None else (kernel, Concurrent(wakeup))
    if find_spec("triton") is None:
        return word_sums, Concurrent(wakeup).on_gpu
    from engine.kernels.triton.checksum import triton_sums

    return triton_sums, Concurrent(wakeup).on_gpu
