"""Batching of output tokens by `stream_interval`, to spare the frontend messages."""

from engine.core.outputs import joined
from engine.loop.listener import LoopListener
from engine.messages import GenerateRequest, TokenOutput

FORCED_INTERVAL = 50  # requests without streaming: spreads their text work (SGLang's number)


class StreamGate(LoopListener):
    """Gate with the engine's `interval`, or a request's own.

    With interval n, tokens 1, n+1, 2n+1... leave with all earlier ones; the first is never late.
    """

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._interval_of: dict[str, int] = {}
        self._held: dict[str, TokenOutput] = {}

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        self._interval_of[message.rid] = self._interval_for(message)

    def pass_on(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        return [passed for output in outputs if (passed := self._judge(output)) is not None]

    def _interval_for(self, request: GenerateRequest) -> int:
        if not request.stream:
            return FORCED_INTERVAL
        return request.stream_interval or self._interval

    def _judge(self, output: TokenOutput) -> TokenOutput | None:
        rid, new = output.rid, len(output.new_ids)
        interval = self._interval_of.get(rid, 1)
        if (held := self._held.pop(rid, None)) is not None:
            output = joined(held, output)
        if output.finish is not None:
            self._interval_of.pop(rid, None)
        elif (output.completion_tokens - 1) // interval == (output.completion_tokens - new - 1) // interval:
            self._held[rid] = output
            return None
        return output
