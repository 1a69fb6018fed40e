"""Encoder workers: the choice of one for each image, and headers that name them.

The image's owner by rendezvous hashing, which caches its features, takes it, unless it is clearly
busier than the least loaded worker.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from router.attempts.request import CallPart, PromptCall
from router.body import TOKENS_PER_IMAGE
from router.choice.policies import load_key, owner
from router.pool.reports import Info, parse_encoder
from router.pool.worker import Pool, Role, Worker
from router.pool.workers import WorkerTable
from service.http.image_encoders import ENCODERS_HEADER, ImageEncoder, write_header

SLACK_TOKENS = 4 * TOKENS_PER_IMAGE  # by which an image's owner may be busier than the least loaded


class EncoderChoice(NamedTuple):
    worker: Worker
    is_owner: bool


def choose_encoders(digests: Iterable[str], pool: Pool) -> dict[str, EncoderChoice]:
    """Loads count those just assigned."""
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


@dataclass(eq=False, kw_only=True)
class Encoders:
    """Names encoder workers, if there is a `secret` to sign."""

    table: WorkerTable
    secret: bytes | None
    num_images: Counter[str] = field(default_factory=Counter)
    _at: dict[int, ImageEncoder] = field(default_factory=dict)  # addresses of encoder workers
    _asking: set[int] = field(default_factory=set)  # workers that fetch features

    def on_info(self, worker: Worker, info: Info) -> None:
        self.on_gone(worker)
        if (at := parse_encoder(info)) is not None:
            self._at[worker.worker_id] = at
        if info.get("feature_fetch") is True:
            self._asking.add(worker.worker_id)

    def on_gone(self, worker: Worker) -> None:
        self._at.pop(worker.worker_id, None)
        self._asking.discard(worker.worker_id)

    def part_of(self, images: Sequence[str]) -> CallPart:
        return partial(self.name, images=images)

    def name(self, call: PromptCall, *, images: Sequence[str]) -> None:
        """Name a worker per image, none if all are down or the worker fetches no features.

        Leases charge the encoders until the prompt is computed.
        """
        compute = call.placement.worker
        secret, pool = self.secret, self._pool(compute, call.now_s)
        asks = compute.worker_id in self._asking
        if secret is None or not pool or pool[0].silent or not asks:  # silent: then all are
            self.num_images["none"] += len(images)
            return
        chosen = choose_encoders(images, pool)
        self.num_images.update("owner" if chosen[image].is_owner else "least_loaded" for image in images)
        for worker, count in Counter(choice.worker for choice in chosen.values()).items():
            call.leases.append(self.table.loads.charge(worker, count * TOKENS_PER_IMAGE, now_s=call.now_s))
        value = write_header([self._at.get(chosen[image].worker.worker_id) for image in images], secret)
        call.headers = {**call.headers, ENCODERS_HEADER: value}

    def metrics(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        text = (
            "Images of requests, by the encoder worker that was named for them: their owner, the least loaded, or none"
        )
        images = CounterMetricFamily("tandem_router_images", text, labels=["encoder"])
        for which in ("least_loaded", "none", "owner"):
            images.add_metric([which], self.num_images[which])
        yield images

    def _pool(self, compute: Worker, now_s: float) -> Pool:
        pool = self.table.pool(Role.ENCODE, compute.model if self.table.models.several else "")
        pool = self.table.ready(pool, now_s=now_s)
        avoided = () if compute.report is None else compute.report.avoided_encoders
        if not avoided:
            return pool
        return [w for w in pool if (at := self._at.get(w.worker_id)) is None or at.control not in avoided]
