"""A worker whose ranks are on two machines: network namespaces, or where those cannot be two addresses of this one."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.client import generate_all
from tests.e2e.cluster import end_tree, start_process, wait_ready, wait_until
from tests.e2e.test_ranks import prompt_of
from tools.faults.machines import Machines
from tools.recall.oracle import continuation

FLAGS = ("--model-path", "recall-wide", "--max-total-tokens", "16384", "--log-level", "warning", "--port", "0")
WITHIN_S = 20.0


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield what goes before a command on each, and the flags of node 0's address."""
    with ExitStack() as stack:
        try:
            machines = Machines(["near", "far"])
        except (AssertionError, OSError):  # no rights, or no iproute2
            yield [], [], ["--host", "127.0.0.1"]
            return
        stack.callback(machines.close)
        address = machines.address["near"]
        yield machines.command_on("near"), machines.command_on("far"), ["--host", address, "--allow-insecure"]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("sixteen bytes or more")
    path.chmod(0o600)
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def serve(on: list[str], folder: Path, *flags: str) -> "tuple[subprocess.Popen[bytes], Path, Path]":
    """The process, its ready file and its log."""
    folder.mkdir()
    ready, log = folder / "ready.json", folder / "log"
    command = [*on, sys.executable, "-m", "deploy", "serve", *FLAGS, *flags, "--ready-file", str(ready)]
    return start_process(command, log), ready, log


async def test_two_machines_answer_and_end_together(tmp_path: Path, secret: str) -> None:
    prompts = [prompt_of(size, seed) for seed, size in enumerate((3, 90, 40, 12))]
    with two_machines() as (on_near, on_far, host):
        group = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"{host[1]}:{free_port()}")
        group += ("--cluster-secret-file", secret)
        far, far_ready, far_log = serve(on_far, tmp_path / "far", *group, "--node-rank", "1")
        near, near_ready, near_log = serve(on_near, tmp_path / "near", *group, *host)
        try:
            info = wait_ready(near_ready, near, near_log)
            assert far_ready.exists()
            bodies = [
                {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 16}, "stream": True}
                for ids in prompts
            ]
            answers = await generate_all(info["url"], bodies)
            assert [answer["output_ids"] for answer in answers] == [continuation(ids, 16) for ids in prompts]

            family = [process for end in (near, far) for process in psutil.Process(end.pid).children(recursive=True)]
            (rank,) = psutil.Process(far.pid).children()
            rank.kill()
            wait_until(
                lambda: near.poll() is not None and far.poll() is not None, within_s=WITHIN_S, what="the end of both"
            )
            _, left = psutil.wait_procs(family, timeout=WITHIN_S)
            assert not left, left
            assert (near.returncode, far.returncode) == (1, 1)
            said = [[line for line in log.read_text().splitlines() if "error:" in line] for log in (near_log, far_log)]
            assert [len(lines) for lines in said] == [1, 1], said
            assert said[0][0].startswith("tandem serve: error: rank 1 of 2 (node 1, ")
            assert said[1][0] == f"tandem serve: error: rank 1 of 2 (pid {rank.pid}) ended: SIGKILL; node 0 ends, too"
        finally:
            end_tree(near)
            end_tree(far)
