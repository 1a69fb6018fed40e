"""The requests that have arrived and whose last output is not sent yet."""

from collections.abc import KeysView, Sequence

from engine.core.request import Request
from engine.loop.listener import LoopListener
from engine.messages import TokenOutput


class OpenRequests(LoopListener):
    """Must be the last listener: others look up requests whose last output is about to be sent."""

    def __init__(self) -> None:
        self._open: dict[str, Request] = {}

    def get(self, rid: str) -> Request | None:
        return self._open.get(rid)

    def rids(self) -> KeysView[str]:
        return self._open.keys()

    def on_added(self, request: Request, now_s: float) -> None:
        self._open[request.rid] = request

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            if output.finish is not None:
                self._open.pop(output.rid, None)
