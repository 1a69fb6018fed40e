"""What keeping the times of requests costs, in microseconds of CPU a request: `python -m benchmarks.trace_cost`.

Router: a trace of two calls, from its beginning to the ring. Worker: a sample from its beginning to the ring. Scheduler: the
stages of a prompt of four chunks. No sockets, no engine: the difference that the code makes.
"""

import time
from collections.abc import Callable
from typing import Any

from engine.core.times import Times, stages
from engine.frontend.client.tracing import Traces
from engine.messages import Bootstrap, FinishReason, GenerateRequest, TokenOutput
from engine.sampling_params import SamplingParams
from router.attempts.events import Events
from router.history.recorder import Recorder
from router.history.trace import RequestTraces
from service.telemetry.context import TraceContext
from service.telemetry.tracer import Tracer

NUM = 20_000


def measure(act: Callable[[], object]) -> float:
    """Microseconds a call, the best of five rounds."""
    best_s = float("inf")
    for _ in range(5):
        begun_s = time.process_time()
        for _ in range(NUM):
            act()
        best_s = min(best_s, time.process_time() - begun_s)
    return best_s / NUM * 1e6


def router_part() -> Callable[[], object]:
    from tests.router.attempts import Launched, make_request

    traces = RequestTraces(Tracer(ring_size=512), Recorder(time.monotonic))
    launched = Launched(events=Events())
    request = make_request()
    attempt, prefill, decode = launched.pair(request)
    prefill.answer(200)
    decode.answer(200)

    def act() -> None:
        traces.on_routed(request)
        traces.on_sent(request, attempt, 1.0)
        traces.on_ended(request, 200, 2.0)

    return act


def worker_part() -> Callable[[], object]:
    traces = Traces(Tracer(ring_size=512), process="decode", model="m")
    request = GenerateRequest("r", [1, 2], SamplingParams(max_new_tokens=4), bootstrap=Bootstrap("h", 1, 7))
    context = TraceContext("id", "chat")
    last = TokenOutput(rid="r", new_ids=[], finish=FinishReason(kind="stop"))

    def act() -> None:
        sample = traces.begin(request, "r", context)
        sample.first_token()
        sample.end(last)

    return act


def scheduler_part() -> Callable[[], object]:
    def act() -> Any:
        times = Times(arrived_s=1.0, bootstraps=True, queued_s=2.0, started_s=3.0, computed_s=9.0)
        for at_s in (3.0, 4.0, 5.0, 6.0):
            times.chunks.append((at_s, 256))
            times.chunk_ends_s.append(at_s + 1)
        return stages(times, ended_s=10.0)

    return act


def main() -> None:
    for name, part in (("router", router_part()), ("worker", worker_part()), ("scheduler", scheduler_part())):
        print(f"{name}: {measure(part):.1f} us of CPU a request")


if __name__ == "__main__":
    main()
