"""What is known of one worker: identity, health, reports, and the work it holds. Data; only the table changes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from router.pool.breaker import Circuit
from router.pool.peer_load import PeerLoad
from router.pool.states import Check, Health

if TYPE_CHECKING:
    from router.pool.active_calls import ActiveCall

# Through which a request goes, in this order; "retracted" lost its memory and waits for more.
STAGES = ("bootstrap", "waiting", "inflight", "prealloc", "transfer", "running", "retracted")


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a worker says of itself, in requests and tokens, summed over its ranks. `*_total`: since it began.

    `stages`: requests by where they stand (`STAGES`), as far as it reports. `transfer_*`: of the last KV transfers it sent.
    `pending_tokens`: KV that requests in decode's prealloc queue want. `busy_ms_total`: with something to compute.
    """

    running_reqs: int = 0
    waiting_reqs: int = 0
    used_tokens: int = 0
    waiting_tokens: int = 0
    capacity_tokens: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    kv_bytes_total: int = 0
    transfer_gb_s: float = 0.0
    transfer_ms: float = 0.0
    max_running_reqs: int = 0
    pending_tokens: int = 0
    busy_ms_total: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """One worker. Only `WorkerTable` changes it; `bootstrap_*` is what decode needs to find a prefill worker."""

    worker_id: int
    url: str
    role: Role
    given_bootstrap_port: int | None
    bootstrap_host: str
    bootstrap_port: int | None
    changed_s: float
    health: Health = Health.STARTING
    streak: int = 0  # equal check results in a row
    last_check: Check | None = None
    last_error: str = "not checked yet"
    good_s: float = 0.0  # when it was last checked and well
    incarnation: str = ""  # of the process that answers; "": it does not say
    incarnation_s: float = 0.0  # when that one was last seen
    former_life_s: float = -math.inf  # when the one before was last seen: a call that waits since before waits in vain
    former_lives: tuple[str, ...] = ()
    inflight_requests: int = 0
    inflight_tokens: int = 0
    assigned_total: int = 0
    report: LoadReport | None = None
    foreign_tokens: int = 0
    peers: PeerLoad | None = None  # the router's other processes; None: there are none
    slot: int = 0  # its place there
    leaving: bool = False  # it gets nothing new, whatever its health
    last_resort: bool = False  # it does, while no other worker of its role is up
    silent: bool = False  # it answers no probe: it gets requests only where all others are silent, too
    busy_s: float | None = None  # it is in a step that has taken so long, by its last check; that is no illness
    switching_to: Role | None = None  # this router has asked it to change; it gets nothing new until it has
    discovered: bool = False  # each process of this router finds it by itself
    models: tuple[str, ...] = ()  # names that it serves, its own first; none: it does not say
    circuit: Circuit = field(default_factory=Circuit)
    calls: dict["ActiveCall", None] = field(default_factory=dict)  # that run there, in the order they began

    @property
    def url_host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def answers(self) -> bool:
        """All is well with it, as far as its checks say."""
        return self.health is Health.UP and not self.silent

    def takes(self, now_s: float) -> bool:
        """Whether no circuit keeps requests from it: not its own, and none of this router's other processes."""
        return self.circuit.takes(now_s) and (self.peers is None or self.slot not in self.peers.others_open(now_s))

    @property
    def load_tokens(self) -> int:
        """Tokens this router has in flight there, plus those the worker reports that came from elsewhere."""
        tokens = self.inflight_tokens + self.foreign_tokens
        return tokens if self.peers is None else tokens + self.peers.others_tokens(self.slot)

    @property
    def requests_everywhere(self) -> int:
        """Requests this router has there, over all its processes."""
        return self.inflight_requests + (0 if self.peers is None else self.peers.others_requests(self.slot))

    @property
    def tokens_everywhere(self) -> int:
        """Tokens this router has there, over all its processes."""
        return self.inflight_tokens + (0 if self.peers is None else self.peers.others_tokens(self.slot))

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV that fit there; 0: it does not say."""
        return self.report.capacity_tokens if self.report is not None else 0


class Lease(msgspec.Struct, frozen=True, eq=False):
    """`tokens` of work charged to `worker` until released. `trial`: it tries a worker whose circuit is half open."""

    worker: Worker
    tokens: int
    trial: bool = False
