"""Recorder of stage times (engine/core/times.py) for last outputs."""

from collections.abc import KeysView, Sequence

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.times import MAX_CHUNKS, stages, time_line
from engine.loop.listener import LoopListener
from engine.messages import TokenOutput


class OpenRequests(LoopListener):
    """Requests without a sent last output.

    Must be the last listener: others look up ending requests.
    """

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


class Timekeeper(LoopListener):
    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests

    def on_added(self, request: Request, now_s: float) -> None:
        request.times.arrived_s = now_s

    def on_launch(self, plan: Plan, now_s: float) -> None:
        """Record first times; a retracted request keeps them."""
        if not plan.extend:
            return
        for item in plan.items:
            request = self._requests.get(item.rid) if item.extend else None
            if request is None or request.times.first_token_s is not None:
                continue
            if request.times.started_s is None:
                request.times.started_s = now_s
            if len(request.times.chunks) < MAX_CHUNKS:
                request.times.chunks.append((now_s, item.q_len))

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        for request in effects.progressed:
            if len(request.times.chunk_ends_s) < len(request.times.chunks):
                request.times.chunk_ends_s.append(now_s)

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            request = self._requests.get(output.rid)
            if request is None:
                continue
            if output.new_ids and request.times.first_token_s is None:
                request.times.first_token_s = now_s
            if output.finish is not None:
                output.times = time_line(request.times, ended_s=now_s, completion_tokens=output.completion_tokens)
                output.stages = stages(request.times, ended_s=now_s)
