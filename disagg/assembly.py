"""Assembly of a worker's role over senders and receivers, each of which may be virtual."""

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.decode_role import PREALLOC_TIMEOUT_S, DecodeRole
from disagg.features.feature_serving import EncodeRole, FeatureServer
from disagg.features.moving import Moves
from disagg.features.prefix_fetching import FetchPolicy, PrefixFetches
from disagg.features.prefix_serving import PrefixServer
from disagg.features.recompute import Bounds, Recomputes
from disagg.features.resumption import Resumption
from disagg.incoming import Receivers
from disagg.metadata import MetadataBuffers
from disagg.outgoing import PageSender, PromptHandovers, Senders
from disagg.prefill_role import Directory, PrefillRole
from disagg.role import PeerPart
from engine.core.scheduler import Scheduler
from engine.messages import KVSource
from transfer_backends.prefill.manager import PrefillManager

NO_PROMPTS = Bounds(vocab_size=0, context_length=0)  # of decode workers to compute again


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAssembly:
    """Bookkeeping, metadata rows and sizes that the parts of a role share.

    `page_bytes`: of all ranks. `moves_bytes`: False for a fake transfer.
    """

    scheduler: Scheduler
    metadata: MetadataBuffers
    page_size: int
    page_bytes: int
    moves_bytes: bool = True

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
        """Return a role with `parts`, and the recomputation of prompts for decode workers."""
        prompts = PromptHandovers(self.scheduler, self._pages(layerwise=layerwise, min_bytes=min_bytes))
        recomputes = Recomputes(scheduler=self.scheduler, manager=sends, prompts=prompts, bounds=bounds)
        return PrefillRole(
            scheduler=self.scheduler,
            manager=sends,
            prompts=prompts,
            directory=directory,
            parts=(*parts, recomputes),
        )

    def prefixes(
        self, sends: Senders, receives: Receivers, source: KVSource, *, token_bytes: int
    ) -> tuple[PrefixFetches, PrefixServer]:
        """Return the parts for prefixes of other workers, which know this one as `source`."""
        scheduler, policy = self.scheduler, FetchPolicy(token_bytes=self.page_bytes / self.page_size)
        return (
            PrefixFetches(scheduler=scheduler, manager=receives, metadata=self.metadata, policy=policy),
            PrefixServer(
                scheduler=scheduler, manager=sends, pages=self._pages(), source=source, token_bytes=token_bytes
            ),
        )

    def decode(
        self, receives: Receivers, parts: Sequence[PeerPart] = (), *, prealloc_timeout_s: float = PREALLOC_TIMEOUT_S
    ) -> DecodeRole:
        """Return a role with `parts`, and retracted requests that prefill computes again."""
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
        )

    def moves(self, sends: Senders, source: KVSource) -> Moves:
        """Return the moves of running requests to workers that know this one as `source`."""
        return Moves(
            scheduler=self.scheduler,
            manager=sends,
            pages=self._pages(),
            source=source,
            moves_bytes=self.moves_bytes,
        )

    def encode(self, sends: Senders, source: KVSource, bounds: Bounds) -> EncodeRole:
        """Return the role of an encoder worker, which peers know as `source`."""
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
    """Return the address of `manager` for peers."""
    return KVSource(manager.control_address, manager.incarnation)
