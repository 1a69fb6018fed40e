"""The decode role: a request gets pages, its KV lands in them, and it joins the running batch without a forward.

    add -> PREALLOC --handshake done, memory--> TRANSFER --Success--> running (the scheduler's)
               \\________ Failed, abort, timeout: answered at once _______/
                                     |
                          pages a peer may still write: quarantined until the receiver is drained

    running --memory short--> RETRACTED (the scheduler's, or Resumption's) --memory, before any new PREALLOC--> running

It is told poll states and the time; sockets and threads are the manager's.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from disagg.metadata import Checksum, KVCorrupt, MetadataBuffers, MetadataCorrupt, verify
from disagg.quarantine import Quarantine
from disagg.resumption import Resumption
from disagg.subject import about_request
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.scheduler import ABORTED, Scheduler
from engine.messages import FAKE_BOOTSTRAP_HOST, FinishReason, LogprobOptions, TokenOutput
from transfer_backends.kvpoll import KVPoll, RoomInUse
from transfer_backends.ports import KVReceiver

log = logging.getLogger(__name__)

UNJOINED = 502  # tells a router that to try the same pair again is of little use: this worker has, for long


class Stage(Enum):
    PREALLOC = "prealloc"
    TRANSFER = "transfer"


class Receivers(Protocol):
    """The part of the decode manager that the role uses."""

    @property
    def counters(self) -> dict[str, int]: ...

    def receiver(self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False) -> KVReceiver: ...

    def check(self) -> list[str]: ...

    def close(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Entry:
    """`moves_bytes`: the metadata row will be real (a fake transfer moves none). `joined`: prefill was found and reached."""

    request: Request
    receiver: KVReceiver
    room: int
    moves_bytes: bool
    stage: Stage = Stage.PREALLOC
    joined: bool = False
    row: int | None = None


class DecodeRole:
    name = "decode"

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: Receivers,
        metadata: MetadataBuffers,
        moves_bytes: bool,
        prealloc_timeout_s: float,
        checksum: Checksum | None = None,
    ) -> None:
        """`checksum`: of pages, compared with prefill's before decode starts; None: it is not asked for."""
        self._scheduler = scheduler
        self._manager = manager
        self._metadata = metadata
        self._moves_bytes = moves_bytes
        self._prealloc_timeout_s = prealloc_timeout_s
        self._checksum = checksum
        self._entries: dict[str, Entry] = {}
        self._quarantine = Quarantine(scheduler=scheduler, metadata=metadata)
        self._resumption = Resumption(
            scheduler=scheduler,
            manager=manager,
            metadata=metadata,
            quarantine=self._quarantine,
            moves_bytes=moves_bytes,
            checksum=checksum,
        )
        self._counters: Counter[str] = Counter()
        self._closed = False

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        bootstrap = request.bootstrap
        if request.pooling:
            return [refused(request, refusal("input: a decode worker makes no embeddings", status=400))]
        if bootstrap is None:
            return [refused(request, refusal("bootstrap_room: a decode worker needs one", status=400))]
        if error := self._scheduler.refusal(request):
            return [refused(request, error)]
        fake = bootstrap.host == FAKE_BOOTSTRAP_HOST
        try:
            receiver = self._manager.receiver(bootstrap.room, bootstrap=f"{bootstrap.host}:{bootstrap.port}", fake=fake)
        except (RoomInUse, ValueError) as error:
            return [refused(request, refusal(f"bootstrap_room: {error}", status=409))]
        if request.logprobs is not None:  # the prompt's are known to prefill alone; the router merges
            asked = request.logprobs
            request.logprobs = LogprobOptions(start_len=-1, top_num=asked.top_num, token_ids=asked.token_ids)
        refused_late = self._scheduler.held.adopt(request)
        assert refused_late is None, refused_late  # it was asked above
        request.times.bootstraps = request.times.remote = True
        self._entries[request.rid] = Entry(request, receiver, bootstrap.room, self._moves_bytes and not fake)
        return []

    def abort(self, rid: str, now_s: float, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        self._resumption.take()
        entry = self._entries.get(rid)
        if entry is not None:
            return self._end(entry, reason)
        resuming = self._resumption.abort(rid, reason)
        return self._scheduler.abort(rid, reason) if resuming is None else resuming

    def close_to_peers(self, why: str | None) -> None:
        """No peer asks a decode worker for work. While it pauses or drains, it preempts no request either."""
        self._closed = why is not None

    def end_peers_work(self, why: str) -> None:
        """Nobody asks a decode worker."""

    def poll(self, now_s: float) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        self._quarantine.end_drained()
        self._resumption.take()
        self._resumption.poll(now_s, may_preempt=not self._closed)
        ready: list[Entry] = []
        for entry in list(self._entries.values()):
            state = entry.receiver.poll()
            entry.joined = entry.joined or state is KVPoll.WaitingForInput
            if state is KVPoll.Failed:
                outputs += self._fail(entry)
            elif entry.stage is Stage.TRANSFER and state is KVPoll.Success:
                outputs += self._start(entry, now_s)
            elif entry.stage is Stage.PREALLOC and state is KVPoll.WaitingForInput:
                ready.append(entry)
        self._give_memory(ready, now_s)
        for entry in [e for e in self._entries.values() if e.stage is Stage.PREALLOC]:
            outputs += self._expire(entry, now_s)
        return outputs

    def on_launch(self, plan: Plan) -> None:
        """No peer waits for what it computes."""

    def on_step(self, effects: StepEffects, now_s: float) -> list[TokenOutput]:
        return effects.outputs

    # ---- moves

    def _give_memory(self, ready: list[Entry], now_s: float) -> None:
        """Most urgent first, then in order of arrival; none overtakes one that finds no room, or a retracted one as urgent."""
        if not ready:
            return
        urgency = self._scheduler.held.urgency
        retracted = [*self._scheduler.held.retracted(), *self._resumption.waiting()]
        before = max((urgency(r, now_s) for r in retracted), default=-math.inf)
        for entry in sorted(ready, key=lambda e: -urgency(e.request, now_s)):
            if urgency(entry.request, now_s) <= before:
                return
            if self._scheduler.held.adapter_has_place(entry.request, now_s) and not self._preallocate(entry, now_s):
                return

    def _preallocate(self, entry: Entry, now_s: float) -> bool:
        """Pages for the whole prompt and a metadata row, told to prefill; False when there is no room now.

        What of the prompt is cached here (an earlier turn of a conversation) is locked, and not asked for.
        """
        row = self._metadata.allocate()
        if row is None:
            return False
        if not self._scheduler.held.reserve(entry.request, may_preempt=not self._closed):
            self._metadata.free(row)
            return False
        entry.row, entry.stage = row, Stage.TRANSFER
        entry.request.times.queued_s = now_s
        skip = entry.request.shared_pages  # cached here: neither written nor exposed
        entry.receiver.provide(entry.request.pages[skip:], row, skip_pages=skip)
        return True

    def _expire(self, entry: Entry, now_s: float) -> list[TokenOutput]:
        if now_s - entry.request.arrived_s <= self._prealloc_timeout_s:
            return []
        self._counters["prealloc_timeouts"] += 1
        waited = f"no KV memory within {self._prealloc_timeout_s:g} s (--disaggregation-prealloc-timeout)"
        return self._end(entry, FinishReason(kind="abort", message=waited, status=503))

    def _start(self, entry: Entry, now_s: float) -> list[TokenOutput]:
        """Start decoding: KV and metadata have landed."""
        assert entry.row is not None
        try:
            first = self._metadata.read(entry.row, room=entry.room if entry.moves_bytes else None)
            if self._checksum is not None and entry.moves_bytes:
                verify(first, entry.request.pages[entry.request.shared_pages :], self._checksum)
                self._counters["kv_checksum_verified"] += 1
        except (MetadataCorrupt, KVCorrupt) as error:
            subject = about_request(entry.request, entry.room)
            log.error("decode %s (room %d): %s", entry.request.rid, entry.room, error, extra=subject)
            self._counters["metadata_corrupt" if isinstance(error, MetadataCorrupt) else "kv_checksum_failed"] += 1
            return self._end(entry, FinishReason(kind="abort", message=f"KV transfer: {error}", status=500))
        times = entry.request.times
        times.landed_s, times.remote_queue_s, times.remote_prefill_s = now_s, first.queue_s, first.prefill_s
        entry.request.transfer_retries += entry.receiver.retries()
        self._metadata.free(entry.row)
        entry.receiver.close()
        del self._entries[entry.request.rid]
        return self._scheduler.held.start_decoding(entry.request, first.result, cached_tokens=first.cached_tokens)

    def _fail(self, entry: Entry) -> list[TokenOutput]:
        self._counters["bootstrap_failed" if entry.stage is Stage.PREALLOC else "transfer_failed"] += 1
        reason = entry.receiver.failure() or "the transfer failed"
        subject = about_request(entry.request, entry.room)
        log.warning("decode %s (room %d) failed: %s", entry.request.rid, entry.room, reason, extra=subject)
        status = 500 if entry.joined else UNJOINED
        return self._end(entry, FinishReason(kind="abort", message=f"KV transfer: {reason}", status=status))

    def _end(self, entry: Entry, reason: FinishReason) -> list[TokenOutput]:
        """Answer with `reason` now; memory goes back at once, or through quarantine."""
        entry.receiver.abort(reason.message)
        output = self._scheduler.held.end(entry.request, reason)
        del self._entries[entry.request.rid]
        if entry.receiver.drained():
            self._quarantine.close(entry.receiver, entry.row)
        else:
            self._quarantine.add(entry.receiver, pages=self._scheduler.held.quarantine(entry.request), row=entry.row)
        self._scheduler.held.release(entry.request)
        return [output]

    # ---- self-knowledge

    def waits_for_outside(self) -> bool:
        return bool(
            self._entries or len(self._resumption) or len(self._quarantine) or self._scheduler.held.num_retracted
        )

    def queues(self) -> dict[str, int]:
        count = Counter(entry.stage for entry in self._entries.values())
        return {
            "prealloc": count[Stage.PREALLOC],
            "transfer": count[Stage.TRANSFER],
            "resuming": len(self._resumption) - self._resumption.num_waiting,
            "quarantined": len(self._quarantine),
            "retracted": self._scheduler.held.num_retracted + self._resumption.num_waiting,
            "waiting": 0,  # all that the scheduler's waiting queue holds are retracted ones
        }

    def counters(self) -> dict[str, float]:
        backups = self._scheduler.backups
        own = {"backup_saved_tokens": backups.saved_tokens, "backup_restored_tokens": backups.restored_tokens}
        return {**self._manager.counters, **(self._counters + self._resumption.counters), **own}

    def gauges(self) -> dict[str, float]:
        wanted = sum(len(e.request.input_ids) for e in self._entries.values() if e.stage is Stage.PREALLOC)
        allocator = self._scheduler.memory.allocator
        return {"pending_prealloc_token_usage": wanted / (allocator.num_pages * allocator.page_size)}

    def check(self) -> None:
        owned = sum(e.row is not None for e in self._entries.values())
        owned += self._resumption.num_rows + self._quarantine.num_rows
        used = self._metadata.num_used
        assert owned == used, f"{used} metadata rows used, {owned} owned"
        self._quarantine.check()
        self._metadata.check()
        assert not (wrong := self._manager.check()), "; ".join(wrong)

    def close(self) -> None:
        self._manager.close()
