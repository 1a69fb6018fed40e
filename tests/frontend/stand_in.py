"""A scheduler stand-in for the frontend's tests: it speaks the real messages over the real sockets, in a thread.

Its "model" repeats the prompt from the beginning, one token a step, until max_new_tokens, a stop token or a stop string.
A prompt whose text holds one of these words behaves differently: HANG (never answers), SLOW (three tokens, then nothing), REFUSE (fails before the
first token with 503), BREAK (fails after two tokens with 500).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.ipc import IpcPaths, PullSocket, PushSocket
from engine.messages import (
    MOVED,
    AbortRequest,
    ContinueGeneration,
    ControlReply,
    Drain,
    ExpectReturn,
    FinishReason,
    FlushCache,
    GenerateBatch,
    GenerateRequest,
    GetState,
    GetStep,
    KVSource,
    MoveOut,
    PauseGeneration,
    SchedulerReady,
    Shutdown,
    StateReply,
    StepReply,
    TokenBatch,
    TokenLogprob,
    TokenOutput,
    ToScheduler,
)
from engine.stamps import Stamp
from engine.text.incremental import StopSearch, stops_of
from engine.text.tokenizer import Tokenizer

NUM_PAGES, PAGE_SIZE = 100, 16


@dataclass
class Running:
    request: GenerateRequest
    text: str
    output: list[int] = field(default_factory=list)
    stops: StopSearch | None = None


class StandIn:
    """`seen`: all requests, in order; `aborted`: wire rids. Use as a context manager."""

    def __init__(self, ipc: IpcPaths, tokenizer: Tokenizer) -> None:
        self.seen: list[GenerateRequest] = []
        self.batches: list[list[str]] = []  # rids that came in one message
        self.aborted: list[str] = []
        self.moved: dict[str, int] = {}  # wire rids, with their rooms
        self.expected: list[ExpectReturn] = []
        self.keeps_kv: KVSource | None = KVSource("10.0.0.1:5000", "d0")  # of what moves
        self.problems: list[str] = []
        self.may_break = threading.Event()  # cleared: BREAK waits after its second token until this is set
        self.may_break.set()
        self.num_states = 0  # times that it was asked how it is
        self.prealloc = 2  # requests that its state shows in that queue
        self.silent = False  # answers nothing at all
        self.refuses = False  # fails every request, as REFUSE does
        self.step_s = 0.0  # what a step takes
        self.busy = False  # in a long step: the heartbeat alone answers, and says `doing`
        self.doing = StepReply(call_id="", busy_s=None)
        self.was_told_to_drain = False
        self._tokenizer = tokenizer
        self._pull: PullSocket[ToScheduler] = PullSocket(ipc.to_scheduler, ToScheduler)
        self._heartbeat: PullSocket[GetStep] = PullSocket(ipc.to_heartbeat, GetStep)
        self._to_frontend = PushSocket(ipc.to_frontend)
        self._stamp = Stamp(ipc.dir, f"scheduler {ipc.dp_rank}")
        self._num_steps = 0
        self._running: dict[str, Running] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "StandIn":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for socket in (self._pull, self._heartbeat, self._to_frontend):
            socket.close()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def say_ready(self) -> None:
        facts = {"max_total_num_tokens": NUM_PAGES * PAGE_SIZE, "device": "none", "max_running_requests": 64}
        self._to_frontend.send(SchedulerReady(info=facts))

    def _run(self) -> None:
        while not self._over.is_set():
            busy = any(not self._stuck(r) for r in self._running.values())
            self._num_steps += busy
            if not self.silent:
                self._stamp.write(time.monotonic(), num_steps=self._num_steps)
            for question in self._heartbeat.recv_all_nowait():
                if not self.silent:
                    self._to_frontend.send(msgspec.structs.replace(self.doing, call_id=question.call_id))
            if self.busy:
                continue
            for message in self._pull.recv(0.0 if busy else 0.02):
                if not self.silent:
                    self._handle(message)
            if busy:
                self._over.wait(self.step_s)
            outputs = [o for r in list(self._running.values()) if (o := self._step(r)) is not None]
            if outputs:
                self._say(outputs)

    def _handle(self, message: ToScheduler) -> None:
        if isinstance(message, GenerateRequest):
            self._open(message)
        elif isinstance(message, GenerateBatch):
            self.batches.append([r.rid for r in message.requests])
            for one in message.requests:
                self._open(one)
        elif isinstance(message, AbortRequest):
            self.aborted += [message.rid] if not message.all else list(self._running)
            for rid in [r for r in self._running if message.all or r == message.rid]:
                self._running.pop(rid)
                self._say([TokenOutput(rid=rid, new_ids=[], finish=FinishReason(kind="abort"))])
        elif isinstance(message, ExpectReturn):
            self.expected.append(message)
        elif isinstance(message, MoveOut):
            self.moved[message.rid] = message.room
            self._say([self._leave(self._running.pop(message.rid))])
        elif isinstance(message, FlushCache):
            text = "requests are running" if self._running else "flushed"
            self._to_frontend.send(ControlReply(call_id=message.call_id, ok=not self._running, message=text))
        elif isinstance(message, PauseGeneration | ContinueGeneration):
            mode = message.mode if isinstance(message, PauseGeneration) else ""
            self._to_frontend.send(ControlReply(call_id=message.call_id, ok=True, message="", values={"paused": mode}))
        elif isinstance(message, GetState):
            self.num_states += 1
            self._to_frontend.send(self._state(message))
        else:
            assert isinstance(message, Drain | Shutdown)
            self.was_told_to_drain |= isinstance(message, Drain)

    def _say(self, outputs: list[TokenOutput]) -> None:
        self._to_frontend.send(TokenBatch(outputs=outputs))

    def _open(self, m: GenerateRequest) -> None:
        self.seen.append(m)
        stops = stops_of(self._tokenizer, m.input_ids, m.sampling)
        self._running[m.rid] = Running(m, self._tokenizer.decode(m.input_ids), list(m.output_ids), stops)

    def _stuck(self, r: Running) -> bool:
        if "BREAK" in r.text and len(r.output) == 2 and not self.may_break.is_set():
            return True
        return "HANG" in r.text or ("SLOW" in r.text and len(r.output) > 2)

    def _step(self, r: Running) -> TokenOutput | None:
        if self._stuck(r):
            return None
        m = r.request
        if self.refuses or "REFUSE" in r.text:
            return self._end(r, [], FinishReason(kind="abort", status=503, message="no memory for this request"))
        if "BREAK" in r.text and len(r.output) == 2:
            return self._end(r, [], FinishReason(kind="abort", status=500, message="the transfer broke"))
        token = m.input_ids[len(r.output) % len(m.input_ids)]
        r.output.append(token)
        finish = self._finish(r, token)
        return self._end(r, [token], finish) if finish else self._output(r, [token], None)

    def _finish(self, r: Running, token: int) -> FinishReason | None:
        s = r.request.sampling
        if token in s.stop_token_ids:
            return FinishReason(kind="stop", matched=token)
        if r.stops is not None and (found := r.stops.look(r.output)) is not None:
            return found
        return FinishReason(kind="length") if len(r.output) >= (s.max_new_tokens or 0) else None

    def _end(self, r: Running, ids: list[int], finish: FinishReason) -> TokenOutput:
        del self._running[r.request.rid]
        return self._output(r, ids, finish)

    def _leave(self, r: Running) -> TokenOutput:
        output = self._output(r, [], FinishReason(kind=MOVED))
        output.source = self.keeps_kv
        return output

    def _output(self, r: Running, ids: list[int], finish: FinishReason | None) -> TokenOutput:
        m, lp = r.request, r.request.logprobs
        first = len(r.output) == len(ids)
        return TokenOutput(
            rid=m.rid,
            new_ids=ids,
            finish=finish,
            prompt_tokens=len(m.input_ids),
            cached_tokens=4,
            cached_by_tier=[1, 3, 0],
            completion_tokens=len(r.output),
            logprobs=[_logprob(i, lp.top_num, lp.token_ids) for i in ids] if lp else [],
            input_logprobs=_input_logprobs(m) if lp and first else [],
        )

    def _state(self, m: GetState) -> StateReply:
        held = sum(len(r.request.input_ids) // PAGE_SIZE + 1 for r in self._running.values())
        return StateReply(
            call_id=m.call_id,
            role="null",
            running=len(self._running),
            queues={"waiting": 0, "prealloc": self.prealloc},
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            pages={"free": NUM_PAGES - held, "cached": 0, "held": held, "quarantined": 0},
            counters={"prompt_tokens": 10.0, "cached_tokens": 5.0, "transfer_failed": 3.0},
            gauges={"kv_transfer_speed_gb_s": 1.5, "spec_accept_length": 2.5, "spec_accept_rate": 0.75},
            problems=list(self.problems) if m.check else [],
        )


def _logprob(token: int, top: int, asked: Sequence[int] = ()) -> TokenLogprob:
    best = [(-0.5 - i, (token + i) % 256) for i in range(top)]
    return TokenLogprob(logprob=-0.5, token_id=token, top=best, requested=[(-1.0, i) for i in asked])


def _input_logprobs(m: GenerateRequest) -> list[TokenLogprob]:
    assert m.logprobs is not None
    start = m.logprobs.start_len
    if start < 0:
        return []
    rows = [_logprob(t, m.logprobs.top_num) for t in m.input_ids]
    rows[0] = TokenLogprob(logprob=None, token_id=m.input_ids[0])
    return rows[start:]
