"""`tandem up` for real: NIXL, the shipped model, a right answer through two processes, and a clean end."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from service.process.child_process import HTTP_SERVER_VARIABLE, SERVER_VARIABLE
from service.security.keys import bearer
from tests.e2e.cluster import Cluster, cluster, wait_until
from tools.family import lives
from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.mooncake import import_mooncake

KEY = "sesame"


def end(up: Cluster) -> str:
    """What it has printed when Ctrl-C, which a terminal sends to the whole group, has ended it."""
    os.killpg(up.launcher.pid, signal.SIGINT)
    assert up.launcher.wait(60) == 0
    return up.log.read_text()


def says(up: Cluster, text: str) -> bool:
    return text in up.log.read_text()


def healthy_workers(http: httpx.Client) -> int:
    return sum(worker["is_healthy"] for worker in http.get("/workers").json()["workers"])


def test_a_cluster_answers_right_reports_itself_and_ends_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (SERVER_VARIABLE, HTTP_SERVER_VARIABLE):  # with fork servers of its own
        monkeypatch.delenv(variable, raising=False)
    flags = ("--max-total-tokens=4096", "--page-size=4", f"--api-key={KEY}", f"--run-dir={tmp_path}")
    with cluster(tmp_path, *flags) as up, httpx.Client(base_url=up.router, headers=bearer(KEY), timeout=60) as http:
        known = http.get("/workers").json()["workers"]  # in the moment it says ready: the router sends to every worker
        assert [worker["is_healthy"] for worker in known] == [True, True]
        family = psutil.Process(up.launcher.pid).children(recursive=True)
        assert [worker.role for worker in up.workers] == ["prefill", "decode"]
        assert {worker.pid for worker in up.workers} <= {process.pid for process in family}

        messages = [{"role": "user", "content": "k17 v42 k03 v91 k17"}]
        body = {"model": "recall", "messages": messages, "max_tokens": 1, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"].strip() == "v42"
        assert http.post("/v1/chat/completions", json=body, headers=bearer("wrong")).status_code == 401

        load = ["bench", "--url", up.router, "--api-key", KEY, "--num-requests", "8", "--output-len", "8"]
        bench = subprocess.run([sys.executable, "-m", "deploy", *load], capture_output=True, text=True, timeout=60)
        assert bench.returncode == 0 and "8 of 8" in bench.stdout, bench.stdout + bench.stderr

        for role in ("decode", "prefill"):  # what dies starts again at its port, and the router takes it back
            os.kill(up.of(role)[0].pid, signal.SIGKILL)
            wait_until(partial(says, up, f"{role}-0 is healthy again"), within_s=60, what=f"{role} is healthy again")
            wait_until(lambda: healthy_workers(http) == 2, within_s=60, what=f"the router has {role} back")
            answer = http.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"].strip() == "v42", answer
        ready = json.loads((tmp_path / "ready.json").read_text())
        again = {int(pid) for pid in re.findall(r"is healthy again .*\(pid (\d+)\)", up.log.read_text())}
        assert ready["router"] == up.router and {worker["pid"] for worker in ready["workers"]} == again
        family += psutil.Process(up.launcher.pid).children(recursive=True)

        said = end(up)
        assert not any(map(lives, family))
    assert said.count("it starts again in 1 s") == 2 and said.count("is healthy again after") == 2
    assert "KV 4,096 tokens" in said and "curl -s " in said and "nixl" in said
    for name in ("prefill-0", "decode-0", "router"):
        text = (tmp_path / f"{name}.log").read_text()
        assert "Traceback" not in text, f"{name}: {text[max(0, text.index('Traceback') - 500) :]}"


@pytest.mark.slow
def test_a_cluster_without_a_compiler_says_so_and_what_mends_it(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {"PATH": str(empty), "TANDEM_KERNEL_CACHE": str(empty), "CC": ""}
    with cluster(tmp_path, "--unified", "--max-total-tokens=4096", f"--run-dir={tmp_path}", env=env) as up:
        said = end(up)
    lines = [line for line in said.splitlines() if line.startswith("  ! No C kernels")]
    assert len(lines) == 1, said
    assert "no C compiler" in lines[0] and "apt-get install gcc libc6-dev, or: pip install" in lines[0]


def test_a_transfer_engine_that_cannot_be_loaded_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", cannot)
    with pytest.raises(BackendUnavailable, match=r"apt-get install libibverbs1 libnuma1 libcurl4.*libibverbs\.so\.1"):
        import_mooncake()
