"""One life of an encoder worker: production role, server of features, scheduler and manager over a tower that is simulated (features.py)."""

import random
from typing import Any

import msgspec

from disagg.metadata import MetadataBuffers
from engine.assembly.core import CoreConfig, MemoryParts, build_core
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.policy import Limits
from tools.simulation.options import EngineBehaviour
from tools.simulation.surroundings import Surroundings
from tools.simulation.workers.computing import Computer
from tools.simulation.workers.executor import SimExecutor
from tools.simulation.workers.features import EncodingModel, feature_args
from tools.simulation.workers.ranks import Whole
from tools.simulation.workers.weights import OTHER, OWN, SimWeights
from tools.simulation.workers.worker import Worker
from tools.simulation.world import Process

OTHER_WEIGHTS_SHARE = 0.25  # of lives that follow another one


class EncoderComputer(Computer):
    """As engine/assembly/encoder.py."""

    def __init__(self, around: Surroundings, process: Process, draw: random.Random, weights: SimWeights) -> None:
        options = around.options
        page_size, num_pages, room = options.feature_page, options.feature_pages[1], options.encode_room
        model = EncodingModel(page_size=page_size, name=process.name, weights_of=weights.number)
        model.image_room = room
        super().__init__(around, process, draw, model, SimExecutor(model))
        self.tower, self.depth = model, options.depth[0]
        limits = Limits(
            page_size=page_size,
            max_running_requests=options.max_running,
            max_queued_requests=options.max_queued,
            chunked_prefill_size=None,
            max_prefill_tokens=2 * room,
        )
        core = CoreConfig(limits=limits, num_pages=num_pages, uniform=draw.random)
        self.scheduler, _ = build_core(core, MemoryParts(images=ImageCache(max_bytes=room, token_bytes=1)))
        self.memory = Whole(
            [process],
            kv_args=feature_args(options, num_pages=num_pages),
            metadata=MetadataBuffers(options.feature_rows, weights=weights.number, checksum=self.checksum()),
            models_of=self.models_of,
            allocators={"kv": self.scheduler.memory.allocator},
        )


class Encoder(Worker):
    computer: EncoderComputer

    def _first_weights(self) -> str:
        """A rollout may bring other weights back, or bring them to others first."""
        again = self.process.life > 1 and self.draw.random() < OTHER_WEIGHTS_SHARE
        self.around.world.seen["encoders with other weights"] += again
        return OTHER if again else OWN

    def _behaviour(self) -> EngineBehaviour:
        return self.around.options.encoder_engine or super()._behaviour()

    def _computer(self) -> EncoderComputer:
        return EncoderComputer(self.around, self.process, self.draw, self.weights)

    def _info(self) -> dict[str, Any]:
        """As disagg/processes/encoder_process.py."""
        sender = self.managers.sender
        named = {"control": sender.control_address, "incarnation": sender.incarnation}
        return {"image_encoder": msgspec.json.encode(named).decode()}
