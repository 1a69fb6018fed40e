"""Choice of an image's encoder worker. Pure.

The image's owner by rendezvous hashing, which caches its features, takes it, unless it is clearly
busier than the least loaded worker.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from router.body import TOKENS_PER_IMAGE
from router.choice.policies import load_key, owner
from router.pool.reports import fetches_features, parse_encoder
from router.pool.worker import Pool, Worker
from service.http.image_encoders import ImageEncoder

SLACK_TOKENS = 4 * TOKENS_PER_IMAGE  # by which an image's owner may be busier than the least loaded


class EncoderChoice(NamedTuple):
    worker: Worker
    is_owner: bool


class Encoders:
    """Addresses of encoder workers, and workers that fetch features."""

    def __init__(self) -> None:
        self._at: dict[int, ImageEncoder] = {}
        self._asking: set[int] = set()

    def on_info(self, worker: Worker, info: object) -> None:
        self.on_gone(worker)
        if (at := parse_encoder(info)) is not None:
            self._at[worker.worker_id] = at
        if fetches_features(info):
            self._asking.add(worker.worker_id)

    def on_gone(self, worker: Worker) -> None:
        self._at.pop(worker.worker_id, None)
        self._asking.discard(worker.worker_id)

    def asks(self, worker: Worker) -> bool:
        return worker.worker_id in self._asking

    def avoided_by(self, worker: Worker) -> set[int]:
        avoided = () if worker.report is None else worker.report.avoided_encoders
        return {worker_id for worker_id, at in self._at.items() if at.control in avoided} if avoided else set()

    def at(self, worker: Worker) -> ImageEncoder | None:
        return self._at.get(worker.worker_id)


def choose_encoders(digests: Iterable[str], pool: Pool) -> dict[str, EncoderChoice]:
    """Choose a worker per distinct image, counting those just assigned."""
    planned: Counter[int] = Counter()  # tokens, by id of the worker
    found: dict[str, EncoderChoice] = {}
    for digest in dict.fromkeys(digests):
        choice = found[digest] = _choose(digest, pool, planned)
        planned[choice.worker.worker_id] += TOKENS_PER_IMAGE
    return found


def _choose(digest: str, pool: Pool, planned: Counter[int]) -> EncoderChoice:
    own = owner(pool, digest)
    least = min(pool, key=lambda worker: (_load(worker, planned), load_key(worker)))
    is_busy = _load(own, planned) > _load(least, planned) + SLACK_TOKENS
    return EncoderChoice(least, is_owner=False) if is_busy else EncoderChoice(own, is_owner=True)


def _load(worker: Worker, planned: Counter[int]) -> int:
    return worker.load_tokens + planned[worker.worker_id]
