"""Headers that name the encoder workers of a prompt's images."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.body import TOKENS_PER_IMAGE
from router.choice.encoders import EncoderChoice, Encoders, choose_encoders
from router.pool.worker import Lease, Pool, Role, Worker
from router.pool.workers import WorkerTable
from service.http.image_encoders import ENCODERS_HEADER, write_header


class Encoding(NamedTuple):
    """Headers for the worker that computes the prompt; `leases` charge the encoders until then."""

    headers: Mapping[str, str]
    leases: Sequence[Lease] = ()


@dataclass(eq=False, kw_only=True)
class EncoderHeaders:
    """Names encoder workers, if there is a `secret` to sign. `num_images` counts images by
    choice.
    """

    encoders: Encoders
    table: WorkerTable
    secret: bytes | None
    num_images: Counter[str] = field(default_factory=Counter)

    def named_in(self, headers: Mapping[str, str], images: Sequence[str], compute: Worker, *, now_s: float) -> Encoding:
        """Name an encoder worker per image (digests), none if all are down or `compute` fetches no
        features.
        """
        secret, pool = self.secret, self._pool(compute, now_s)
        if secret is None or not pool or pool[0].silent or not self.encoders.asks(compute):  # silent: then all are
            self.num_images["none"] += len(images)
            return Encoding(headers)
        chosen = choose_encoders(images, pool)
        self._count(images, chosen)
        tokens = Counter({choice.worker: 0 for choice in chosen.values()})
        for choice in chosen.values():
            tokens[choice.worker] += TOKENS_PER_IMAGE
        leases = [self.table.loads.charge(worker, count, now_s=now_s) for worker, count in tokens.items()]
        value = write_header([self.encoders.at(chosen[image].worker) for image in images], secret)
        return Encoding({**headers, ENCODERS_HEADER: value}, leases)

    def _pool(self, compute: Worker, now_s: float) -> Pool:
        several = self.table.models.several and compute.models
        pool = self.table.ready(Role.ENCODE, compute.models[0] if several else "", now_s=now_s)
        avoided = self.encoders.avoided_by(compute)
        return [w for w in pool if w.worker_id not in avoided] if avoided else pool

    def _count(self, images: Sequence[str], chosen: Mapping[str, EncoderChoice]) -> None:
        for image in images:
            self.num_images["owner" if chosen[image].is_owner else "least_loaded"] += 1
