"""Sends a request's tokens every `stream_interval` of them, so that the frontend handles fewer messages."""

from engine.core.outputs import joined
from engine.loop.listener import LoopListener
from engine.messages import GenerateRequest, TokenOutput

FORCED_INTERVAL = 50  # of a request that is not streamed: spreads the work with its text (SGLang's number)


class StreamGate(LoopListener):
    """`interval`: the engine's; a request may bring its own.

    With interval n, tokens 1, n+1, 2n+1... are sent at once, with all held ones: the first is never late, as its time is
    measured where it arrives.
    """

    def __init__(self, *, interval: int) -> None:
        self._interval = interval
        self._interval_of: dict[str, int] = {}
        self._held: dict[str, TokenOutput] = {}

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        self._interval_of[message.rid] = self._interval_for(message)

    def pass_on(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Return the outputs to send now. The end of a request is never held."""
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
