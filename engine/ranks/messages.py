"""Messages of leader and followers: msgpack of tagged arrays, one per frame.

    leader   -> follower: PoolSize, Step, Prepare, Apply
    follower -> leader:   Loaded, Ready, Serving, Done, Failed

A `Step` has a forward's view of a plan, in columns, without names, prompts, sampling parameters or
masks: 3 KB for 256 decodes. Pixels go to the first stage only, with the step that encodes them.
"""

import socket
import sys
from dataclasses import fields
from typing import Any, Generic, TypeVar

import msgspec

from engine.core.dp_step import AgreedStep
from engine.core.mem_cache.backups import NOTHING, CopySize
from engine.core.plan import (
    FeatureLand,
    ItemImages,
    PageCopy,
    PageLoad,
    PageSave,
    Plan,
    PlanItem,
    SlotOpen,
    StateCopy,
    StateRollback,
)
from engine.images import ImageInput
from engine.messages import LogprobOptions
from engine.sampling_params import SamplingParams
from service.process.message_stream import LONGEST_BYTES, MessageStream


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


NO_LIMIT = sys.maxsize


class Loaded(_Frame, frozen=True):
    """The rank has its weights; next all ranks measure steps at once."""


class Ready(_Frame, frozen=True):
    """The rank's memory holds these pages, slots and step sizes, besides its weights.

    `fingerprint`: of the weights' files. `slot_bytes`: of a state.
    """

    num_pages: int
    fingerprint: str
    state_slots: int = NO_LIMIT
    shadow_slots: int = NO_LIMIT
    chunked_prefill_size: int = NO_LIMIT
    max_prefill_tokens: int = NO_LIMIT
    slot_bytes: int = 0


class PoolSize(_Frame, frozen=True):
    """Sizes of all ranks: the minima.

    `host_pages`, `host_states`: host tier. `state_slots`: recurrent ones, 0 without;
    `shadow_slots`: more for drafts. `apart`: of `num_pages`, window layers have an own pool (engine/device/pools.py).
    `files`: the worker's directory, or "". `chunked_prefill_size`: resolved.
    """

    num_pages: int
    host_pages: int = 0
    host_states: int = 0
    backup_room: CopySize = NOTHING
    files: str = ""
    state_slots: int = 0
    shadow_slots: int = 0
    apart: bool = False
    chunked_prefill_size: int = -1


class Serving(_Frame, frozen=True):
    """The rank has its memory and takes steps."""


class Step(_Frame, frozen=True):
    """One plan: its fields as they are, except `_OTHERWISE`, and columns by item.

    Columns are `slots`, `lens` (empty: 1 each), flat `tokens`, `starts`.

    `seq`: 0 before the first step. `pages`: (item, first index of its row, page ids). `decodes`:
    riders in an extend step. `unsampled`: items. `logprobs`: of prompts, (item, first position,
    whether the next token is known). `answer`: number of the requested `Done`, or 0. `agreed`: with
    DP attention.
    """

    seq: int
    extend: bool
    slots: list[int]
    lens: list[int]
    tokens: list[int]
    starts: list[int]
    pages: list[tuple[int, int, list[int]]]
    decodes: list[int]
    unsampled: list[int]
    logprobs: list[tuple[int, int, bool]]
    opened: list[tuple[int, int, int]] = []  # (slot, adapter, slot of its state)
    states: list[StateCopy] = []
    snapshots: list[StateCopy] = []
    rewinds: list[StateRollback] = []
    saves: list[PageSave] = []
    loads: list[PageLoad] = []
    drops: list[int] = []
    states_to_host: list[PageCopy] = []
    to_host: list[PageCopy] = []
    from_host: list[PageCopy] = []
    windows: list[tuple[int, int, list[int]]] = []  # as `pages`, of the pool of windows
    drafts: list[
        tuple[int, int, int]
    ] = []  # (item, `behind`, `place`) where a draft is read: all ranks record such steps alike
    to_draft: list[int] = []  # of each item of a step that only drafts
    topk: int = 1  # of such a step
    unverified: list[tuple[int, int]] = []  # (item, drafts) of such a step
    images: list[tuple[int, ItemImages]] = []  # (item, what it has of images)
    encodes: list[ImageInput] = []
    forgets: list[bytes] = []
    lands: list[FeatureLand] = []
    answer: int = 0
    agreed: AgreedStep | None = None


class Prepare(_Frame, frozen=True):
    """Read input of a later `Apply` of this number, concurrent with steps; answered by `Done`."""

    number: int
    name: str
    args: dict[str, Any]


class Apply(_Frame, frozen=True):
    """Run action `name` after all earlier steps; answered by `Done`."""

    number: int
    name: str
    args: dict[str, Any]


class Done(_Frame, frozen=True):
    """Answer to Step, Prepare or Apply. `error`: a refusal for the operator, without effect."""

    number: int
    error: str = ""
    value: Any = None


class Failed(_Frame, frozen=True):
    """The rank ends. `refused`: by a wrong flag or file."""

    text: str
    refused: bool


ToFollower = PoolSize | Step | Prepare | Apply
ToLeader = Loaded | Ready | Serving | Done | Failed

