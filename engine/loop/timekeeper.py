"""Notes when requests pass from stage to stage (engine/core/times.py), and writes it into their last output.

It owns the list of live requests: arrived, and their last output not said yet. It is told the time. What only a role sees (bootstrap, landing) the role writes.
"""

from engine.core.plan import Plan
from engine.core.request import Request
from engine.core.times import MAX_CHUNKS, stages, time_line
from engine.messages import TokenOutput


class Timekeeper:
    def __init__(self) -> None:
        self._live: dict[str, Request] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live_rids(self) -> list[str]:
        return list(self._live)

    def arrived(self, request: Request, now_s: float) -> None:
        request.times.arrived_s = now_s
        self._live[request.rid] = request

    def launched(self, plan: Plan, now_s: float) -> None:
        """A retracted request that begins again keeps its first times."""
        if not plan.extend:
            return
        for item in plan.items:
            request = self._live.get(item.rid) if item.extend else None
            if request is None or request.times.first_token_s is not None:
                continue
            if request.times.started_s is None:
                request.times.started_s = now_s
            if len(request.times.chunks) < MAX_CHUNKS:
                request.times.chunks.append((now_s, item.q_len))

    def progressed(self, requests: list[Request], now_s: float) -> None:
        """A chunk of each was collected, and more of its prompt is left."""
        for request in requests:
            if len(request.times.chunk_ends_s) < len(request.times.chunks):
                request.times.chunk_ends_s.append(now_s)

    def told(self, outputs: list[TokenOutput], now_s: float) -> None:
        """Outputs that are about to be said."""
        for output in outputs:
            request = self._live.get(output.rid)
            if request is None:
                continue
            if output.new_ids and request.times.first_token_s is None:
                request.times.first_token_s = now_s
            if output.finish is not None:
                del self._live[output.rid]
                output.times = time_line(request.times, ended_s=now_s, completion_tokens=output.completion_tokens)
                output.stages = stages(request.times, ended_s=now_s)
