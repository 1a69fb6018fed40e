"""What UCX and NIXL are told where the pages are a GPU's, and what an engine for host memory leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transfer.engines.cuda_driver import build_driver
from tests.transfer.rig import ROOT
from transfer_backends.engines.nixl import GPU_SETTINGS

CODE = """
import json, os, sys
from transfer_backends.engines import nixl

def agent(*args):
    print(json.dumps({name: os.environ.get(name) for name in nixl.GPU_SETTINGS}), file=sys.stderr)
    raise RuntimeError("no GPU here")

api = nixl.import_nixl()
api.nixl_agent = agent
try:
    nixl.NixlEngine(host="127.0.0.1", device=DEVICE)
except nixl.BackendUnavailable:
    pass
"""


def settings(driver: Path, device: int | None, **own: str) -> dict[str, str | None]:
    """Return those in the environment when the agent is made, which is when UCX reads them."""
    env = {name: value for name, value in os.environ.items() if name not in GPU_SETTINGS}
    env |= {"LD_LIBRARY_PATH": str(driver), **own}
    ended = subprocess.run(
        [sys.executable, "-c", CODE.replace("DEVICE", repr(device))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        timeout=60,
        check=True,
    )
    found: dict[str, str | None] = json.loads(ended.stderr)
    return found


@pytest.mark.parametrize(
    ("device", "own", "right"),
    [
        (0, {}, {"UCX_CUDA_IPC_CACHE": "n", "NIXL_UCX_SGL_ENABLE": "1"}),
        (0, {"UCX_CUDA_IPC_CACHE": "y"}, {"UCX_CUDA_IPC_CACHE": "y", "NIXL_UCX_SGL_ENABLE": "1"}),
        (None, {}, {"UCX_CUDA_IPC_CACHE": None, "NIXL_UCX_SGL_ENABLE": None}),
    ],
    ids=["a GPU's pages", "the operator's own", "pages of the host"],
)
def test_settings(tmp_path: Path, device: int | None, own: dict[str, str], right: dict[str, str | None]) -> None:
    build_driver(tmp_path)
    assert settings(tmp_path, device, **own) == right
