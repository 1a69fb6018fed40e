"""`tandem up` for real: NIXL, the shipped model, a right answer through two processes, and a clean end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

KEY = "sesame"


class Up:
    def __init__(self, tmp_path: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
        ready_file = tmp_path / "ready.json"
        argv = [sys.executable, "-m", "deploy", "up", "--port", "0", "--ready-file", str(ready_file), *args]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 120
        while not ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"never ready: {self.process.communicate()[0]}")
            time.sleep(0.02)
        self.ready = json.loads(ready_file.read_text())
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()

    def call(self, path: str, body: dict[str, Any] | None = None, *, key: str = KEY) -> dict[str, Any]:
        """GET, or POST where there is a `body`."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.ready["router"] + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.loads(reply.read()))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    cluster = Up(tmp_path, "--max-total-tokens=4096", "--page-size=4", f"--api-key={KEY}", f"--run-dir={tmp_path}")
    yield cluster
    cluster.end()
    assert cluster.process.stdout is not None
    cluster.process.stdout.close()


def test_a_cluster_answers_right_reports_itself_and_ends_on_ctrl_c(up: Up, tmp_path: Path) -> None:
    known = up.call("/workers")["workers"]  # in the moment it says ready: the router sends to every worker
    assert [worker["is_healthy"] for worker in known] == [True, True]
    assert [worker["role"] for worker in up.ready["workers"]] == ["prefill", "decode"]
    assert {worker["pid"] for worker in up.ready["workers"]} <= {process.pid for process in up.family}

    messages = [{"role": "user", "content": "k17 v42 k03 v91 k17"}]
    body = {"model": "recall", "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = up.call("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"].strip() == "v42"
    with pytest.raises(urllib.error.HTTPError) as refused:
        up.call("/v1/chat/completions", body, key="wrong")
    refused.value.close()
    assert refused.value.code == 401

    load = ["bench", "--url", up.ready["router"], "--api-key", KEY, "--num-requests", "8", "--output-len", "8"]
    bench = subprocess.run([sys.executable, "-m", "deploy", *load], capture_output=True, text=True, timeout=60)
    assert bench.returncode == 0 and "8 of 8" in bench.stdout, bench.stdout + bench.stderr

    up.process.send_signal(signal.SIGINT)
    said, _ = up.process.communicate(timeout=60)
    assert up.process.returncode == 0
    assert [process for process in up.family if process.is_running()] == []
    assert "KV 4,096 tokens" in said and "curl -s " in said and "nixl" in said
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("prefill-0", "decode-0", "router")}
    for name, text in logs.items():
        assert "Traceback" not in text, f"{name}: {text[max(0, text.index('Traceback') - 500) :]}"


def test_a_cluster_without_a_compiler_says_so_and_what_mends_it(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    env = {**os.environ, "PATH": str(empty), "TANDEM_KERNEL_CACHE": str(empty)}
    env.pop("CC", None)
    up = Up(tmp_path, "--unified", "--max-total-tokens=4096", f"--run-dir={tmp_path}", env=env)
    try:
        up.process.send_signal(signal.SIGINT)
        said, _ = up.process.communicate(timeout=20)
    finally:
        up.end()
    lines = [line for line in said.splitlines() if line.startswith("  ! No C kernels")]
    assert len(lines) == 1, said
    assert "no C compiler" in lines[0] and lines[0].endswith("apt-get install gcc libc6-dev")


def test_a_cluster_whose_transfer_engine_cannot_be_loaded_says_what_to_install(tmp_path: Path) -> None:
    package = tmp_path / "path/mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text('raise ImportError("libibverbs.so.1: cannot open shared object file")')
    argv = [sys.executable, "-m", "deploy", "up", "--port=0", "--transfer-backend=mooncake", f"--run-dir={tmp_path}"]
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "libibverbs.so.1" in done.stderr and "apt-get install libibverbs1 libnuma1 libcurl4" in done.stderr
