"""The machine of incoming transfers, with a peer and a target that do whatever a seed draws."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from disagg.incoming import Incoming, IncomingTransfer, TransferFailure, TransferStage
from disagg.metadata import FirstToken, MetadataBuffers
from engine.core.memory import Detached
from engine.core.plan import ItemResult
from tests.core.hash_model import HashModel
from tests.disagg.wire_in_a_test import Receiver, Room, Side, Wire
from transfer_backends.sides import FINAL, KVPoll

PAGES = 3
ROWS = MetadataBuffers(1)
WIRE = Wire(prefill=HashModel(page_size=1), decode=HashModel(page_size=1), rows=(ROWS, ROWS))


class Peer(Receiver):
    """A receiver whose state the test sets. `writes`: its peer has the pages, and may write them."""

    def __init__(self) -> None:
        super().__init__(WIRE, Room(decode=Side()), (7, 0))

    @property
    def state(self) -> KVPoll:
        return self._side.state

    @state.setter
    def state(self, state: KVPoll) -> None:
        self._side.state = state

    @property
    def writes(self) -> bool:
        return not self._side.settled

    @writes.setter
    def writes(self, writes: bool) -> None:
        self._side.settled = not writes

    @property
    def closed(self) -> bool:
        return self._side.closed


class Owner:
    """A target with `PAGES` pages. `fits`: whether what lands is of use."""

    def __init__(self, *, num_rows: int = 4) -> None:
        self.free = PAGES
        self.quarantined = 0
        self.num_landed = 0
        self.failures: list[TransferFailure] = []
        self.reasons: list[str] = []
        self.why_unfit = ""
        self.rows = MetadataBuffers(num_rows)
        self.incoming = Incoming[IncomingTransfer](self.rows, self, late="it is late")

    def begin(self, key: str, *, room: int = 7, deadline_s: float = 10.0) -> tuple[IncomingTransfer, Peer]:
        peer = Peer()
        transfer = IncomingTransfer(key=key, room=room, receiver=peer, deadline_s=deadline_s)
        self.incoming.begin(transfer)
        return transfer, peer

    def reserve(self, ready: Sequence[IncomingTransfer]) -> None:
        for transfer in ready:
            if transfer.stage is TransferStage.RESERVED or self.incoming.reserve(transfer, self._take):
                self.incoming.provide(transfer, [1])

    def _take(self) -> bool:
        if not self.free:
            return False
        self.free -= 1
        return True

    def landed(self, transfer: IncomingTransfer, first: FirstToken) -> str:
        self.num_landed += not self.why_unfit
        self.free += not self.why_unfit
        return self.why_unfit

    def detach(self, transfer: IncomingTransfer) -> Detached:
        pages, transfer.pages = list(transfer.pages), ()
        self.quarantined += len(pages)
        return Detached(pages)

    def free_detached(self, detached: Detached) -> None:
        self.quarantined -= len(detached.pages)
        self.free += len(detached.pages)

    def failed(self, transfer: IncomingTransfer, failure: TransferFailure, reason: str) -> None:
        self.failures.append(failure)
        self.reasons.append(reason)
        self.free += len(transfer.pages)

    def write_row(self, peer: Peer, *, room: int = 7) -> None:
        (row,) = [t.metadata_row for t in self.incoming.transfers.values() if t.receiver is peer]
        assert row is not None
        self.rows.write(row, room=room, first=FirstToken(ItemResult(token=3), 0))
        peer.state, peer.writes = KVPoll.Success, False


def receiving() -> tuple[Owner, IncomingTransfer, Peer]:
    owner = Owner()
    transfer, peer = owner.begin("a")
    peer.state = KVPoll.WaitingForInput
    owner.incoming.poll(1.0)
    assert transfer.stage is TransferStage.RECEIVING and owner.free == PAGES - 1
    return owner, transfer, peer


def assert_all_back(owner: Owner) -> None:
    assert (owner.free, owner.quarantined, owner.rows.num_used) == (PAGES, 0, 0)
    assert not owner.incoming.transfers and not owner.incoming.quarantined


def test_each_stage_leads_to_the_end_and_no_further() -> None:
    reach = {stage: {other for other in TransferStage if stage.may_become(other)} for stage in TransferStage}
    assert not reach[TransferStage.DONE]
    for stage in set(TransferStage) - {TransferStage.DONE}:
        assert any(TransferStage.DONE in reach[after] | {after} for after in reach[stage])
    owner, transfer, _ = receiving()
    with pytest.raises(AssertionError, match="cannot go from"):
        owner.incoming.provide(transfer, [2])


def test_what_has_landed_is_the_targets_and_its_room_is_closed() -> None:
    owner, transfer, peer = receiving()
    owner.write_row(peer)
    owner.incoming.poll(20.0)  # behind its deadline, but it is here
    assert owner.num_landed == 1 and not owner.failures and transfer.stage is TransferStage.DONE and peer.closed
    assert_all_back(owner)


@pytest.mark.parametrize("how", ["a row of another room", "of no use", "the peer", "late", "aborted"])
def test_memory_that_the_peer_may_write_waits_until_it_cannot(how: str) -> None:
    owner, transfer, peer = receiving()
    now_s, expected = 2.0, TransferFailure.REFUSED
    if how == "a row of another room":
        owner.write_row(peer, room=8)
        peer.writes, expected = True, TransferFailure.CORRUPT
    elif how == "of no use":
        owner.write_row(peer)
        peer.writes, owner.why_unfit = True, "it is of no use"
    elif how == "the peer":
        peer.state = KVPoll.Failed
    elif how == "late":
        now_s, expected = 10.0, TransferFailure.LATE
    else:
        owner.incoming.end_all("the worker drains")
        expected = TransferFailure.ABORTED
    owner.incoming.poll(now_s)
    assert owner.failures == [expected] and (owner.quarantined, owner.rows.num_used) == (1, 1)
    assert owner.incoming.counters["metadata_corrupt"] == (expected is TransferFailure.CORRUPT)
    owner.incoming.check()
    owner.incoming.poll(now_s)
    assert transfer.stage is TransferStage.QUARANTINED and not peer.closed
    peer.writes = False
    owner.incoming.poll(now_s)
    assert transfer.stage is TransferStage.DONE and peer.closed
    assert_all_back(owner)


def test_what_waits_is_late_at_its_deadline_unless_there_is_memory() -> None:
    owner = Owner(num_rows=1)
    (_, first), (_, second), (_, unreached) = (owner.begin(key) for key in "abc")
    first.state = second.state = KVPoll.WaitingForInput
    owner.incoming.poll(10.0)
    assert [*owner.incoming.transfers] == ["a"] and owner.failures == 2 * [TransferFailure.LATE]
    assert second.failure() == unreached.failure() == "it is late" and owner.free == PAGES - 1


def test_whatever_happens_rows_and_pages_return() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200):
        _play(random.Random(seed), seen)
    ends = {failure.value for failure in TransferFailure} | {"landed", "quarantined"}
    assert ends <= set(seen) and min(seen[end] for end in ends) >= 20, seen


def _play(rng: random.Random, seen: Counter[str]) -> None:
    owner, peers = Owner(num_rows=rng.choice((1, 4))), list[Peer]()
    incoming, now_s = owner.incoming, 0.0
    for turn in range(40):
        now_s += rng.random()
        owner.why_unfit = rng.choice(("", "", "of no use"))
        if rng.random() < 0.5:
            peers.append(owner.begin(f"r{turn}", deadline_s=now_s + rng.choice((1.0, 30.0)))[1])
        if incoming.transfers and rng.random() < 0.1:
            incoming.cancel(rng.choice([*incoming.transfers.values()]), "the client has gone")
        for peer in peers:
            _advance(rng, owner, peer)
        incoming.poll(now_s)
        incoming.check()
        exposed = [peer for peer in peers if peer.writes]
        held = sum(t.stage is TransferStage.RECEIVING for t in incoming.transfers.values())
        assert owner.free + owner.quarantined + held == PAGES
        assert not any(peer.closed for peer in exposed) and owner.rows.num_used == incoming.num_rows >= len(exposed)
        seen["quarantined"] += len(incoming.quarantined)
    incoming.end_all("the end")
    for peer in peers:
        peer.writes = False
    incoming.poll(now_s)
    assert_all_back(owner)
    seen.update(failure.value for failure in owner.failures)
    seen["landed"] += owner.num_landed


def _advance(rng: random.Random, owner: Owner, peer: Peer) -> None:
    if rng.random() < 0.5:
        return
    if peer.state is KVPoll.Bootstrapping:
        peer.state = rng.choice((KVPoll.WaitingForInput, KVPoll.Failed))
    elif peer.state is KVPoll.Transferring and rng.random() < 0.2:
        peer.state = KVPoll.Failed
    elif peer.state is KVPoll.Transferring:
        owner.write_row(peer, room=rng.choice((7, 7, 8)))
    else:
        peer.writes = peer.writes and peer.state not in FINAL
