"""`tandem up` for real: NIXL, the shipped model, a right answer through two processes, and a clean end."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

KEY = "sesame"


class Up:
    def __init__(self, tmp_path: Path, *args: str) -> None:
        ready_file = tmp_path / "ready.json"
        argv = [sys.executable, "-m", "deploy", "up", "--port", "0", "--ready-file", str(ready_file), *args]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 120
        while not ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"never ready: {self.process.stdout and self.process.stdout.read()}")
            time.sleep(0.02)
        self.ready = json.loads(ready_file.read_text())
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()

    def post(self, path: str, body: dict[str, Any], *, key: str = KEY) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.ready["router"] + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.loads(reply.read()))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    cluster = Up(tmp_path, "--max-total-tokens=4096", "--page-size=4", f"--api-key={KEY}", f"--run-dir={tmp_path}")
    yield cluster
    cluster.end()
    assert cluster.process.stdout is not None
    cluster.process.stdout.close()


def test_a_cluster_answers_right_reports_itself_and_ends_within_5_s(up: Up, tmp_path: Path) -> None:
    assert [worker["role"] for worker in up.ready["workers"]] == ["prefill", "decode"]
    assert {worker["pid"] for worker in up.ready["workers"]} <= {process.pid for process in up.family}

    messages = [{"role": "user", "content": "k17 v42 k03 v91 k17"}]
    body = {"model": "recall", "messages": messages, "max_tokens": 1, "temperature": 0}
    answer = up.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"].strip() == "v42"
    with pytest.raises(urllib.error.HTTPError) as refused:
        up.post("/v1/chat/completions", body, key="wrong")
    refused.value.close()
    assert refused.value.code == 401

    load = ["bench", "--url", up.ready["router"], "--api-key", KEY, "--num-requests", "8", "--output-len", "8"]
    bench = subprocess.run([sys.executable, "-m", "deploy", *load], capture_output=True, text=True, timeout=60)
    assert bench.returncode == 0 and "8 of 8" in bench.stdout, bench.stdout + bench.stderr

    before = time.monotonic()
    up.process.send_signal(signal.SIGINT)
    said, _ = up.process.communicate(timeout=20)
    assert time.monotonic() - before < 5.0 and up.process.returncode == 0
    assert [process for process in up.family if process.is_running()] == []
    assert "KV 4,096 tokens" in said and "curl -s " in said and "nixl" in said
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("prefill-0", "decode-0", "router")}
    for name, text in logs.items():
        assert "Traceback" not in text, f"{name}: {text[max(0, text.index('Traceback') - 500) :]}"
