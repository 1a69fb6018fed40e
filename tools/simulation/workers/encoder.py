"""One life of an encoder worker: production role, server of features, scheduler and manager over a tower that is simulated (features.py)."""

from typing import Any

import msgspec

from disagg.assembly import source_of
from disagg.features.feature_serving import EncodeRole
from disagg.features.recompute import Bounds
from disagg.metadata import MetadataBuffers
from engine.assembly.core import CoreConfig, MemoryParts, build_core
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.radix_cache import TRUNK
from engine.core.policy import Limits
from engine.core.scheduler import Scheduler
from tests.core.hash_model import VOCAB
from tests.core.mem_cache.images import SEES
from tools.simulation.workers.executor import SimExecutor
from tools.simulation.workers.features import ALONE, EncodingModel, feature_args, feature_checksum
from tools.simulation.workers.images import contents_by_keys
from tools.simulation.workers.ranks import RankView
from tools.simulation.workers.transfer_engine import EngineBehaviour
from tools.simulation.workers.weights import OTHER, OWN
from tools.simulation.workers.worker import CONTROL, Worker
from transfer_backends.prefill.manager import PrefillManager

OTHER_WEIGHTS_SHARE = 0.25  # of lives that follow another one


class Encoder(Worker):
    def _first_weights(self) -> str:
        """A rollout may bring other weights back, or bring them to others first."""
        again = self.process.life > 1 and self.draw.random() < OTHER_WEIGHTS_SHARE
        self.around.world.seen["encoders with other weights"] += again
        return OTHER if again else OWN

    def _behaviour(self) -> EngineBehaviour:
        return self.around.options.encoder_engine or super()._behaviour()

    def _build(self) -> None:
        options, process = self.around.options, self.process
        page_size, num_pages = options.feature_page, options.feature_pages[1]
        self.model: EncodingModel = EncodingModel(
            page_size=page_size, name=process.name, weights_of=self.weights.number
        )
        self.model.image_room = options.encode_room
        if options.step_fail_rate:
            self.model.fails = self._step_fails
            self._failed_seq = -1
        checksum = feature_checksum(self.model, options)
        self.metadata = MetadataBuffers(options.feature_rows, weights=self.weights.number, checksum=checksum)
        self.executor = SimExecutor(self.model)
        self.shape, self.followers, self.group = ALONE, [], None
        self.kv_args = feature_args(options, num_pages=num_pages)
        self.views = [RankView(self, 0, process, layers=1)]
        self.exposed = {}
        self.depth, self.watched = options.depth[0], False
        self.scheduler = self._scheduler(num_pages)
        self._start_engine(1)
        self.manager = self.sender = self._sends()
        self.managers = {CONTROL: self.manager}
        self.features = None
        self.role = self._role(self.sender)

    def _scheduler(self, num_pages: int) -> Scheduler:
        """As engine/assembly/encoder.py."""
        options = self.around.options
        core = CoreConfig(
            limits=Limits(
                page_size=options.feature_page,
                max_running_requests=options.max_running,
                max_queued_requests=options.max_queued,
                chunked_prefill_size=None,
                max_prefill_tokens=2 * options.encode_room,
            ),
            num_pages=num_pages,
            uniform=self.draw.random,
        )
        scheduler, _ = build_core(core, MemoryParts(images=ImageCache(max_bytes=options.encode_room, token_bytes=1)))
        return scheduler

    def _role(self, manager: PrefillManager) -> EncodeRole:
        bounds = Bounds(VOCAB, context_length=10_000, vision=SEES)
        return self._assembly.encode(manager, source_of(manager), bounds)

    def _info(self) -> dict[str, Any]:
        """As disagg/processes/encoder_process.py."""
        named = {"control": self.sender.control_address, "incarnation": self.sender.incarnation}
        return {"image_encoder": msgspec.json.encode(named).decode()}

    def check_cached(self) -> None:
        """Every page that a later image may find holds what the present weights make of it."""
        cache = self.scheduler.memory.cache
        assert not cache._tops, f"images have no namespace but {TRUNK}"
        stack = [(node, list(node.key), list(node.pages)) for node in cache.root.children.values()]
        while stack:
            node, keys, pages = stack.pop()
            self.model.verify_features(pages, contents_by_keys(keys))
            stack += [(child, [*keys, *child.key], [*pages, *child.pages]) for child in node.children.values()]
