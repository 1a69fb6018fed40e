"""Modules of tests run by Triton's interpreter, in a process of its own: TRITON_INTERPRET=1 must be set before kernels are defined."""

import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterable

from tests.packages import ROOT

TIMEOUT_S = 900  # ends a hang, not a slow machine


def run_interpreted(*modules: str) -> None:
    """Run them one after another, each in a fork of a process that has imported torch and Triton.

    Its test needs pytest.mark.timeout(TIMEOUT_S). Raises AssertionError with what the first one said that failed.
    """
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.attention.triton.interpreted", *modules]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(modules: Iterable[str]) -> int:
    importlib.import_module("tests.triton_interpreter")  # not in the process of the tests
    for module in modules:
        child = os.fork()
        if not child:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            print(f"{module} failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
