"""Small operations leave together, and after one that is refused none of its try."""

from typing import Any

from tests.transfer.cores import SRC, JoinedCores
from tests.transfer.rig import succeed, until
from transfer_backends.contract import EngineError, Pieces, SourcePages
from transfer_backends.engines.registry import FakeEngine
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Status


class Posting(FakeEngine):
    """Counts posts, and refuses the next `refusals`."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.num_calls = 0
        self.refusals = refusals

    def post(self, peer: Any, pieces: Pieces) -> Any:
        self.num_calls += 1
        if self.refusals:
            self.refusals -= 1
            raise EngineError("refused")
        return super().post(peer, pieces)


def test_the_row_leaves_with_the_last_pages_and_decode_hears_of_both_at_once() -> None:
    """At time 5: no progress was reported before, and that alone is no reason to report it."""
    pair = JoinedCores(sends=False)
    pair.send(SRC, row=1, now_s=5.0)
    posts = pair.core.outbox.next_posts(5.0)
    assert len(posts) == 3 and [post.kv_bytes == 0 for post in posts] == [False, False, True]
    for post in posts:
        pair.core.completions.on_op_final(post, ok=True, error="", now_s=5.0)
    (said,) = [message for _, message in pair.core.effects.queue]
    assert isinstance(said, Status) and said.state == KVPoll.Success


def test_after_a_refusal_nothing_more_of_its_try_is_posted(pairs: Any) -> None:
    pair = pairs(Posting(1))
    sender, receiver = pair.meet(7)
    sender.send(SourcePages([4, 5, 6], metadata_row=0))
    until(lambda: receiver.poll() is KVPoll.Success)
    assert pair.engine.num_calls == 1 + 2 and receiver.retries() == 1
    succeed(sender, receiver)
