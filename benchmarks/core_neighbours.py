"""What two cores of this machine take from each other: a decode's weight reads beside a prefill's matrix products.

usage: python -m benchmarks.core_neighbours [--rounds 8]

No engine, no network: one process reads 256 MiB of bf16 weights by matrix-vector products on one core, as a decode step does,
alone and while another process multiplies bf16 matrices on the other core. The ratio is the part of benchmarks/interference.py
that no software mends. CPU time is counted, not wall time, so a busy third party disturbs it little.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from statistics import median

PREFILL_CORE, DECODE_CORE = 0, 1
ROWS, COLUMNS = 4096, 4096  # 32 MiB a matrix in bf16
NUM_MATRICES = 8
SIDE = 2048
PASSES = 10  # one alone would be over before the neighbour has begun


def neighbours(*, rounds: int) -> dict[str, float]:
    """Seconds of CPU for one pass over the weights, `alone_s` and `beside_s`: the medians; and their `ratio`."""
    context = multiprocessing.get_context("spawn")
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {DECODE_CORE})
    try:
        return _measure(context, rounds)
    finally:
        os.sched_setaffinity(0, everywhere)


def _measure(context: multiprocessing.context.SpawnContext, rounds: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    weights = [torch.randn(ROWS, COLUMNS).to(torch.bfloat16) for _ in range(NUM_MATRICES)]
    vector = torch.randn(COLUMNS).to(torch.bfloat16)

    def read() -> float:
        begin_s = time.thread_time()
        for matrix in weights * PASSES:
            torch.mv(matrix, vector)
        return (time.thread_time() - begin_s) / PASSES

    alone, beside = [], []
    with _multiplying(context) as go:
        read()
        for _ in range(rounds):
            go.clear()
            alone.append(read())
            go.set()
            beside.append(read())
    return {"alone_s": median(alone), "beside_s": median(beside), "ratio": median(beside) / median(alone)}


@contextmanager
def _multiplying(context: multiprocessing.context.SpawnContext) -> Iterator[Event]:
    """A process that multiplies while the event is set."""
    go, ready = context.Event(), context.Event()
    process = context.Process(target=_multiply, args=(go, ready, os.getpid()), daemon=True)
    process.start()
    try:
        assert ready.wait(60.0), "the other process did not start"
        yield go
    finally:
        process.kill()
        process.join()


def _multiply(go: Event, ready: Event, parent: int) -> None:
    """Until process `parent` is gone."""
    import torch

    os.sched_setaffinity(0, {PREFILL_CORE})
    torch.set_num_threads(1)
    one, other = (torch.randn(SIDE, SIDE).to(torch.bfloat16) for _ in range(2))
    torch.mm(one, other)
    ready.set()
    while os.getppid() == parent:
        if go.wait(0.5):
            torch.mm(one, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    found = neighbours(rounds=parser.parse_args().rounds)
    print(
        f"one pass over the weights: {found['alone_s'] * 1e3:.0f} ms alone, {found['beside_s'] * 1e3:.0f} ms beside "
        f"matrix products on the other core: {found['ratio']:.2f} times"
    )


if __name__ == "__main__":
    main()
