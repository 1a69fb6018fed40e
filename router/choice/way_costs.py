"""SLO cost of each route of a request in a mixed fleet. Pure.

    cost(route) = (TTFT / wanted TTFT)^4 + (ITL / wanted ITL)^4, predicted with the request
    TTFT          wait for room + measured time of queued tokens and of the prompt
    ITL           with one more request; at a unified worker plus the stall that this prompt causes
                  to answers there, over the length of an answer

Prefill workers stall no answers, unified workers need no hand-over: short prompts go to unified
workers, long ones to pairs, until load outweighs that. The high power makes the SLO closest to its
limit decide. Ideas: Splitwise (ISCA'24), mixed pools; Mooncake (FAST'25), predicted times; TaiChi
(arXiv 2508.01989), no kind of worker wins everywhere.
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


class WorkerFigures(NamedTuple):
    """Load and fitted times of a worker.

    `ttft` is by tokens, `step` (ITL) by requests. `waiting_tokens` are queued. `requests` hold
    `held_tokens` of `capacity_tokens` (0: unknown); `most_requests` can run at once (0: unknown).
    `company` is the probability that answers run when a prompt arrives.
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
    """A request at one worker: uncached prompt tokens, KV at its end, expected answer length."""

    new_tokens: int
    kv_tokens: int
    answer_tokens: float


def pair_strain(prefill: WorkerFigures, compute: Ask, decode: WorkerFigures, answer: Ask, wanted: Objectives) -> float:
    ttft_s = prefill.ttft.at(prefill.waiting_tokens + compute.new_tokens) + wait_for_room_s(decode, answer)
    return _strain(ttft_s, decode.step.at(decode.requests + 1), wanted)


def unified_strain(worker: WorkerFigures, ask: Ask, wanted: Objectives) -> float:
    ttft_s = worker.ttft.at(worker.waiting_tokens + ask.new_tokens) + wait_for_room_s(worker, ask)
    held_up_s = worker.company * worker.ttft.slope_s * ask.new_tokens / max(1.0, ask.answer_tokens)
    return _strain(ttft_s, worker.step.at(worker.requests + 1) + held_up_s, wanted)


def wait_for_room_s(worker: WorkerFigures, ask: Ask) -> float:
    """Return the time until the worker has memory and a batch slot for one more request.

    A share of either frees up in that share of the time that requests stay.
    """
    over = 0.0
    if worker.capacity_tokens:
        over = (worker.held_tokens + ask.kv_tokens) / worker.capacity_tokens - 1
    if worker.most_requests:
        over = max(over, (worker.requests + 1) / worker.most_requests - 1)
    return max(0.0, over) * ask.answer_tokens * worker.step.at(worker.requests)


def _strain(ttft_s: float, itl_s: float, wanted: Objectives) -> float:
    return (ttft_s / wanted.ttft_s) ** POWER + (itl_s / wanted.itl_s) ** POWER
