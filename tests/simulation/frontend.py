"""The HTTP side of a simulated worker: bodies in, `GenerateRequest`s to the scheduler, token outputs back to the client.

Stands in for engine/frontend and the detokenizer (asyncio, tokenizer, text), which hold no state of the protocol: as
they do, it names requests itself, aborts what its client left, and turns a refusal into an HTTP status.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.messages import AbortRequest, Bootstrap, GenerateBatch, GenerateRequest, TokenOutput, ToScheduler
from engine.sampling_params import SamplingParams
from tests.simulation.http import Reply, Request

MAX_NEW_TOKENS = 4096


@dataclass(eq=False)
class Exchange:
    """One HTTP request. `tokens`, `finish`: of each sample."""

    reply: Reply
    stream: bool
    rids: list[str]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, Any] = field(default_factory=dict)
    begun: bool = False


class Frontend:
    def __init__(self, *, name: str, send: Callable[[ToScheduler], None], info: dict[str, Any]) -> None:
        """`send`: to the scheduler. `info`: what /server_info says."""
        self._name = name
        self._send = send
        self._info = info
        self._num_requests = 0
        self._by_rid: dict[str, Exchange] = {}
        self.load: Callable[[], dict[str, int]] = dict

    @property
    def num_open(self) -> int:
        return len(self._by_rid)

    def handle(self, request: Request, reply: Reply) -> None:
        match request.path:
            case "/health":
                reply.whole(200, b"{}")
            case "/server_info":
                reply.whole(200, msgspec.json.encode(self._info))
            case "/v1/loads":
                reply.whole(200, msgspec.json.encode(self.load()))
            case "/generate":
                self._generate(request, reply)
            case _:
                reply.whole(404, b"{}")

    def _generate(self, request: Request, reply: Reply) -> None:
        try:
            body = msgspec.json.decode(request.body)
            requests = self._read(body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reply.whole(400, msgspec.json.encode({"error": f"{type(error).__name__}: {error}"}))
            return
        exchange = Exchange(reply, bool(body.get("stream")), [r.rid for r in requests])
        for rid in exchange.rids:
            self._by_rid[rid] = exchange
            exchange.tokens[rid] = []
        reply.on_gone = lambda: self._on_gone(exchange)
        self._send(GenerateBatch(requests) if len(requests) > 1 else requests[0])

    def _read(self, body: dict[str, Any]) -> list[GenerateRequest]:
        """Samples of one body; a ValueError and its like for what is not one."""
        prompt, sampling = [int(t) for t in body["input_ids"]], body.get("sampling_params", {})
        rooms = body["bootstrap_room"] if isinstance(body["bootstrap_room"], list) else [body["bootstrap_room"]]
        hosts = body["bootstrap_host"] if isinstance(body["bootstrap_host"], list) else [body["bootstrap_host"]]
        ports = body["bootstrap_port"] if isinstance(body["bootstrap_port"], list) else [body["bootstrap_port"]]
        params = SamplingParams(max_new_tokens=min(int(sampling["max_new_tokens"]), MAX_NEW_TOKENS), temperature=0.0)
        if not (len(rooms) == len(hosts) == len(ports) == int(sampling.get("n", 1))):
            raise ValueError("as many rooms as samples")
        return [
            GenerateRequest(
                rid=self._new_rid(),
                input_ids=prompt,
                sampling=params,
                bootstrap=Bootstrap(str(host), int(port), int(room)),
                stream=bool(body.get("stream")),
            )
            for room, host, port in zip(rooms, hosts, ports, strict=True)
        ]

    def _new_rid(self) -> str:
        self._num_requests += 1
        return f"{self._name}-{self._num_requests}"

    def _on_gone(self, exchange: Exchange) -> None:
        """As production: a client that leaves aborts what has not finished."""
        for rid in exchange.rids:
            if self._by_rid.pop(rid, None) is not None and rid not in exchange.finish:
                self._send(AbortRequest(rid))

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            exchange = self._by_rid.get(output.rid)
            if exchange is not None:
                self._on_output(exchange, output)

    def _on_output(self, exchange: Exchange, output: TokenOutput) -> None:
        exchange.tokens[output.rid] += output.new_ids
        if output.finish is not None:
            exchange.finish[output.rid] = msgspec.structs.asdict(output.finish)
            del self._by_rid[output.rid]
        status = output.finish.status if output.finish is not None else 0
        if exchange.stream:
            self._stream(exchange, output, status)
        elif len(exchange.finish) == len(exchange.rids):
            self._answer(exchange)

    def _stream(self, exchange: Exchange, output: TokenOutput, status: int) -> None:
        if not exchange.begun and status:
            exchange.reply.whole(status, msgspec.json.encode({"error": output.finish.message}))  # type: ignore[union-attr]
            return
        if not exchange.begun:
            exchange.begun = True
            exchange.reply.head(200, "text/event-stream")
        event = {"tokens": output.new_ids, "finish": exchange.finish.get(output.rid)}
        exchange.reply.chunk(b"data: " + msgspec.json.encode(event) + b"\n\n")
        if output.finish is not None:
            exchange.reply.finish()

    def _answer(self, exchange: Exchange) -> None:
        finishes = [exchange.finish[rid] for rid in exchange.rids]
        bad = next((f for f in finishes if f["status"]), None)
        if bad is not None:
            exchange.reply.whole(bad["status"], msgspec.json.encode({"error": bad["message"]}))
            return
        body = {"samples": [{"tokens": exchange.tokens[rid], "finish": exchange.finish[rid]} for rid in exchange.rids]}
        exchange.reply.whole(200, msgspec.json.encode(body))
