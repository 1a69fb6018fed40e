"""Which encoder worker computes the features of an image. Pure.

An image belongs to one worker of the pool (`owner`), in every router and after each restart: its
features are cached there. While that one has clearly more to do than the least loaded, this one takes
it: so an image that all request at once spreads over the pool.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from router.body import TOKENS_PER_IMAGE
from router.choice.policies import load_key, owner
from router.pool.reports import fetches_features, parse_encoder
from router.pool.worker import Pool, Worker
from service.http.image_encoders import ImageEncoder

SLACK_TOKENS = 4 * TOKENS_PER_IMAGE  # by which an image's own worker may be busier than the least loaded


class EncoderChoice(NamedTuple):
    """`is_owner`: the image belongs to `worker`."""

    worker: Worker
    is_owner: bool


class Encoders:
    """The addresses of encoder workers, and the workers that ask them (--feature-fetch), as they report."""

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
        """Return the ids of those that `worker` asks for nothing at present: they were late, or it could not reach them."""
        avoided = () if worker.report is None else worker.report.avoided_encoders
        return {worker_id for worker_id, at in self._at.items() if at.control in avoided} if avoided else set()

    def at(self, worker: Worker) -> ImageEncoder | None:
        """None: it was restarted, and has not been asked since."""
        return self._at.get(worker.worker_id)


def choose_encoders(digests: Iterable[str], pool: Pool) -> dict[str, EncoderChoice]:
    """Choose a worker of `pool` (not empty) for each image of a request, equal ones once. Their load includes those chosen before."""
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
