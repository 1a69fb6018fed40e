"""Start of a follower's process, and description of its end. Never torch."""

import signal
import time

import msgspec

from disagg.children import POLL_S, Children
from disagg.config import RankSpec
from engine.flags.local_defaults import shares_cores
from service.process.child_process import ChildProcess

STATUS_WAIT_S = 0.3  # a process that closed its socket ends at once, unless it hangs


def start_rank(children: Children, spec: RankSpec) -> ChildProcess:
    engine, gpus = spec.scheduler.engine, spec.scheduler.gpus
    joint = () if spec.scheduler.joint is None else (spec.scheduler.joint.memory,)
    store = () if spec.store is None else (spec.store,)
    return children.start(
        f"rank {spec.rank}",
        "disagg.rank_process",
        ["--spec-json", msgspec.json.encode(spec).decode()],
        num_threads=engine.num_threads or 1,
        descriptors=(*spec.descriptors, *spec.wires.values(), *joint, *store),
        shares_cores=engine.num_threads is not None and shares_cores(engine),
        gpu=gpus[spec.rank] if gpus else None,
    )


def how_ended(process: ChildProcess) -> str:
    """Text like "ended: SIGKILL"."""
    deadline_s = time.monotonic() + STATUS_WAIT_S
    while (status := process.poll()) is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if status is None:
        return "closed its socket"
    return f"ended: {signal.Signals(-status).name}" if status < 0 else f"ended: status {status}"
