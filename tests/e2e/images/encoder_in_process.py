"""An encoder worker without HTTP: production engine, role and transfer engine, in a test's own process."""

import json
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType
from typing import Any

from disagg.config import DisaggConfig, SchedulerSpec
from disagg.feature_transfers import encode_role
from engine.assembly.encoder import build_encoder
from engine.config import EngineConfig
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.outputs import StepEffects
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.messages import FeatureSource, FinishReason, TokenOutput
from engine.model_files.model_config import load_model_config
from tests.e2e.two_engines import HOST


class EncoderInProcess:
    """`disagg`: its other flags of disaggregation."""

    def __init__(self, model_path: str, *, disagg: Mapping[str, Any] = MappingProxyType({}), **flags: Any) -> None:
        config = EngineConfig(model_path=model_path, **flags)
        self.parts = build_encoder(config, load_model_config(model_path))
        own = DisaggConfig(disaggregation_mode="encode", **disagg)
        spec = SchedulerSpec(engine=self.parts.config, disagg=own, ipc_dir="", control_host=HOST, bootstrap=None)
        self.role = encode_role(spec, self.parts, wakeup=lambda: None)
        self.pipeline = Pipeline(
            self._collect,
            strategy=StepStrategy(self.parts.scheduler),
            executor=self.parts.executor,
            depth=self.parts.depth,
        )

    @property
    def source(self) -> FeatureSource:
        """As a router names it."""
        return FeatureSource(**json.loads(self.role.info()["image_encoder"]))

    @property
    def counters(self) -> dict[str, float]:
        images = self.parts.scheduler.memory.part(ImageCache)
        assert images is not None
        return {**images.counters(), **self.role.counters()}

    def turn(self) -> bool:
        self.role.poll(monotonic())
        plan = self.parts.scheduler.schedule(monotonic())
        worked = plan is not None or self.pipeline.num_launched > 0
        self.pipeline.advance(plan)
        return worked

    def _collect(self, effects: StepEffects) -> list[TokenOutput]:
        now_s = monotonic()
        self.role.on_step(effects, now_s)
        outputs = effects.outputs
        reason = FinishReason(kind="abort", message=effects.failure, status=503)
        return outputs + [output for rid in effects.lost for output in self.role.abort(rid, now_s, reason)]

    @property
    def at_rest(self) -> bool:
        return not self.pipeline.num_launched and self.parts.scheduler.idle and not self.role.waits_for_outside()

    def check(self) -> None:
        self.parts.scheduler.check()
        self.role.check()
        counts = self.parts.scheduler.memory.allocator.counts()
        assert counts["held"] == counts["quarantined"] == 0

    def close(self) -> None:
        self.role.close()
        self.parts.executor.close()
