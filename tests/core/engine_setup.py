"""What an engine in a test is made of: sizes, memory, drafts and limits, with the hash model."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from engine.assembly.core import CoreConfig, MemoryParts, build_core
from engine.core.decode_planning import DecodePlanner
from engine.core.estimates import RatioRule, StepBudget
from engine.core.mem_cache.backups import CopySize
from engine.core.mem_cache.cache_events import PrefixEvents
from engine.core.mem_cache.host_cache import HostCache
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.policy import TAIL_SHARE, Limits
from engine.core.scheduler import Scheduler
from tests.core.guesses import strategy
from tests.core.hash_model import HashModel, LanesModel


def window_pages(
    limits: Limits, num_pages: int, window: int, *, more: int, steps: int, rows: int
) -> WindowPages | None:
    """A pool in which any request fits alone, and `more` pages."""
    if not window:
        return None
    size, chunk = limits.page_size, limits.chunked_prefill_size
    step_tokens = None if chunk is None else chunk + chunk // TAIL_SHARE
    least = -(-(window - 1 + max(steps, rows)) // size) + 2 + -(-(step_tokens or 0) * steps // size)
    return WindowPages(
        num_pages=num_pages if chunk is None else min(num_pages, least + more),
        page_size=size,
        window=window,
        steps=steps,
        step_tokens=step_tokens,
        rows=rows,
    )


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What an engine in a test is made of. `drafts`: as in tests/core/guesses.py.

    `shadows`: of how many requests with states a step may verify drafts; None: of all. `window`: of some layers, whose pool has `more_window_pages` than the least.

    `image_room`: tokens of images whose features there is room for; 0: the model sees none.

    `clip`: the most tokens by which a request is expected to grow (0: none grows, so memory runs out).

    `limits`: other fields of `Limits`.
    """

    num_pages: int = 64
    page_size: int = 4
    max_running: int = 8
    chunk: int | None = 16
    depth: int = 1
    radix: bool = True
    max_queued: int = 1000
    conservativeness: float = 1.0
    clip: int = 4096
    backup_pages: int = 0
    host: HostCache | None = None
    step_budget: StepBudget | None = None
    state_slots: int = 0
    grid: int = 8
    snapshots: bool = True
    peers_write: bool = False
    window: int = 0
    more_window_pages: int = 0
    drafts: str = ""
    most_drafts: int = 0
    shadows: int | None = None
    image_room: int = 0
    limits: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **given: Any) -> "EngineSetup":
        """What it has no field for is a limit."""
        own = {one.name for one in fields(cls)}
        limits = {name: given.pop(name) for name in list(given) if name not in own}
        return cls(**given, limits=limits)

    def model(self) -> HashModel:
        kind = LanesModel if self.limits.get("multiplexed") else HashModel
        model = kind(page_size=self.page_size)
        model.window, model.image_room = self.window, self.image_room
        model.shadows = (self.max_running if self.shadows is None else self.shadows) if self.drafts else 0
        return model

    def build(self, model: HashModel) -> tuple[Scheduler, PrefixEvents]:
        """The scheduler of that model, and the events of its cache."""
        bounds = Limits(
            grid=self.grid if self.state_slots else None,
            page_size=self.page_size,
            max_running_requests=self.max_running,
            max_queued_requests=self.max_queued,
            chunked_prefill_size=self.chunk,
            **{"max_prefill_tokens": 64, **self.limits},
        )
        core = CoreConfig(
            limits=bounds,
            num_pages=self.num_pages,
            radix=self.radix,
            publishes=True,
            ratio=RatioRule(conservativeness=self.conservativeness, clip_tokens=self.clip),
            backup_room=CopySize(self.backup_pages, self.backup_pages, self.backup_pages),
            step_budget=self.step_budget,
            decode=strategy(self.drafts, most=self.most_drafts, model=model, overlaps=self.depth > 1)
            if self.drafts
            else DecodePlanner,
            uniform=random.Random(5).random,
        )
        images = ImageCache(max_bytes=self.image_room, token_bytes=1) if self.image_room else None
        states, windows = self._states(model.shadows), self._windows(bounds)
        parts = MemoryParts(host=self.host, states=states, windows=windows, images=images)
        scheduler, events = build_core(core, parts)
        assert events is not None
        return scheduler, events

    def _states(self, num_shadows: int) -> StateSlots | None:
        if not self.state_slots:
            return None
        return StateSlots(
            num_slots=self.state_slots,
            grid=self.grid,
            every=self.grid,
            keeps_snapshots=self.snapshots and self.radix,
            peers_write=self.peers_write or self.backup_pages > 0,
            num_shadows=num_shadows,
        )

    def _windows(self, bounds: Limits) -> WindowPages | None:
        steps = self.depth + bounds.pp_size + bounds.pp_async_batch_depth
        return window_pages(
            bounds, self.num_pages, self.window, more=self.more_window_pages, steps=steps, rows=1 + self.most_drafts
        )
