"""An encoder worker without HTTP: production engine, role and transfer engine, in a test's own process."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from disagg.config import DisaggConfig, SchedulerSpec
from disagg.feature_transfers import encode_role
from engine.assembly.encoder import build_encoder
from engine.config import EngineConfig
from engine.core.mem_cache.image_cache import ImageCache
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.messages import FeatureSource, TokenOutput
from engine.model_files.model_config import load_model_config
from tests.e2e.two_engines import HOST
from tests.engine.engine_in_process import PartsInProcess


class EncoderInProcess(PartsInProcess):
    """`disagg`: its other flags of disaggregation."""

    def __init__(self, model_path: str, *, disagg: Mapping[str, Any] = MappingProxyType({}), **flags: Any) -> None:
        config = EngineConfig(model_path=model_path, **flags)
        self.parts = build_encoder(config, load_model_config(model_path))
        own = DisaggConfig(disaggregation_mode="encode", **disagg)
        spec = SchedulerSpec(engine=self.parts.config, disagg=own, ipc_dir="", control_host=HOST, bootstrap=None)
        pipeline = Pipeline(
            self.collect,
            strategy=StepStrategy(self.parts.scheduler),
            executor=self.parts.executor,
            depth=self.parts.depth,
        )
        self.begin(encode_role(spec, self.parts, wakeup=lambda: None), pipeline)

    def hear(self, outputs: Sequence[TokenOutput]) -> None:
        """Peers hear of what it encodes."""

    @property
    def source(self) -> FeatureSource:
        """As a router names it."""
        return FeatureSource(**json.loads(self.role.info()["image_encoder"]))

    @property
    def counters(self) -> dict[str, float]:
        images = self.parts.scheduler.memory.part(ImageCache)
        assert images is not None
        return {**images.counters(), **self.role.counters()}
