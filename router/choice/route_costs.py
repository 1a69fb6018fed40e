"""SLO cost of each route of a request (--mixed). Pure.

    cost(route) = (TTFT / wanted TTFT)^4 + (ITL / wanted ITL)^4, predicted with the request
    TTFT          wait for room + time of queued tokens and of the prompt
    ITL           with one more request; at a unified worker plus the stall of answers by this
                  prompt, over the length of an answer

Prefill workers stall no answers, unified ones need no hand-over: long prompts go to pairs until
load outweighs that. By the power the tightest SLO decides. Ideas: mixed pools, Splitwise (ISCA'24);
predicted times, Mooncake (FAST'25); no kind always wins, TaiChi (arXiv 2508.01989).
"""

from typing import NamedTuple

POWER = 4


class FittedLine(NamedTuple):
    base_s: float
    slope_s: float

    def at(self, x: float) -> float:
        return self.base_s + self.slope_s * x


class Objectives(NamedTuple):
    """The clients' SLOs in seconds."""

    ttft_s: float
    itl_s: float


class WorkerMetrics(NamedTuple):
    """Load and fitted times of a worker; 0 if unknown.

    `ttft` is by tokens, `step` (ITL) by requests. `company`: probability that answers run when a
    prompt arrives.
    """

    ttft: FittedLine
    step: FittedLine
    waiting_tokens: int = 0
    requests: int = 0
    held_tokens: float = 0.0
    capacity_tokens: int = 0
    most_requests: int = 0
    company: float = 1.0


class Ask(NamedTuple):
    """A request at one worker: uncached tokens, KV at its end, expected answer."""

    new_tokens: int
    kv_tokens: int
    answer_tokens: float


def pair_slo_cost(
    prefill: WorkerMetrics, compute: Ask, decode: WorkerMetrics, answer: Ask, wanted: Objectives
) -> float:
    ttft_s = prefill.ttft.at(prefill.waiting_tokens + compute.new_tokens) + wait_for_room_s(decode, answer)
    return _slo_cost(ttft_s, decode.step.at(decode.requests + 1), wanted)


def unified_slo_cost(worker: WorkerMetrics, ask: Ask, wanted: Objectives) -> float:
    ttft_s = worker.ttft.at(worker.waiting_tokens + ask.new_tokens) + wait_for_room_s(worker, ask)
    held_up_s = worker.company * worker.ttft.slope_s * ask.new_tokens / max(1.0, ask.answer_tokens)
    return _slo_cost(ttft_s, worker.step.at(worker.requests + 1) + held_up_s, wanted)


def wait_for_room_s(worker: WorkerMetrics, ask: Ask) -> float:
    """Return the time until there is memory and a batch slot.

    A share of either frees up in that share of a request's stay.
    """
    over = 0.0
    if worker.capacity_tokens:
        over = (worker.held_tokens + ask.kv_tokens) / worker.capacity_tokens - 1
    if worker.most_requests:
        over = max(over, (worker.requests + 1) / worker.most_requests - 1)
    return max(0.0, over) * ask.answer_tokens * worker.step.at(worker.requests)


def _slo_cost(ttft_s: float, itl_s: float, wanted: Objectives) -> float:
    return (ttft_s / wanted.ttft_s) ** POWER + (itl_s / wanted.itl_s) ** POWER
