"""Assembly of a worker's role over senders, receivers and managers, which may be virtual."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from disagg.decode_role import PREALLOC_TIMEOUT_S, DecodeRole
from disagg.features.feature_fetching import FeatureFetches
from disagg.features.feature_serving import EncodeRole, FeatureServer
from disagg.features.moving import Moves
from disagg.features.prefix_fetching import FetchPolicy, PrefixFetches
from disagg.features.prefix_serving import PrefixRequests, PrefixServer
from disagg.features.recompute import Bounds, Recomputes
from disagg.features.resumption import Resumption
from disagg.incoming import Receivers, rooms_of
from disagg.metadata import MetadataBuffers
from disagg.outgoing import PageSender, PromptHandovers, Senders
from disagg.prefill_role import Directory, PrefillRole
from disagg.role import ManagerOfParts, PeerPart
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.scheduler import Scheduler
from engine.messages import KVSource
from transfer_backends.contract import (
    Clock,
    KVArgs,
    LayerGroup,
    LookupFailed,
    PeerWork,
    Route,
    TransferConfig,
)
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.environment import THIS_MACHINE, Environment
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Engine, LayerClock, Lookup
from transfer_backends.prefill.manager import PrefillManager

Manager = PrefillManager | DecodeManager
SENDS, RECEIVES = "sends", "receives"
MOVE_TIMEOUT_S = 30.0  # for another decode worker to give pages: the request holds memory here, its client waits
NO_PROMPTS = Bounds(vocab_size=0, context_length=0)  # of decode workers to compute again


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAssembly:
    """Bookkeeping, metadata rows and sizes that the parts of a role share.

    `page_bytes`: of all ranks. `moves_bytes`: False for a fake transfer. `layout`: for routers.
    """

    scheduler: Scheduler
    metadata: MetadataBuffers
    page_size: int
    page_bytes: int
    moves_bytes: bool = True
    layout: str = ""

    def prefill(
        self,
        sends: Senders,
        directory: Directory,
        parts: Sequence[PeerPart] = (),
        *,
        bounds: Bounds = NO_PROMPTS,
        layerwise: bool = False,
        min_bytes: int = 0,
    ) -> PrefillRole:
        """A role with `parts`, and the recomputation of prompts for decode workers."""
        prompts = PromptHandovers(self.scheduler, self._pages(layerwise=layerwise, min_bytes=min_bytes))
        recomputes = Recomputes(scheduler=self.scheduler, manager=sends, prompts=prompts, bounds=bounds)
        return PrefillRole(
            scheduler=self.scheduler,
            manager=sends,
            prompts=prompts,
            directory=directory,
            parts=(*parts, recomputes),
            layout=self.layout,
        )

    def prefixes(
        self, sends: Senders, receives: Receivers, source: KVSource, *, token_bytes: int
    ) -> tuple[PrefixFetches, PrefixServer]:
        """`source`: this worker's address."""
        scheduler, policy = self.scheduler, FetchPolicy(token_bytes=self.page_bytes / self.page_size)
        rooms = rooms_of(source.incarnation)
        return (
            PrefixFetches(scheduler=scheduler, manager=receives, metadata=self.metadata, policy=policy, rooms=rooms),
            PrefixServer(
                scheduler=scheduler, manager=sends, pages=self._pages(), source=source, token_bytes=token_bytes
            ),
        )

    def decode(
        self,
        receives: Receivers,
        parts: Sequence[PeerPart] = (),
        *,
        prealloc_timeout_s: float = PREALLOC_TIMEOUT_S,
    ) -> DecodeRole:
        """A role with `parts`, and retracted requests that prefill computes again."""
        resumption = Resumption(
            scheduler=self.scheduler, manager=receives, metadata=self.metadata, moves_bytes=self.moves_bytes
        )
        return DecodeRole(
            scheduler=self.scheduler,
            manager=receives,
            metadata=self.metadata,
            moves_bytes=self.moves_bytes,
            prealloc_timeout_s=prealloc_timeout_s,
            parts=(resumption, *parts),
            layout=self.layout,
        )

    def moves(self, sends: Senders, source: KVSource) -> tuple[ManagerOfParts, Moves]:
        moves = Moves(
            scheduler=self.scheduler,
            manager=sends,
            pages=self._pages(),
            source=source,
            moves_bytes=self.moves_bytes,
        )
        return ManagerOfParts(sends), moves

    def encode(self, sends: Senders, source: KVSource, bounds: Bounds) -> EncodeRole:
        server = FeatureServer(
            scheduler=self.scheduler, manager=sends, pages=self._pages(), bounds=bounds, source=source
        )
        return EncodeRole(self.scheduler, sends, server)

    def _pages(self, *, layerwise: bool = False, min_bytes: int = 0) -> PageSender:
        return PageSender(
            self.metadata,
            page_size=self.page_size,
            page_bytes=self.page_bytes,
            layerwise=layerwise,
            min_bytes=min_bytes,
        )


