"""Headers that name the encoder workers of a prompt's images."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import CounterMetricFamily, Metric

from router.attempts.request import CallPart, PromptCall
from router.body import TOKENS_PER_IMAGE
from router.encoders.choice import EncoderChoice, Encoders, choose_encoders
from router.pool.worker import Pool, Role, Worker
from router.pool.workers import WorkerTable
from service.http.image_encoders import ENCODERS_HEADER, write_header


@dataclass(eq=False, kw_only=True)
class EncoderHeaders:
    """Names encoder workers, if there is a `secret` to sign. `num_images` counts images by
    choice.
    """

    table: WorkerTable
    secret: bytes | None
    encoders: Encoders = field(default_factory=Encoders)
    num_images: Counter[str] = field(default_factory=Counter)

    def part_of(self, images: Sequence[str]) -> CallPart:
        return partial(self.name, images=images)

    def name(self, call: PromptCall, *, images: Sequence[str]) -> None:
        """Name an encoder worker per image, none if all are down or the worker fetches no features.

        Leases charge the encoders until the prompt is computed.
        """
        compute = call.placement.worker
        secret, pool = self.secret, self._pool(compute, call.now_s)
        if secret is None or not pool or pool[0].silent or not self.encoders.asks(compute):  # silent: then all are
            self.num_images["none"] += len(images)
            return
        chosen = choose_encoders(images, pool)
        self._count(images, chosen)
        tokens = Counter({choice.worker: 0 for choice in chosen.values()})
        for choice in chosen.values():
            tokens[choice.worker] += TOKENS_PER_IMAGE
        charge = self.table.loads.charge
        call.leases += [charge(worker, count, now_s=call.now_s) for worker, count in tokens.items()]
        value = write_header([self.encoders.at(chosen[image].worker) for image in images], secret)
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
        several = self.table.models.several and compute.models
        pool = self.table.ready(Role.ENCODE, compute.models[0] if several else "", now_s=now_s)
        avoided = self.encoders.avoided_by(compute)
        return [w for w in pool if w.worker_id not in avoided] if avoided else pool

    def _count(self, images: Sequence[str], chosen: Mapping[str, EncoderChoice]) -> None:
        for image in images:
            self.num_images["owner" if chosen[image].is_owner else "least_loaded"] += 1
