"""Sends samples to the engine and receives their text, in one event loop. Knows no HTTP.

Wire names are unique: a new request gets no late outputs of an aborted one.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Protocol

import msgspec

from engine.config import MAX_RUNNING_OF
from engine.frontend.client.dp_policy import RankPolicy, Rule
from engine.frontend.client.forecast import PrefillForecast
from engine.frontend.client.generation import NO_TRACES, Generation, Sample, SampleObserver, SampleTrace, Traces
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import (
    CALL_TIMEOUT_S,
    ENGINE_DEAD,
    LiveNames,
    Name,
    RankLoads,
    SharedRequests,
)
from engine.frontend.errors import not_ready, too_late
from engine.messages import (
    AbortRequest,
    GenerateRequest,
    MoveOut,
    StateReply,
    StepReply,
    ToFrontend,
    TokenBatch,
    TokenOutput,
    batch_of,
)
from engine.text.sample import TextOutput
from service.http.errors import DRAINING, ApiError
from service.telemetry.context import CURRENT


class TextReader(Protocol):
    """Detokenizes the outputs of one sample, in order."""

    def read(self, output: TokenOutput) -> TextOutput: ...


@dataclass(slots=True)
class _Live:
    """A running sample. `tokens`: prompt plus answer so far."""

    generation: Generation
    index: int
    text: TextReader
    rank: int
    tokens: int
    shows_hidden: bool

    @property
    def can_move(self) -> bool:
        """False with hidden states: another worker has KV only."""
        return self.generation.can_move and not self.shows_hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """When a request gets 503: beyond `max_running` and `max_queued` per DP rank, as the flags.

    `early_rejection`: if the first token would exceed the timeout.
    """

    max_running: int | None
    max_queued: int
    early_rejection: bool = False


@dataclass(eq=False)
class EngineClient:
    """`open_text` starts a sample's text. `shared`: with other frontends, if any."""

    leaders: Leaders
    _: KW_ONLY
    open_text: Callable[[GenerateRequest], TextReader]
    observer: SampleObserver
    limits: ClientLimits
    traces: Traces = NO_TRACES
    shared: SharedRequests | None = None
    policy: InitVar[RankPolicy | None] = None

    def __post_init__(self, policy: RankPolicy | None) -> None:
        self.loads = RankLoads(self.leaders.num_ranks, self.shared)
        self.forecasts = tuple(PrefillForecast() for _ in self.leaders.links if self.limits.early_rejection)  # by rank
        self.closed: ApiError | None = None  # why new requests are rejected
        self._now_s = self.leaders.now_s
        self._policy = policy or RankPolicy(Rule.ROUND_ROBIN, num_ranks=self.leaders.num_ranks)
        self._live: dict[str, _Live] = {}
        self._names = LiveNames(self.shared)

    @property
    def max_running(self) -> int:
        """The limit per rank; until the scheduler has reported it, the largest default."""
        found = self.leaders.info.get("max_running_requests")
        return self.limits.max_running or (found if isinstance(found, int) else max(MAX_RUNNING_OF.values()))

    @property
    def max_live(self) -> int:
        return self.leaders.num_ranks * (self.max_running + self.limits.max_queued)

    @property
    def num_live(self) -> int:
        return self.loads.num_live

    @property
    def is_draining(self) -> bool:
        """True while live samples finish and new ones are rejected."""
        return self.closed is not None and self.closed.code == DRAINING

    def generate(
        self,
        requests: list[GenerateRequest],
        *,
        groups: list[str] | None = None,
        timeout_s: float | None = None,
        dp_rank: int | None = None,
        earlier: Sequence[TokenOutput] = (),
        owner: str = "",
    ) -> Generation:
        """Send the samples. `requests[i].rid`: the user's name; `groups[i]`: another, for aborts.

        `timeout_s`: enforced by the engine. `dp_rank`: named by the client. `earlier`: outputs of
        another worker by sample; finished ones are not sent. `owner`: of the names, empty without
        key. Raises ApiError: 503 while starting, ending, full, or too busy for the timeout, 400 for
        a used name or unknown rank.
        """
        self._check_open(len(requests))
        ranks = self._ranks_of(requests, dp_rank)
        self._check_timeout(requests, ranks, timeout_s)
        names, texts = [Name(owner, r.rid) for r in requests], [self.open_text(r) for r in requests]
        grouped = names if groups is None else [Name(owner, group) for group in groups]
        takes_over = bool(earlier)  # an earlier try may still be leaving under the same names
        if not takes_over:
            self._names.check(names, grouped)
        samples = [self._sample_of(r, rank) for r, rank in zip(requests, ranks, strict=True)]
        over = {i for i, before in enumerate(earlier) if before.finish is not None}
        generation = Generation(
            samples,
            {*names, *grouped},
            observer=self.observer,
            now_s=self._now_s,
            on_done=self._free_names,
            on_leave=self._on_leave,
            resumed=[(i, texts[i].read(before)) for i, before in enumerate(earlier) if before.new_ids or i in over],
            ended=over,
        )
        if not takes_over:
            self._names.claim(generation.names)
        for i, sample in enumerate(samples):
            if i in over:
                continue
            self._live[sample.wire_rid] = _Live(
                generation, i, texts[i], ranks[i], sample.num_prompt_tokens, requests[i].return_hidden_states
            )
            self.loads.change(ranks[i], requests=1, tokens=sample.num_prompt_tokens)
            for name in {names[i], grouped[i]}:
                self._names.add(name, sample.wire_rid)
        try:
            left = [one for i, one in enumerate(zip(requests, samples, ranks, strict=True)) if i not in over]
            self._send(left, timeout_s=timeout_s)
        except BaseException:
            generation.__exit__(None, None, None)
            raise
        return generation

    def abort(self, name: str, *, owner: str | None = "") -> bool:
        """Return whether there were live samples of the name or group. `owner` None: any."""
        wire_rids = self._names.of(name, owner)
        for rid in wire_rids:
            self.leaders.links[self._live[rid].rank].send(AbortRequest(rid=rid))
        return bool(wire_rids)

    def move_out(self, name: str, room: int, *, owner: str = "") -> bool:
        """Move a live sample to another worker (KV in `room`); return whether possible."""
        movable = [rid for rid in self._names.of(name, owner) if self._live[rid].can_move]
        for rid in movable:
            self.leaders.links[self._live[rid].rank].send(MoveOut(rid=rid, room=room))
        return bool(movable)

    def abort_all(self) -> None:
        for link in self.leaders.links:
            link.send(AbortRequest(rid="", all=True))

    async def recent_states(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[StateReply]:
        """States by rank, an earlier one during a long step. Raises ApiError(503)."""
        return await self.leaders.recent_states(timeout_s=timeout_s, closed=self.closed is not None)

    def close(self, error: ApiError) -> None:
        """Reject new requests; live samples continue."""
        self.closed = self.closed or error

    def end(self, error: ApiError) -> None:
        """Fail present and later calls, at the engine's orderly end."""
        self.fail_all(error)
        self.leaders.fail_calls(error, gone=True)

    def fail_all(self, error: ApiError) -> None:
        self.closed = error
        for live in list(self._live.values()):
            live.generation.fail(error)
        self.leaders.fail_calls(error, gone=error.code == ENGINE_DEAD)

    def on_message(self, message: ToFrontend, rank: int = 0) -> None:
        now_s = self._now_s()
        if not isinstance(message, StepReply):  # from the heartbeat thread, not the loop
            self.leaders.links[rank].last_message_s = now_s
        if not isinstance(message, TokenBatch):
            return self.leaders.on_message(message, rank)
        for output in message.outputs:
            live = self._live.get(output.rid)
            if live is not None:
                if self.forecasts:
                    self.forecasts[live.rank].start(output.rid, now_s)
                if self.leaders.num_ranks > 1 and output.new_ids:
                    live.tokens += len(output.new_ids)
                    self.loads.change(live.rank, tokens=len(output.new_ids))
                live.generation.feed(live.index, live.text.read(output), now_s)

    def _send(
        self,
        samples: list[tuple[GenerateRequest, Sample, int]],
        *,
        timeout_s: float | None,
    ) -> None:
        sent = [
            msgspec.structs.replace(
                r,
                rid=sample.wire_rid,
                sampling=msgspec.structs.replace(r.sampling, max_new_tokens=1) if sample.is_empty else r.sampling,
                timeout_s=timeout_s,
                request_id=CURRENT.get().request_id,
            )
            for r, sample, _ in samples
        ]
        for rank in dict.fromkeys(rank for _, _, rank in samples):
            part = [one for one, (_, _, owner) in zip(sent, samples, strict=True) if owner == rank]
            self.leaders.links[rank].send(part[0] if len(part) == 1 else batch_of(part))
        for _, sample, rank in samples:
            self.observer.on_start(sample.num_prompt_tokens)
            if self.forecasts:
                self.forecasts[rank].add(sample.wire_rid, sample.num_prompt_tokens, self._now_s())

    def _ranks_of(self, requests: list[GenerateRequest], dp_rank: int | None) -> list[int]:
        if self.leaders.num_ranks == 1 and dp_rank is None:
            return [0] * len(requests)
        return self._policy.place(requests, self.loads.of_all(), routed=dp_rank)

    def _sample_of(self, request: GenerateRequest, rank: int) -> Sample:
        dp_rank = rank if self.leaders.num_ranks > 1 else None
        return Sample(
            name=request.rid,
            wire_rid=self.leaders.mint_wire_rid(request.rid),
            num_prompt_tokens=len(request.input_ids),
            is_empty=request.sampling.max_new_tokens == 0 and not request.alone,
            trace=SampleTrace(self.traces, request, request.rid, CURRENT.get(), dp_rank),
        )

    def _free_names(self, generation: Generation) -> None:
        """Free names before the end is written: the client may reuse them."""
        gone = {sample.wire_rid for sample in generation.samples}
        for name in generation.names:
            self._names.leave(name, gone)

    def _on_leave(self, generation: Generation) -> None:
        ranks: dict[str, int] = {}
        for sample in generation.samples:
            if (live := self._live.pop(sample.wire_rid, None)) is None:
                continue
            ranks[sample.wire_rid] = live.rank
            self.loads.change(live.rank, requests=-1, tokens=-live.tokens)
            if self.forecasts:
                self.forecasts[live.rank].drop(sample.wire_rid, self._now_s())
        self._free_names(generation)
        for sample in generation.unfinished:
            if (rank := ranks.get(sample.wire_rid)) is not None:
                self.leaders.links[rank].abort(sample.wire_rid)

    def _check_open(self, num_samples: int) -> None:
        if self.closed is not None:
            raise self.closed
        if not self.leaders.ready.is_set():
            raise not_ready("the model is still loading; try again soon")
        if num_samples > self.max_live:
            text = f"{num_samples} samples in one request are more than this server ever queues ({self.max_live})"
            raise ApiError(400, text)
        if self.num_live + num_samples > self.max_live:
            text = f"the queue is full ({self.num_live} requests); try again later"
            raise ApiError(503, text, code="queue_full", retry_after_s=1)

    def _check_timeout(self, requests: list[GenerateRequest], ranks: list[int], timeout_s: float | None) -> None:
        if timeout_s is None or not self.forecasts:
            return
        for rank in dict.fromkeys(ranks):
            num_tokens = sum(len(r.input_ids) for r, owner in zip(requests, ranks, strict=True) if owner == rank)
            wait_s = self.forecasts[rank].wait_s(num_tokens, self._now_s())
            if wait_s is not None and wait_s > timeout_s:
                self.observer.on_reject()
                raise too_late(wait_s, timeout_s)