def source_of(manager: PrefillManager) -> KVSource:
    """Its address for peers."""
    return KVSource(manager.control_address, manager.incarnation)


def no_lookup(bootstrap: str, room: int, any_but: Sequence[str] | None) -> Route:
    raise LookupFailed("the request names the worker", permanent=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWire:
    """Time, machine and threads of managers. `wakeup`: called when a queue may move.

    `environment`, `start`: of the manager with the name SENDS or RECEIVES. `watched`: a receiver as
    roles get it.
    """

    wakeup: Callable[[], None]
    clock: Clock = time.monotonic
    environment: Callable[[str], Environment] = lambda name: THIS_MACHINE
    start: Callable[[str, Manager], None] = lambda name, manager: manager.start()
    watched: Callable[[DecodeManager], Receivers] = lambda manager: manager


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Managers of a role, of one engine and memory. `is_apart`: ranks on several machines."""

    role: RoleAssembly
    engine: Engine
    args: KVArgs
    config: TransferConfig
    wire: TransferWire
    followers: Sequence[ProcessMark] = ()
    is_apart: bool = False

    def sends(
        self,
        groups: Sequence[LayerGroup] = (),
        *,
        layers: LayerClock | None = None,
        takes: PeerWork = PeerWork.ANY,
    ) -> PrefillManager:
        """A started manager; without `groups` pages leave whole."""
        manager = PrefillManager(
            replace(self.args, groups=tuple(groups)),
            self.engine,
            self.config,
            self.wire.clock,
            environment=self.wire.environment(SENDS),
            layers=layers,
            followers=self.followers,
            takes=takes,
        )
        self._start(SENDS, manager)
        return manager

    def prefixes(self, sends: PrefillManager, *, token_bytes: int) -> Sequence[PeerPart]:
        receives = self.wire.watched(self._receives(no_lookup))
        prefixes = self.role.prefixes(sends, receives, source_of(sends), token_bytes=token_bytes)
        return ManagerOfParts(receives), *prefixes

    def features(self, allocator: PageAllocator, *, timeout_s: float) -> FeatureFetches:
        manager = self._receives(no_lookup)
        return FeatureFetches(
            memory=self.role.scheduler.memory,
            manager=self.wire.watched(manager),
            metadata=self.role.metadata,
            allocator=allocator,
            rooms=rooms_of(manager.incarnation),
            timeout_s=timeout_s,
        )

    def encode(self, bounds: Bounds) -> EncodeRole:
        sends = self.sends()
        return self.role.encode(sends, source_of(sends), bounds)

    def decode(
        self,
        lookup: Lookup,
        *,
        move_timeout_s: float = MOVE_TIMEOUT_S,
        prealloc_timeout_s: float = PREALLOC_TIMEOUT_S,
        token_bytes: int | None = None,
    ) -> DecodeRole:
        """The sender of moved requests has a control plane of its own.

        `token_bytes`: of KV, for a worker that exchanges prefixes.
        """
        receives = self.wire.watched(self._receives(lookup))
        timeout_s = min(self.config.bootstrap_timeout_s, move_timeout_s)
        sending = replace(self, config=replace(self.config, bootstrap_timeout_s=timeout_s))
        sends = sending.sends(takes=PeerWork.NONE if token_bytes is None else PeerWork.PREFIXES)
        source = source_of(sends)
        parts: Sequence[PeerPart] = self.role.moves(sends, source)
        if token_bytes is not None:
            fetches, server = self.role.prefixes(sends, receives, source, token_bytes=token_bytes)
            parts = *parts, fetches, server, PrefixRequests(sends, server)
        return self.role.decode(receives, parts, prealloc_timeout_s=prealloc_timeout_s)

    def _receives(self, lookup: Lookup) -> DecodeManager:
        manager = DecodeManager(
            self.args,
            self.engine,
            self.config,
            lookup=lookup,
            clock=self.wire.clock,
            environment=self.wire.environment(RECEIVES),
            is_apart=self.is_apart,
        )
        self._start(RECEIVES, manager)
        return manager

    def _start(self, name: str, manager: Manager) -> None:
        manager.set_wakeup(self.wire.wakeup)
        self.wire.start(name, manager)
