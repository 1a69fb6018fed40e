"""Test-only: puts a switch around the transfer engine of each rank of a prefill worker.

Python imports `sitecustomize` at start, and `switched` puts one on PYTHONPATH that calls `install`; no production code knows
of it. Switches are files in $TANDEM_FAULTS_DIR:

    hold    while it exists, writes of KV are accepted but not begun: they wait as behind a link that does not move
    fail    holds a number: that many of the next writes end as FAILED without having begun
    steps   while it exists, a step lasts: the scheduler's thread waits inside it, without Python's lock, as in a kernel
    prefill-rank-steps, decode-rank-steps
            while it exists, a follower's part of a step does not begin: the leader waits for it in the first sum
    orphans     a follower that starts while it exists does not end with its leader's process
    unreadable, other-weights, never-loads   what happens to a follower that starts while it exists

Handshakes and fences (`probe`, `fence`) go to the engine as they are, so what follows a failure is its real recovery.
"""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = "TANDEM_FAULTS_DIR"
START = "from tools.faults.switches import install\n\ninstall()\n"


def switched(folder: Path) -> dict[str, str]:
    """Return the environment of a worker whose switches are files in `folder`."""
    start = folder / "start"
    start.mkdir(exist_ok=True)
    (start / "sitecustomize.py").write_text(START)
    return {SWITCHES: str(folder), "PYTHONPATH": os.pathsep.join([str(start), str(ROOT)])}


def _install_engine(folder: Path) -> None:
    from transfer_backends.contract import OpState
    from transfer_backends.engines import registry

    hold, fail = folder / "hold", folder / "fail"
    make_engine = registry.make_engine

    def to_fail() -> bool:
        try:
            left = int(fail.read_text())
        except (OSError, ValueError):
            return False
        fail.write_text(str(left - 1)) if left > 1 else fail.unlink(missing_ok=True)
        return left > 0

    class Op:
        def __init__(self, peer: Any, pieces: Any) -> None:
            self.peer, self.pieces, self.inner = peer, pieces, None

    class Switched:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def post(self, peer: Any, pieces: Any) -> Any:
            return Op(peer, pieces)

        def poll(self, op: Any) -> Any:
            if not isinstance(op, Op):
                return self._engine.poll(op)
            if op.inner is None:
                if hold.exists():
                    return OpState.PENDING
                if to_fail():
                    return OpState.FAILED
                try:
                    op.inner = self._engine.post(op.peer, op.pieces)
                except Exception:  # refused: nothing was started
                    return OpState.FAILED
            return self._engine.poll(op.inner)

    registry.make_engine = lambda name, **options: Switched(make_engine(name, **options))


def _install_steps(hold: Path) -> None:
    import time

    from engine.loop.pipeline import Pipeline

    advance = Pipeline.advance

    def held(self: Any, plan: Any) -> Any:
        while plan is not None and hold.exists():
            time.sleep(0.01)
        return advance(self, plan)

    Pipeline.advance = held


def _install_rank(folder: Path) -> None:
    import ctypes
    import time

    from service.process.start import PR_SET_PDEATHSIG

    if (folder / "orphans").exists():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    from engine.kv import kv_pool
    from engine.models import load

    def refuse(*args: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied", "model.safetensors")

    # Before engine.device.step_memory is imported, which takes `load_model` as its default.
    if (folder / "unreadable").exists():
        load.load_model = refuse
    if (folder / "other-weights").exists():
        kv_pool.fingerprint = lambda path, **more: "others"
    if (folder / "never-loads").exists():
        load.load_model = lambda *args, **more: time.sleep(3600)
    from engine.ranks.follower import RankRunner

    run = RankRunner.run
    part = "decode" if '"disaggregation_mode":"decode"' in "".join(sys.orig_argv) else "prefill"

    def held(self: Any, plan: Any) -> None:
        while plan.items and (folder / f"{part}-rank-steps").exists():
            time.sleep(0.01)
        run(self, plan)

    RankRunner.run = held


def install() -> None:
    """Install the switches of this process, a scheduler or a follower."""
    folder = Path(os.environ[SWITCHES])
    if "disagg.processes.scheduler_process" in sys.orig_argv:
        _install_engine(folder)
        _install_steps(folder / "steps")
    elif "disagg.processes.rank_process" in sys.orig_argv:
        _install_engine(folder)
        _install_rank(folder)
