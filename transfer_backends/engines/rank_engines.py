"""Engine over all ranks of a worker; an operation ends with its last pair."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from transfer_backends.contract import Caps, EngineError, OpState, Pieces, Region
from transfer_backends.ports import Engine
from transfer_backends.shards import Pair, unpack_descriptors


@dataclass(eq=False)
class RankPeer:
    of_pairs: dict[Pair, Any]


@dataclass(eq=False)
class RankOp:
    """`parts`: not known to be final; `failed`: of a part."""

    parts: list[tuple[Engine, Any]]
    failed: bool = False


NARROWEST = (
    *("max_inflight", "max_inflight_bytes", "max_post_pieces", "max_post_bytes", "max_piece_bytes"),
    *("full_window_s", "longest_nap_s"),
)
WIDEST = ("target_must_poll", "settle_s", "resend_s")


class RankEngines:
    """`ports.Engine` over ranks; `engines[0]` is this process's."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self.caps = combine([engine.caps for engine in engines])

    def register(self, regions: Sequence[Region]) -> None:
        self._engines[0].register(regions)

    def descriptor(self) -> bytes:
        """The other ranks' come with `RankMemory`."""
        return self._engines[0].descriptor()

    def connect(self, incarnation: str, descriptor: bytes) -> RankPeer:
        try:
            wanted = unpack_descriptors(descriptor)
        except msgspec.MsgspecError as error:
            raise EngineError(f"not a list of descriptors: {error}") from None
        peer = RankPeer({})
        try:
            for one in wanted:
                handle = self._engines[one.src_rank].connect(incarnation, one.descriptor)
                peer.of_pairs[one.src_rank, one.dst_rank] = handle
        except Exception:
            self.disconnect(peer)
            raise
        return peer

    def disconnect(self, peer: RankPeer) -> None:
        for (src_rank, _), handle in peer.of_pairs.items():
            self._engines[src_rank].disconnect(handle)

    def post(self, peer: RankPeer, pieces: Pieces) -> RankOp:
        engine = self._engines[pieces.src_rank]
        return RankOp([(engine, engine.post(peer.of_pairs[pieces.src_rank, pieces.dst_rank], pieces))])

    def probe(self, peer: RankPeer) -> RankOp:
        return self._over_all(peer, lambda engine, handle: engine.probe(handle))

    def trial(self, peer: RankPeer) -> tuple[RankOp, int] | None:
        """Write only from this process: concurrent writes would blur the measurement."""
        op, size_bytes, engine = RankOp([]), 0, self._engines[0]
        for (src_rank, _), handle in peer.of_pairs.items():
            if src_rank == 0 and (started := engine.trial(handle)) is not None:
                op.parts.append((engine, started[0]))
                size_bytes += started[1]
        return (op, size_bytes) if op.parts else None

    def fence(self, peer: RankPeer) -> RankOp:
        return self._over_all(peer, lambda engine, handle: engine.fence(handle))

    def poll(self, op: RankOp) -> OpState:
        """DONE when all parts are; FAILED once all are final."""
        pending = []
        for engine, part in op.parts:
            state = engine.poll(part)
            if state is OpState.PENDING:
                pending.append((engine, part))
            op.failed |= state is OpState.FAILED
        op.parts = pending
        if pending:
            return OpState.PENDING
        return OpState.FAILED if op.failed else OpState.DONE

    def progress(self, *, eager: bool = False) -> None:
        for engine in self._engines:
            engine.progress(eager=eager)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _over_all(self, peer: RankPeer, start: Callable[[Engine, Any], Any]) -> RankOp:
        """Start it on each pair; a refusal fails the operation at its end."""
        op = RankOp([])
        for (src_rank, _), handle in peer.of_pairs.items():
            engine = self._engines[src_rank]
            try:
                op.parts.append((engine, start(engine, handle)))
            except EngineError:
                if not op.parts:
                    raise
                op.failed = True
                break
        return op


def combine(caps: Sequence[Caps]) -> Caps:
    """The narrowest window and the longest waits of all."""
    if len({one.name for one in caps}) > 1:
        raise EngineError(f"ranks of one worker have different transfer engines: {[one.name for one in caps]}")
    least = {name: min(getattr(one, name) for one in caps) for name in NARROWEST}
    return replace(caps[0], **least, **{name: max(getattr(one, name) for one in caps) for name in WIDEST})
