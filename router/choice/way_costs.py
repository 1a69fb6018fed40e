"""How much a request strains what clients want on each way that it may go. Pure.

    strain(way) = (TTFT / wanted TTFT)^4 + (time between tokens / wanted one)^4, both as they will be with the request

    TTFT                   wait for room + what waits at the worker that computes the prompt, and the prompt itself, by what was measured
    time between tokens    with one answer more at the worker that answers; at a unified worker also the time for which this prompt
                           holds up the answers there, over the length of an answer

The last is what separates the ways: a prompt holds up no answer at a prefill worker, and the hand-over, which is in the measured TTFT
of a pair, is not needed at a unified worker. So short prompts go to unified workers and long ones to prefill workers, until either side
is so loaded that the other strains less. The high power makes the objective that is nearest to its limit decide.

Ideas: a mixed pool beside prefill and decode workers, Splitwise (ISCA'24); a choice by predicted times, Mooncake (FAST'25); neither kind
of worker wins everywhere, TaiChi (arXiv 2508.01989).
"""

from typing import NamedTuple

POWER = 4


class FittedLine(NamedTuple):
    """`base_s` + `slope_s` * x."""

    base_s: float
    slope_s: float

    def at(self, x: float) -> float:
        return self.base_s + self.slope_s * x


class Objectives(NamedTuple):
    """The clients' objectives in seconds: to the first token, and between tokens."""

    ttft_s: float
    itl_s: float


class WorkerFigures(NamedTuple):
    """The measured times of a worker. `ttft`: by tokens to compute; `step`: time between tokens by requests there.

    `waiting_tokens`: to be computed first. `requests` are there, and hold `held_tokens` of `capacity_tokens` of KV (0: unknown).
    `most_requests`: that run at a time; 0: unknown. `company`: how probable it is that answers are there when a prompt comes.
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
    """A request at one worker. `new_tokens`: of the prompt, not cached there. `kv_tokens`: that it will hold. `answer_tokens`: expected."""

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
    """Return the time until the worker has memory for one request more, and a place in its batch.

    A share of all memory or places becomes free in that share of the time for which requests stay.
    """
    over = 0.0
    if worker.capacity_tokens:
        over = (worker.held_tokens + ask.kv_tokens) / worker.capacity_tokens - 1
    if worker.most_requests:
        over = max(over, (worker.requests + 1) / worker.most_requests - 1)
    return max(0.0, over) * ask.answer_tokens * worker.step.at(worker.requests)


def _strain(ttft_s: float, itl_s: float, wanted: Objectives) -> float:
    return (ttft_s / wanted.ttft_s) ** POWER + (itl_s / wanted.itl_s) ** POWER
