"""Test-only: puts a switch around the transfer engine of a prefill worker's scheduler process.

Python imports a module of this name at start when its folder is on PYTHONPATH, which only the fault tests put there; no
production code knows of it. Switches are files in $TANDEM_FAULTS_DIR:

    hold    while it exists, writes of KV are accepted but not begun: they wait as behind a link that does not move
    fail    holds a number: that many of the next writes end as FAILED without having begun
    steps   while it exists, a step lasts: the scheduler's thread waits inside it, without Python's lock, as in a kernel

Handshakes and fences (`probe`, `fence`) go to the engine as they are, so what follows a failure is its real recovery.
"""

import os
import sys


def _install(folder: str) -> None:
    from pathlib import Path

    from transfer_backends.contract import OpState
    from transfer_backends.engines import registry

    hold, fail = Path(folder) / "hold", Path(folder) / "fail"
    make_engine = registry.make_engine

    def to_fail() -> bool:
        try:
            left = int(fail.read_text())
        except (OSError, ValueError):
            return False
        fail.write_text(str(left - 1)) if left > 1 else fail.unlink(missing_ok=True)
        return left > 0

    class Op:
        def __init__(self, peer, pieces):
            self.peer, self.pieces, self.inner = peer, pieces, None

    class Switched:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def post(self, peer, pieces):
            return Op(peer, pieces)

        def poll(self, op):
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
    _install_steps(Path(folder) / "steps")


def _install_steps(hold) -> None:
    import time

    from engine.loop.pipeline import Pipeline

    advance = Pipeline.advance

    def held(self, plan):
        while plan is not None and hold.exists():
            time.sleep(0.01)
        return advance(self, plan)

    Pipeline.advance = held


if "disagg.scheduler_process" in sys.orig_argv and "TANDEM_FAULTS_DIR" in os.environ:
    _install(os.environ["TANDEM_FAULTS_DIR"])
