"""What router and frontends are forked from."""

import json
import os
import subprocess
import sys
from pathlib import Path

from deploy.launcher.fork_servers import HTTP_MODULES

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps([len(os.listdir("/proc/self/task")), *(name in sys.modules for name in ("torch", "opentelemetry.sdk", "zmq"))]))
"""


def test_it_has_one_thread_no_torch_and_nothing_that_reads_the_environment_of_spans() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(HTTP_MODULES)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert json.loads(done.stdout) == [1, False, False, True]
