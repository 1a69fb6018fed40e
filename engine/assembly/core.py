"""Assembly of an engine's core: scheduler, memory and its parts, events of the prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.core.adapters import AdapterPrefill
from engine.core.decode_planning import DecodePlanner
from engine.core.estimates import NewTokenRatio, RatioRule, StepBudget
from engine.core.mem_cache.backups import NOTHING, Backups, CopySize
from engine.core.mem_cache.cache_events import PrefixEvents, events_of_tree
from engine.core.mem_cache.conversations import ConversationPages
from engine.core.mem_cache.host_cache import HostCache
from engine.core.mem_cache.image_cache import ImageCache
from engine.core.mem_cache.memory_part import MemoryPart, Windows
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import RANKS, EvictionOrder, MatchRule, RadixCache, TreePart, by_pages
from engine.core.mem_cache.state_slots import StateSlots
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.memory import Memory
from engine.core.policy import Limits, Uniform
from engine.core.prefill_planning import PrefillPlanner
from engine.core.scheduler import MakeDecodeStrategy, OneStream, Scheduler
from engine.core.state import SchedulerState
from engine.loop.listeners import LoopListener
from engine.messages import ExpectReturn, Note
from engine.pdmux.phases import TwoStreams


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Sizes and rules of the bookkeeping. `radix`, `eviction_policy`: as in RadixCache.

    `backup_room`: for copies of retracted requests. `decode`: strategy of decode steps.
    """

    limits: Limits
    num_pages: int
    radix: bool = True
    eviction_policy: str = "lru"
    publishes: bool = False
    ratio: RatioRule = field(default_factory=RatioRule)
    backup_room: CopySize = NOTHING
    step_budget: StepBudget | None = None
    decode: MakeDecodeStrategy = DecodePlanner
    uniform: Uniform = lambda: 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Parts of request memory that an engine has, real, simulated or of a test."""

    host: HostCache | None = None
    states: StateSlots | None = None
    windows: WindowPages | None = None
    images: ImageCache | None = None

    @property
    def present(self) -> Sequence[MemoryPart]:
        return [part for part in (self.host, self.states, self.windows, self.images) if part is not None]


def build_core(core: CoreConfig, parts: MemoryParts = MemoryParts()) -> tuple[Scheduler, PrefixEvents | None]:
    present = list(parts.present)
    if parts.states is not None and parts.host is not None:
        parts.states.tier = parts.host
    if core.backup_room != NOTHING:
        copied = parts.windows or Windows()
        present.append(Backups(room=core.backup_room, page_size=core.limits.page_size, windows=copied))
    allocator = PageAllocator(num_pages=core.num_pages, page_size=core.limits.page_size)
    order, events = EvictionOrder(RANKS[core.eviction_policy]), None
    if core.eviction_policy == "lru":
        present.append(conversations := ConversationPages(allocator.page_size))
        order = conversations.order
    if core.publishes:
        events = events_of_tree(allocator.page_size, states=parts.states, windows=parts.windows)
    following = [part for part in (*present, events) if isinstance(part, TreePart)]
    tree = RadixCache(
        allocator,
        enabled=core.radix,
        order=order,
        parts=following,
        rule=_match_rule(parts),
    )
    state = SchedulerState(
        limits=core.limits,
        memory=Memory(allocator, tree, present, rank=core.limits.priorities.rank),
        ratio=NewTokenRatio(core.ratio),
    )
    streams = TwoStreams if core.limits.multiplexed else OneStream
    scheduler = Scheduler(
        state,
        uniform=core.uniform,
        step_budget=core.step_budget,
        decode=core.decode,
        prefill=AdapterPrefill if core.limits.max_loras_per_batch else PrefillPlanner,
        streams=streams,
    )
    return scheduler, events


def _match_rule(parts: MemoryParts) -> MatchRule:
    states, windows = parts.states, parts.windows
    if states is not None:
        return states.usable_match if windows is None else partial(states.usable_match, whole=windows.is_whole)
    return by_pages if windows is None else windows.usable_match


class ConversationListener(LoopListener):
    def __init__(self, conversations: ConversationPages) -> None:
        self._conversations = conversations

    def on_turn(self, now_s: float) -> None:
        self._conversations.now_s = now_s

    def on_note(self, message: Note) -> None:
        if isinstance(message, ExpectReturn):
            self._conversations.announce(message.namespace, message.conversation, message.return_s)


def conversation_listeners(scheduler: Scheduler) -> Sequence[LoopListener]:
    return [ConversationListener(part) for part in scheduler.memory.having(ConversationPages)]
