"""Clients of the routers: they know what each answer must be, and hold every answer against it.

An answer is right when its tokens are exactly those of greedy generation (its vector that of the prompt); an error is clear
when it says so by a status or an event, and says when to come again where it is about load. Anything else ends the run.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from service.http.guard import TIMEOUT_HEADER
from service.kv_events import namespace_of
from tests.core.hash_model import hidden_of, prefix_hash
from tools.simulation.http import Call, Head, Request, call
from tools.simulation.network import Network
from tools.simulation.options import Options
from tools.simulation.returns import Returns, events_of, headers_of, last_id
from tools.simulation.workers.executor import adapter_of
from tools.simulation.workers.images import PlacedImages, choose_images, right_tokens, whole_ones, with_placeholders
from tools.simulation.workers.worker import EOS
from tools.simulation.world import Process, Violation

FAMILIES = 4  # of prompts that share a beginning
VOCAB_OF_PROMPTS = 50
TIMEOUTS_S = (0.05, 0.3, 2.0)
BUSY = (429, 503)  # come again
GONE = 410
BLIND_SHARE = 0.15  # of prompts with placeholders: these are text
MOST_TRIES = 20
SHORT_WAIT_S = 1.0  # for memory at decode: a busy worker may refuse a request for it
AGAIN_S = 1.0  # after a stream that ended with BUSY before its first token: its header was sent before


@dataclass(eq=False)
class Asked:
    """One request of one client, from the first try to its outcome."""

    number: int
    prompt: list[int]
    new: int
    num_samples: int
    stream: bool
    must_succeed: bool
    timeout_s: float | None = None  # told to the workers
    priority: int = 0
    extra_key: str = ""
    whole_at: str = ""  # the worker's address that it goes to; "": a router's
    embed: bool = False
    images: PlacedImages = ()
    retry_after: str = ""
    tries: int = 0
    outcome: str = ""  # "ok" | "error" | "left"
    status: int = 0
    got: list[int] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)  # of a stream: all that its client has, over its connections
    address: str = ""  # of the router
    sent_s: float = 0.0
    broken_s: float = 0.0  # when it last got something, and then its connection broke
    num_returns: int = 0
    num_kept: int = 0  # tokens that it had when it came again
    breaks_after: int = 0  # events; 0: never by itself
    is_return: bool = False  # the present connection
    was_cut: bool = False  # and that by itself
    got_more: bool = False
    got_s: float = 0.0
    finished: bool = False
    said_error: bool = False
    said_busy: bool = False
    call: Call | None = None

    def right_answer(self) -> list[int]:
        adapter = adapter_of(namespace_of(None, self.extra_key))
        return right_tokens(self.prompt, self.images, self.new, eos=EOS, adapter=adapter)


class Clients:
    def __init__(
        self,
        *,
        network: Network,
        process: Process,
        routers: Sequence[str],
        workers: Sequence[str],
        options: Options,
        why_gone: Callable[[str, str, float], str],
    ) -> None:
        """`routers`, `workers`: addresses. `why_gone`: as of `Returns`."""
        self._network = network
        self._process = process
        self._routers = routers
        self._workers = workers
        self._options = options
        self._returns = Returns(options, network.world.rng("clients/returns"), why_gone)
        self._draw: random.Random = network.world.rng("clients")
        self._kinds: random.Random = network.world.rng("clients/kinds")
        self._images: random.Random = network.world.rng("clients/images")
        self._tenants: random.Random = network.world.rng("clients/tenants")
        self._whole: random.Random = network.world.rng("clients/whole")
        self._num = 0
        self.live: dict[int, Asked] = {}
        self.outcomes: Counter[str] = Counter()
        self.longest_gap_s = 0.0
        self.recent: deque[tuple[list[int], PlacedImages]] = deque(maxlen=8)  # answered conversations, to go on with

    def ask(self, *, big: bool = False, must_succeed: bool = False, capacity: int = 0) -> Asked:
        """A new request now. `capacity`: KV tokens of the smaller worker, which no request may exceed."""
        draw = self._draw
        self._num += 1
        limit = max(4, capacity // 2 - 2)
        length = min(draw.randint(20, 60) if big else draw.choice([1, 3, 9, 9, 17, 33]) + draw.randint(0, 3), limit)
        new = min(draw.randint(10, 40) if big else draw.choice([1, 4, 20, 24]) + draw.randint(0, 2), limit)
        prompt, images = self._prompt(length)
        asked = Asked(
            number=self._num,
            prompt=prompt,
            images=images,
            new=new,
            num_samples=draw.choice([1, 1, 1, 1, 2, 3]),
            stream=False,
            must_succeed=must_succeed,
        )
        if (
            must_succeed
            and self._options.prealloc_timeout_s < SHORT_WAIT_S
            and asked.num_samples * (length + new) > capacity
        ):
            asked.num_samples = 1  # together they would have to wait for memory for longer than they may
        asked.stream = asked.num_samples == 1 and draw.random() < 0.6
        self._draw_kind(asked)
        if self._options.image_room:
            self._show_images(asked)
        if self._options.whole and self._whole.random() < self._options.whole:
            asked.whole_at = self._whole.choice(self._workers)
        if must_succeed and asked.stream and not asked.whole_at:
            asked.breaks_after = self._returns.breaks_after()
        self.live[asked.number] = asked
        self._send(asked)
        return asked

    def _draw_kind(self, asked: Asked) -> None:
        kinds, options = self._kinds, self._options
        if options.deadlines and not asked.must_succeed and kinds.random() < 0.4:
            asked.timeout_s = kinds.choice(TIMEOUTS_S)
        if options.priorities:
            asked.priority = kinds.choice([0, 0, 1, 5])
        if options.num_tenants and (tenant := self._tenants.randint(0, options.num_tenants)):
            asked.extra_key = f"tenant-{tenant}"
        if options.embeddings and kinds.random() < 0.2:
            asked.embed, asked.stream = True, False

    def _show_images(self, asked: Asked) -> None:
        """Of the conversation that it goes on with, or new ones in place of some of its text."""
        if asked.embed:
            asked.images = ()
        elif not asked.images:
            images = choose_images(self._images, len(asked.prompt), self._options)
            asked.prompt = with_placeholders(asked.prompt, images)
            asked.images = () if self._images.random() < BLIND_SHARE else images

    def _prompt(self, length: int) -> tuple[list[int], PlacedImages]:
        """Of a family, so that prefixes are shared; or the next turn of an earlier conversation, with its images."""
        if self.recent and self._draw.random() < 0.25:
            tokens, images = self._draw.choice(list(self.recent))
            turn = [*tokens, self._draw.randrange(VOCAB_OF_PROMPTS)][:length]
            return turn, whole_ones(images, len(turn))
        family = self._draw.randrange(FAMILIES)
        tail = self._draw.randrange(VOCAB_OF_PROMPTS)
        return [(family * 7 + k) % VOCAB_OF_PROMPTS for k in range(max(0, length - 1))] + [tail], ()

    def _send(self, asked: Asked) -> None:
        asked.tries += 1
        asked.num_returns = asked.num_kept = 0
        asked.body.clear()
        self._connect(asked, again=False)

    def _connect(self, asked: Asked, *, again: bool) -> None:
        """`again`: behind what it has."""
        request = self._request(asked, again=again)
        asked.status, asked.finished, asked.said_error, asked.said_busy = 0, False, False, False
        asked.got.clear()
        asked.is_return, asked.was_cut, asked.got_more = again, False, False
        asked.call = Call(
            on_head=lambda head: self._on_head(asked, head),
            on_chunk=lambda data: self._on_chunk(asked, data),
            on_end=lambda: self._on_end(asked),
            on_lost=lambda reason: self._on_lost(asked),
        )
        asked.address, asked.sent_s = asked.whole_at or self._a_router(), self._network.world.now_s
        call(self._network, self._process, asked.address, request, asked.call)

    def _a_router(self) -> str:
        return self._routers[0] if len(self._routers) == 1 else self._returns.draw.choice(self._routers)

    def _request(self, asked: Asked, *, again: bool) -> Request:
        request = _request(asked, files=self._options.num_encode > 0)
        if self._options.resume_window_s and asked.stream and not asked.whole_at:
            request.headers.update(headers_of(f"c{asked.number}-{asked.tries}", bytes(asked.body), again=again))
        return request

    def leave(self, number: int) -> None:
        """The client goes away in the middle."""
        asked = self.live[number]
        assert asked.call is not None
        asked.call.cancel()
        self._check_so_far(asked)
        self._close(asked, "left")

    def pick(self) -> int | None:
        """A live request."""
        return self._draw.choice(list(self.live)) if self.live else None

    # ---- streams that break

    def pick_begun(self) -> int | None:
        """A live stream of which something has come."""
        begun = [n for n, asked in self.live.items() if asked.stream and asked.status == 200 and asked.got_more]
        return self._returns.draw.choice(begun) if begun else None

    def lose_connection(self, number: int) -> None:
        asked = self.live[number]
        asked.was_cut, call = True, asked.call
        assert call is not None and call.end is not None and call.end.pipe is not None
        call.end.pipe.cut()

    def _on_chunk(self, asked: Asked, data: bytes) -> None:
        now_s = self._network.world.now_s
        if asked.got_more:
            self.longest_gap_s = max(self.longest_gap_s, now_s - asked.got_s)
        asked.body.extend(data)
        asked.got_more, asked.got_s = asked.status == 200, now_s
        if asked.breaks_after and len(events_of(bytes(asked.body))) >= asked.breaks_after:
            asked.breaks_after = 0
            self.lose_connection(asked.number)

    def _comes_again(self, asked: Asked, *, after_s: float | None = None) -> bool:
        """Have a client whose stream broke come again, if it does that."""
        now_s = self._network.world.now_s
        if asked.whole_at:
            return False
        if asked.got_more:
            asked.broken_s = now_s
        if not self._returns.may(bytes(asked.body), count=asked.num_returns, waited_s=now_s - asked.broken_s):
            return False
        asked.num_returns += 1
        pause_s = self._returns.pause_s() if after_s is None else after_s
        self._process.after(pause_s, f"client {asked.number} comes again", self._return, asked)
        return True

    def _return(self, asked: Asked) -> None:
        if asked.number not in self.live:
            return
        self._network.world.seen["clients that came again"] += 1
        asked.body[:] = self._returns.kept_by_client(bytes(asked.body))
        asked.num_kept = sum(
            len(msgspec.json.decode(event.data).get("tokens", ())) for event in events_of(bytes(asked.body))
        )
        if asked.must_succeed and asked.num_returns == 1:
            asked.breaks_after = len(events_of(bytes(asked.body))) + 1  # where two workers have written
        self._connect(asked, again=True)
        if self._returns.asks_twice():
            self._ask_twice(asked)

    def _ask_twice(self, asked: Asked) -> None:
        """The same, from where it is now; nothing becomes of what it gets, and it must be right."""
        twin = replace(asked, body=bytearray(asked.body), got=[], address=self._a_router(), status=0)
        twin.call = Call(
            on_head=lambda head: self._on_head(twin, head),
            on_chunk=twin.body.extend,
            on_end=lambda: self._judge_twin(twin),
            on_lost=lambda reason: self._judge_twin(twin),
        )
        call(self._network, self._process, twin.address, self._request(twin, again=True), twin.call)

    def _judge_twin(self, twin: Asked) -> None:
        self._check_so_far(twin)
        if twin.status == 200:
            self._network.world.seen["answers to a second return"] += 1
        elif twin.status == GONE:
            self._judge_gone(twin)

    def _judge_gone(self, asked: Asked) -> None:
        tag, _, _ = last_id(bytes(asked.body)).partition("-")
        why = self._returns.why_gone(tag, asked.address, asked.sent_s)
        if not why:
            raise Violation(f"client {asked.number} comes again, and its stream is gone: {bytes(asked.body)[-300:]!r}")
        self._network.world.seen[f"streams gone: {why}"] += 1

    # ---- answers

    def _on_head(self, asked: Asked, head: Head) -> None:
        asked.status, asked.retry_after = head.status, head.retry_after

    def _on_end(self, asked: Asked) -> None:
        if asked.status >= 400:
            self._on_refused(asked)
        elif asked.stream:
            self._check_so_far(asked)
            self._end_stream(asked)
        else:
            self._end_whole(asked)

    def _on_refused(self, asked: Asked) -> None:
        why = f"HTTP {asked.status} {bytes(asked.body)[-200:]!r}"
        if asked.is_return and asked.status == GONE:
            self._judge_gone(asked)
            self._begin_anew(asked, why)
        elif asked.is_return and asked.retry_after and self._comes_again(asked, after_s=float(asked.retry_after)):
            self._network.world.seen["returns that were too early"] += 1
        else:
            self._fail(asked, why)

    def _begin_anew(self, asked: Asked, why: str) -> None:
        if asked.tries < MOST_TRIES:
            self._send(asked)
        else:
            self._fail(asked, why)

    def _on_lost(self, asked: Asked) -> None:
        self._check_so_far(asked)
        if (asked.must_succeed and not asked.was_cut) or not self._comes_again(asked):
            self._fail(asked, "the connection was lost", may_retry=not asked.got)

    def _check_so_far(self, asked: Asked) -> None:
        """What a stream has brought until now: a beginning of the right answer."""
        if not asked.stream or asked.status != 200:
            return
        asked.got.clear()
        for event in events_of(bytes(asked.body)):
            self._take_event(asked, msgspec.json.decode(event.data))
        want = asked.right_answer()
        if asked.got != want[: len(asked.got)]:
            raise Violation(f"client {asked.number}: tokens {asked.got}, must begin {want}")

    def _take_event(self, asked: Asked, event: dict[str, Any]) -> None:
        if "error" in event:
            asked.said_error, asked.said_busy = True, event["error"]["code"] in BUSY and self._waited(asked)
            return
        asked.got += event["tokens"]
        finish = event["finish"]
        if finish is not None:
            asked.finished = finish["kind"] != "abort"
            asked.said_error |= finish["kind"] == "abort"

    def _waited(self, asked: Asked) -> bool:
        """Whether the stream ended before its first token; of a client that came again, before the first new one.

        The second may be for want of memory alone: a new worker needs as much for the rest as for a new request.
        """
        short = self._options.prealloc_timeout_s < SHORT_WAIT_S
        return len(asked.got) == asked.num_kept if short else not asked.got

    def _end_stream(self, asked: Asked) -> None:
        if asked.finished and not asked.said_error:
            self._succeed(asked, [asked.got])
        elif asked.said_error:
            if asked.must_succeed or not self._comes_again(asked):
                self._fail(asked, "an error in the stream", may_retry=False)
        else:
            raise Violation(f"client {asked.number}: the stream ended well, but neither finished nor failed")

    def _end_whole(self, asked: Asked) -> None:
        answer = msgspec.json.decode(bytes(asked.body))
        if asked.embed:
            self._judge_vectors(asked, answer["vectors"])
            return
        samples = answer["samples"]
        if any(sample["finish"]["kind"] == "abort" for sample in samples):
            self._fail(asked, f"aborted: {[sample['finish']['message'] for sample in samples]}")
        else:
            self._succeed(asked, [sample["tokens"] for sample in samples])

    def _succeed(self, asked: Asked, answers: list[list[int]]) -> None:
        want = asked.right_answer()
        if answers != [want] * asked.num_samples:
            raise Violation(f"client {asked.number}: answers {answers}, must be {want} x {asked.num_samples}")
        self.recent.append(([*asked.prompt, *want], asked.images))
        self._network.world.seen["whole requests answered"] += bool(asked.whole_at)
        self._close(asked, "ok")

    def _judge_vectors(self, asked: Asked, vectors: list[list[float]]) -> None:
        rows = [hidden_of(prefix_hash(asked.prompt[: k + 1])) for k in range(len(asked.prompt))]
        total = [sum(column) for column in zip(*rows, strict=True)]
        want = [x / math.hypot(*total) for x in total]
        right = [np.allclose(vector, want, rtol=1e-5, atol=1e-6) for vector in vectors]
        if right != [True] * asked.num_samples:
            raise Violation(f"client {asked.number}: vectors {vectors}, must be {want} x {asked.num_samples}")
        self._close(asked, "ok")

    def _fail(self, asked: Asked, why: str, *, may_retry: bool = True) -> None:
        if asked.status in BUSY and not asked.retry_after:
            raise Violation(f"client {asked.number}: {why}, and no word when to come again")
        if asked.must_succeed and (asked.status in BUSY or asked.said_busy) and asked.tries < MOST_TRIES:
            again_s = AGAIN_S if asked.said_busy else float(asked.retry_after)
            self._process.after(again_s, f"client {asked.number} comes again", self._retry, asked)
            return
        if asked.must_succeed:
            raise Violation(f"client {asked.number}: a request of a healthy cluster failed: {why}")
        if may_retry and asked.tries < 3 and asked.status not in (400, 409) and self._draw.random() < 0.5:
            self._process.after(self._draw.uniform(0, 0.3), f"client {asked.number} again", self._retry, asked)
            return
        if self._options.resume_window_s and events_of(bytes(asked.body)):
            self._network.world.seen["streams that did not go on"] += 1
        self._close(asked, "error")

    def _retry(self, asked: Asked) -> None:
        if asked.number in self.live:
            self._send(asked)

    def _close(self, asked: Asked, outcome: str) -> None:
        assert asked.outcome == "", f"client {asked.number} ends twice"
        asked.outcome = outcome
        self.outcomes[outcome] += 1
        self._network.world.note(f"client {asked.number} {outcome} {asked.status}")
        del self.live[asked.number]


def _request(asked: Asked, *, files: bool) -> Request:
    """`files`: images come as such, too: a router sees which are the same."""
    headers = {} if asked.timeout_s is None else {TIMEOUT_HEADER: f"{asked.timeout_s:g}"}
    if asked.embed:
        body: dict[str, Any] = {"input": [asked.prompt] * asked.num_samples}
        return Request("POST", "/v1/embeddings", msgspec.json.encode(body), headers)
    body = {
        "input_ids": asked.prompt,
        "sampling_params": {"max_new_tokens": asked.new, "n": asked.num_samples, "temperature": 0},
        "stream": asked.stream,
        "priority": asked.priority,
        **({"extra_key": asked.extra_key} if asked.extra_key else {}),
        **({"images": [(placed.start, placed.number) for placed in asked.images]} if asked.images else {}),
        **(
            {"image_data": [f"data:image/png,{placed.number}" for placed in asked.images]}
            if files and asked.images
            else {}
        ),
    }
    return Request("POST", "/generate", msgspec.json.encode(body), headers)
