"""benchmarks/gpu_check.py where there is no GPU: it says so, one part's failure is its own, and its code runs on a CPU."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_without_a_gpu_there_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit) as left:
        gpu_check.main()
    assert left.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_part_that_fails_leaves_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.PARTS, "broken", gpu_check.Part("benchmarks.gpu.target:TINY", 30))
    found = gpu_check.check(["broken", "limits"], gpu_check.run_here)
    assert found["broken"]["error"].startswith("TypeError: ") and "copy_gb_s" in found["limits"]
    apart = gpu_check.check(["broken"], gpu_check.run_apart)["broken"]  # a process of its own, which knows no such part
    assert apart["error"] == "its process ended with 2" and "invalid choice: 'broken'" in apart["trace"]


def test_checks_run_side_by_side_and_measurements_alone() -> None:
    """Two checks wait for each other; nothing runs beside a measurement."""
    meet = threading.Barrier(2, timeout=30)

    def apart(name: str, _limits: dict[str, float]) -> dict[str, Any]:
        running.append(name)
        seen[name] = list(running)
        if not gpu_check.PARTS[name].is_timed:
            meet.wait()
        running.remove(name)
        return {}

    running: list[str] = []
    seen: dict[str, list[str]] = {}
    found = gpu_check.check(["limits", "numerics", "identity", "products"], apart)
    assert list(found) == ["limits", "numerics", "identity", "products"]
    assert seen["limits"] == ["limits"] and seen["products"] == ["products"]


def test_a_part_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.PARTS, "limits", gpu_check.Part("benchmarks.gpu.rates:limits", 0.02))
    assert gpu_check.check(["limits"], gpu_check.run_apart)["limits"]["error"] == "not done after 0 s"


# The interpreter and processes take seconds; other mixtures and transfers are made of the code of those that stay.
SLOW = ["numerics", "identity", "adapters", "ranks", "restart", "families", "cluster"]
SLOW += ["mixture", "short_prompts", "transfer_mooncake"]


@pytest.mark.slow
def test_parts_run_on_a_cpu_at_a_small_size(tmp_path: Path) -> None:
    """Kernels by Triton's interpreter: what the GPU run does, but for the figures."""
    result = run_small([name for name in gpu_check.PARTS if name not in SLOW], tmp_path / "gpu.json")
    parts = result["parts"]
    assert parts["limits"]["copy_gb_s"] > 0
    assert [(row["batch"], row["depth"]) for row in parts["gap"]["rows"]] == [(2, 1), (2, 2)]
    met = {row["what"]: row["met"] for row in result["aims"]}
    assert met["prefill, share of the bf16 rate, 8k"] is not None
    assert met["memory of a dead peer that is not given back, GB"] is None, "a part that did not run"


@pytest.mark.slow
def test_the_other_parts_run_on_a_cpu(tmp_path: Path) -> None:
    parts = run_small(SLOW, tmp_path / "gpu.json")["parts"]
    assert parts["ranks"]["tokens"] == {"--tp-size 2": True} and parts["ranks"]["same_bits"]
    assert parts["families"]["qwen3"] == {"triton": "same", "torch": "same"} and parts["cluster"]["answers"] == 2
    assert parts["restart"]["lost_gb"] == 0 and all(parts["identity"][way] for way in parts["identity"] if "," in way)


def run_small(names: list[str], output: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--small",
        "--output",
        str(output),
        "--parts",
        ",".join(names),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(output.read_text())
    assert list(result["parts"]) == names
    return result


def test_budgets_stay_under_twelve_minutes() -> None:
    assert gpu_check.longest_s(gpu_check.PARTS.values()) < 720
