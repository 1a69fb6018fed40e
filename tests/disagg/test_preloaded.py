"""What a fork server imports for engines: all that they import themselves, and nothing that a fork would break."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from deploy.launcher.fork_servers import ONE_THREAD
from disagg.processes.children import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = tuple(f"disagg/processes/{name}.py" for name in ("scheduler_process", "rank_process", "rank_run"))
CODE = """
import importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import torch
print(json.dumps([len(os.listdir("/proc/self/task")), torch.cuda.is_initialized(), sorted(sys.modules)]))
"""


def imported_inside(file: str) -> set[str]:
    """Modules that functions of the file import."""
    functions = (node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef))
    found = {node.module for part in functions for node in ast.walk(part) if isinstance(node, ast.ImportFrom)}
    return {name for name in found if name is not None}


def test_engines_import_nothing_more_and_no_thread_or_gpu_is_before_the_fork() -> None:
    command = [sys.executable, "-c", CODE, json.dumps(PRELOADED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | ONE_THREAD)
    threads, gpu, modules = json.loads(done.stdout)
    assert (threads, gpu) == (1, False)
    own = set().union(*map(imported_inside, PROCESSES))
    assert len(own) > 8 and own <= set(modules)
    assert not {"opentelemetry"} & set(modules), "it reads the environment, which may differ (child_process.py)"
