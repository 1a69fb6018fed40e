"""How evenly the router's choices load thousands of workers, and how long prompts wait.

usage: python -m benchmarks.scale_balance [--workers N ...] [--policy NAME ...] [--busy SHARE]
                                          [--seconds S] [--seed N]

Virtual time, from one seed. Production code chooses: the router's table, policies and leases. Workers
are a simple model: a prefill worker computes its prompts one after another, and a decode worker holds
a request's KV until its last token. `--busy`: the share of the time for which prefill workers compute.
"least of all" is the ideal: the least loaded of all workers, at any number.
"""

import argparse
import heapq
import json
import random
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from planner.world import Timeline
from router.choice.policies import Placement, Policy, RoutingHints, cost_tokens, load_key, make_chooser
from router.config import POLICIES, RouterConfig
from router.pool.breaker import Check
from router.pool.worker import PAIR, Lease, Pool, Worker
from router.pool.workers import WorkerTable

IDEAL = "least of all"
NAMES = (IDEAL, "least_load", "power_of_two")
SIZES = (1000, 10_000)
TOKENS_PER_S = 8000.0  # of a prefill worker
PROMPT_LOG, PROMPT_SPREAD, MOST_TOKENS = 7.0, 1.0, 32_000  # of a lognormal distribution
MEAN_TOKENS = 1806.0  # of prompts; only the rate follows from it
MEAN_ANSWER = 100.0  # tokens
ITL_S = 0.02
WARM_UP_S, SAMPLE_S = 4.0, 0.1


class LeastOfAll(Policy):
    """The least loaded worker, from a heap that `note_load` keeps; stale entries leave at the top."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(draw=lambda count: 0)
        self._heap = [load_key(worker) for worker in workers]
        self._workers = {worker.worker_id: worker for worker in workers}

    def note_load(self, worker: Worker) -> None:
        heapq.heappush(self._heap, load_key(worker))

    def look(self, pool: Pool, hints: RoutingHints) -> Placement:
        while load_key(worker := self._workers[self._heap[0][3]]) != self._heap[0]:
            heapq.heappop(self._heap)
        return Placement(worker)


class Balance(Timeline):
    """`workers` of both roles together, of which half compute prompts."""

    def __init__(self, name: str, workers: int, *, busy: float, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        draw = random.Random(seed + 1).randrange
        self.table = WorkerTable()
        policy = "least_load" if name == IDEAL else name
        self._policies = dict(make_chooser(RouterConfig(policy=policy), draw=draw).policies)
        for number in range(workers):
            worker = self.table.add(f"http://10.{number >> 8}.{number & 255}.1:30000", role=PAIR[number % 2])
            self.table.on_check(worker, Check.OK, now_s=0.0)
        if name == IDEAL:
            self._policies |= {role: LeastOfAll(self.table.workers(role)) for role in PAIR}
        self._rate = busy * workers / 2 * TOKENS_PER_S / MEAN_TOKENS
        self._free_s = dict.fromkeys(self.table.workers(), 0.0)
        self.waits_s: list[float] = []
        self.loads: dict[str, list[tuple[int, float]]] = {role: [] for role in PAIR}  # (largest, mean), each sample
        self.choice_ns = self.num_choices = 0

    def run(self, seconds: float) -> dict[str, Any]:
        now_s, sample_s = 0.0, WARM_UP_S
        while (now_s := now_s + self._rng.expovariate(self._rate)) < seconds:
            while sample_s < now_s:
                self.run_until(sample_s, done=bool)
                self._sample()
                sample_s += SAMPLE_S
            self.run_until(now_s, done=bool)
            self._serve(now_s)
        waits = sorted(self.waits_s)
        return {
            "requests": self.num_choices // 2,
            "wait_mean_ms": 1e3 * sum(waits) / len(waits),
            "wait_p99_ms": 1e3 * waits[len(waits) * 99 // 100],
            **{f"{role}_spread": _spread(found) for role, found in self.loads.items()},
            "choice_us": self.choice_ns / self.num_choices / 1000,
        }

    def _serve(self, now_s: float) -> None:
        tokens = max(1, min(MOST_TOKENS, int(self._rng.lognormvariate(PROMPT_LOG, PROMPT_SPREAD))))
        output = 1 + int(self._rng.expovariate(1 / MEAN_ANSWER))
        hints = RoutingHints(prompt_tokens=tokens, output_tokens=output)
        prefill, decode = (self._choose(role, hints, now_s) for role in PAIR)
        begun_s = max(now_s, self._free_s[prefill.worker])
        self._free_s[prefill.worker] = done_s = begun_s + tokens / TOKENS_PER_S
        if now_s > WARM_UP_S:
            self.waits_s.append(begun_s - now_s)
        self.at(done_s, lambda: self._release(prefill))
        self.at(done_s + output * ITL_S, lambda: self._release(decode))

    def _choose(self, role: Any, hints: RoutingHints, now_s: float) -> Lease:
        begun_ns = time.thread_time_ns()
        policy, pool = self._policies[role], self.table.ready(self.table.pool(role, ""), now_s=now_s)
        policy.note(choice := policy.look(pool, hints), hints)
        lease = self.table.loads.charge(choice.worker, cost_tokens(choice, hints))
        self.choice_ns += time.thread_time_ns() - begun_ns
        self.num_choices += 1
        self._note_load(choice.worker)
        return lease

    def _release(self, lease: Lease) -> None:
        self.table.loads.release(lease)
        self._note_load(lease.worker)

    def _note_load(self, worker: Worker) -> None:
        policy = self._policies[worker.role]
        if isinstance(policy, LeastOfAll):
            policy.note_load(worker)

    def _sample(self) -> None:
        for role in PAIR:
            loads = [worker.inflight_tokens for worker in self.table.workers(role)]
            self.loads[role].append((max(loads), sum(loads) / len(loads)))


def _spread(found: list[tuple[int, float]]) -> float:
    """The largest load over the mean one."""
    return sum(most for most, _ in found) / max(1.0, sum(mean for _, mean in found))


def measure(name: str, workers: int, *, busy: float, seconds: float, seed: int) -> dict[str, Any]:
    found = Balance(name, workers, busy=busy, seed=seed).run(seconds)
    return {"policy": name, "workers": workers, "busy": busy, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, help="of both roles together; even numbers")
    parser.add_argument("--policy", choices=(*NAMES, *POLICIES), nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--busy", type=float, nargs="+", default=(0.8, 0.95))
    parser.add_argument("--seconds", type=float, default=12.0, help="of virtual time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for workers, busy, name in product(args.workers, args.busy, args.policy):
        row = measure(name, workers, busy=busy, seconds=args.seconds, seed=args.seed)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