_NO_SAMPLING = SamplingParams()
_ANY_LOGPROBS = LogprobOptions()
_OTHERWISE = {"items", "opens"} | {
    "closes",
    "wait",
    "masks",
    "sample_deferred",
    "joins",
    "phase",
}  # in columns | not sent
_WHOLE = tuple(field.name for field in fields(Plan) if field.name not in _OTHERWISE)  # equal names, or a TypeError


def step_of(plan: Plan, *, answer: int = 0, sees: bool = True) -> Step:
    """`sees`: for the first stage; others encode nothing."""
    items, whole = plan.items, {name: getattr(plan, name) for name in _WHOLE}
    if not sees:
        whole |= {"encodes": [], "forgets": []}
    return Step(
        **whole,
        slots=[item.slot for item in items],
        lens=[item.q_len for item in items] if plan.extend else [],
        tokens=[token for item in items for token in item.tokens],
        starts=[item.start for item in items],
        pages=[(i, item.page_start, item.new_pages) for i, item in enumerate(items) if item.new_pages],
        decodes=[i for i, item in enumerate(items) if not item.extend] if plan.extend else [],
        unsampled=[i for i, item in enumerate(items) if not item.sample],
        logprobs=[
            (i, item.logprob_from, item.logprob_next is not None)
            for i, item in enumerate(items)
            if item.logprob_from is not None
        ],
        opened=[(opened.slot, opened.adapter, opened.state) for opened in plan.opens],
        windows=[(i, item.window_start, item.new_window) for i, item in enumerate(items) if item.new_window],
        drafts=[(i, item.behind, item.place) for i, item in enumerate(items) if item.draft],
        to_draft=[item.to_draft for item in items] if plan.skips_model else [],
        topk=items[0].topk if plan.skips_model else 1,
        unverified=[(i, item.unverified) for i, item in enumerate(items) if item.unverified],
        images=[(i, item.images) for i, item in enumerate(items) if item.images is not None],
        answer=answer,
    )


def plan_of(step: Step) -> Plan:
    """A follower's plan: without names, sampling, masks and logprob options."""
    return Plan(
        **{name: getattr(step, name) for name in _WHOLE},
        items=_items(step),
        opens=[SlotOpen(slot, _NO_SAMPLING, [], [], (), adapter, state) for slot, adapter, state in step.opened],
    )


def _items(step: Step) -> list[PlanItem]:
    pages = {i: (first, ids) for i, first, ids in step.pages}
    windows = {i: (first, ids) for i, first, ids in step.windows}
    wanted = {i: (first, more) for i, first, more in step.logprobs}
    decodes, unsampled = frozenset(step.decodes), frozenset(step.unsampled)
    drafts = {i: (behind, place) for i, behind, place in step.drafts}
    images, unverified = dict(step.images), dict(step.unverified)
    items, at = [], 0
    for i, (slot, start) in enumerate(zip(step.slots, step.starts, strict=True)):
        length = step.lens[i] if step.extend else 1
        first, ids = pages.get(i, (0, []))
        window_first, window_ids = windows.get(i, (0, []))
        behind, place = drafts.get(i, (0, -1))
        logprob_from, more = wanted.get(i, (None, False))
        items.append(
            PlanItem(
                rid="",
                slot=slot,
                tokens=step.tokens[at : at + length],
                start=start,
                page_start=first,
                new_pages=ids,
                sample=i not in unsampled,
                output_len=0,
                extend=step.extend and i not in decodes,
                logprobs=None if logprob_from is None else _ANY_LOGPROBS,
                logprob_from=logprob_from,
                logprob_next=0 if more else None,
                window_start=window_first,
                new_window=window_ids,
                behind=behind,
                place=place,
                to_draft=step.to_draft[i] if step.to_draft else 0,
                topk=step.topk,
                unverified=unverified.get(i, 0),
                images=images.get(i),
            )
        )
        at += length
    return items


# ---- Ordered messages between a leader and one follower, with end of file at either's end.

M = TypeVar("M")


class Channel(Generic[M]):
    """Channel end: any thread sends, one receives messages of type `receives`."""

    def __init__(self, end: socket.socket, receives: type[M], *, max_unsent_bytes: int | None = None) -> None:
        self._end = MessageStream(end, max_unsent_bytes=max_unsent_bytes)
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: ToFollower | ToLeader) -> None:
        """Never blocks. Raises ChannelFull and ChannelClosed."""
        self._end.put(msgspec.msgpack.encode(message))

    def receive(self) -> M:
        """Raises ChannelClosed."""
        return self._decoder.decode(self._end.get())

    def shut(self) -> None:
        """End both sides: a waiting `receive` raises ChannelClosed."""
        self._end.shut()

    def close(self) -> None:
        self._end.close()


def leader_end(end: socket.socket, *, sees: bool = False) -> Channel[ToLeader]:
    """`sees`: several steps with image pixels may queue."""
    most = LONGEST_BYTES if sees else None
    return Channel(end, ToLeader, max_unsent_bytes=most)  # type: ignore[arg-type]


def follower_end(descriptor: int) -> Channel[ToFollower]:
    return Channel(socket.socket(fileno=descriptor), ToFollower)  # type: ignore[arg-type]
