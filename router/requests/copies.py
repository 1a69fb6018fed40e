"""Copies hot prefixes to a second prefill worker (router/choice/prefix_sources.py).

A copy repeats the hot request at that worker, which only fetches the KV: no router needs a
tokenizer.
"""

from dataclasses import dataclass, field
from functools import partial

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt
from router.attempts.request import RequestContext
from router.body import write_bodies
from router.choice.policies import RoutingHints
from router.choice.prefix_sources import Holder, PrefixHeaders, Replication
from router.client.upstream import HttpReply
from router.pool.worker import Role, Worker
from service.kv_events import BLOCK_TOKENS


@dataclass(eq=False, kw_only=True)
class PrefixCopies:
    launcher: AttemptLauncher
    prefixes: PrefixHeaders
    replication: Replication
    _running: set[HttpReply] = field(default_factory=set)

    def on_sent(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        """Count the prompt's longest known prefix, and copy it if hot and at one worker only."""
        chosen, hints, sources = attempt.placements[0], request.hints, self.prefixes.sources
        if chosen.worker.role is not Role.PREFILL or not sources.exchanges(chosen.worker):
            return
        others = list(sources.holders(hints, like=chosen.worker))
        num_blocks = max([chosen.cached_tokens // BLOCK_TOKENS, *(holder.num_blocks for holder in others)])
        if num_blocks == 0 or not self.replication.note(hints.keys[num_blocks - 1], now_s):
            return
        has_it = {holder.worker for holder in others if holder.num_blocks >= num_blocks} | {chosen.worker}
        targets = sources.others(chosen.worker, but=has_it.__contains__)
        source = sources.holding(chosen.worker, num_blocks)
        if len(has_it) == 1 and targets and source is not None:
            self._copy(request, source, targets[0], now_s)

    def _copy(self, request: RequestContext, source: Holder, target: Worker, now_s: float) -> None:
        launcher, hints = self.launcher, request.hints
        if not launcher.rooms.has_room_for(request.parsed.num_samples):
            return
        if not self.replication.begin(hints.keys[source.num_blocks - 1], source.size_bytes, now_s):
            return
        rooms = launcher.rooms.mint(request.parsed.num_samples)
        body, _ = write_bodies(request.parsed, host=target.bootstrap_host, port=target.bootstrap_port, rooms=rooms)
        headers = self.prefixes.naming(source, request.headers_at(now_s), copy=True)
        reply = launcher.upstream.post(target.url, request.path, headers=headers, body=body)
        self._running.add(reply)
        reply.on_end = partial(self._on_end, reply, rooms, target, hints, source.num_blocks)
        if reply.complete or reply.error is not None:
            reply.on_end()

    def _on_end(
        self, reply: HttpReply, rooms: tuple[int, ...], target: Worker, hints: RoutingHints, num_blocks: int
    ) -> None:
        if reply not in self._running:
            return
        self._running.discard(reply)
        self.launcher.rooms.release(rooms)
        good = reply.complete and reply.status == 200
        self.replication.end(good=good)
        if good:
            self.prefixes.sources.note_copied(target, hints, num_blocks=num_blocks)

    def close(self) -> None:
        for reply in tuple(self._running):
            reply.close()
