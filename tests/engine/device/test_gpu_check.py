"""benchmarks/gpu_check.py where there is no GPU: it says so, one part's failure is its own, and its code runs on a CPU."""

import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu.engine import Steps, experts_reached, make_engine
from benchmarks.gpu.page import TABLES
from benchmarks.gpu.profile import REPORT, measured_steps
from benchmarks.gpu.target import TINY_MIXTURE, Target
from benchmarks.gpu.wheels import PRESENT, closure, slim

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


def test_wheels_are_what_a_machine_with_torch_lacks(tmp_path: Path) -> None:
    missing = closure(["fastapi>=0.165", "torch", "aiohttp"]) - closure(PRESENT.split())
    assert {"fastapi", "starlette", "pydantic-core"} <= missing and not {"torch", "yarl"} & missing
    wheel = tmp_path / "nixl_cu13-1.5.1.whl"
    with zipfile.ZipFile(wheel, "w") as full:
        for name in (
            "nixl_cu13/_bindings.so",
            "nixl_ep_cu13/kernels.so",
            "libs/libplugin_UCX.so",
            "libs/libplugin_OBJ.so",
        ):
            full.writestr(name, b"code")
    slim(wheel)
    with zipfile.ZipFile(wheel) as small:
        assert small.namelist() == ["nixl_cu13/_bindings.so", "libs/libplugin_UCX.so"]


def test_a_part_that_fails_leaves_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.PARTS, "broken", gpu_check.Part("benchmarks.gpu.target:TINY", 0, 30))
    found = gpu_check.check(["broken", "limits"], gpu_check.run_here)
    assert found["broken"]["error"].startswith("TypeError: ") and "copy_gb_s" in found["limits"]
    apart = gpu_check.check(["broken"], gpu_check.run_apart)["broken"]  # a process of its own, which knows no such part
    assert "error: argument --one: invalid choice: 'broken'" in apart["error"], "why"
    assert apart["error"].endswith("(its process ended with 2)") and apart["said"]


def test_checks_run_side_by_side_and_measurements_alone() -> None:
    """Two checks wait for each other; nothing runs beside a measurement, and parts keep their order."""
    meet = threading.Barrier(2, timeout=30)

    def apart(name: str, _limits: dict[str, float], _within_s: float) -> dict[str, Any]:
        running.append(name)
        seen[name] = list(running)
        if not gpu_check.PARTS[name].is_timed:
            meet.wait()
        running.remove(name)
        return {}

    running: list[str] = []
    seen: dict[str, list[str]] = {}
    found = gpu_check.check(["limits", "numerics", "identity", "tiles"], apart)
    assert list(found) == ["limits", "numerics", "identity", "tiles"] and next(iter(seen)) == "limits"
    assert seen["limits"] == ["limits"] and seen["tiles"] == ["tiles"]


def test_a_part_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.PARTS, "limits", gpu_check.Part("benchmarks.gpu.rates:limits", 0, 0.02))
    assert gpu_check.check(["limits"], gpu_check.run_apart)["limits"]["error"] == "not done after 0 s"


def test_what_an_ended_part_had_found_stays(tmp_path: Path) -> None:
    output = tmp_path / "part.json"
    target = Target(small=True, limits={}, output=str(output))
    assert gpu_check.kept(output) == {}
    target.keep({"rows": [1, 2]})
    assert gpu_check.kept(output) == {"rows": [1, 2]}
    output.write_text('{"rows": [1,')  # it was ended while it wrote
    assert gpu_check.kept(output) == {}


def test_a_part_that_would_pass_the_deadline_is_left_out_and_named() -> None:
    begun: dict[str, float] = {}

    def run(name: str, _limits: dict[str, float], within_s: float) -> dict[str, Any]:
        begun[name] = within_s
        return {}

    left = {"limits": 100.0, "engine8b": 74.0, "mixture": 46.0, "hybrid": 29.0}
    now = iter(left.values())
    parts = gpu_check.check(list(left), run, left_s=lambda: next(now))
    assert begun == {"limits": gpu_check.PARTS["limits"].budget_s, "mixture": 46.0}, "at most what is left"
    assert parts["engine8b"]["left_out"] == "takes 75 s, 74 s were left"
    said = gpu_check.render({"aims": [], "parts": parts}).splitlines()
    assert said[-1].startswith("Left out for --deadline: engine8b (takes 75 s, ") and "hybrid (" in said[-1]


def test_the_table_has_sixty_lines_at_most() -> None:
    """What failed is in it whatever else there is."""
    parts: dict[str, Any] = {"numerics": {"rows": [{"case": "a", "error": 0.1}]}}
    parts |= {f"part {i}": {"error": "x" * 999} for i in range(9)}
    aims = gpu_check.aims({"serve": {"beside": [{"itl_p99_ms": 31}]}})
    lines = gpu_check.render({"aims": aims, "parts": parts}).splitlines()
    assert [line[-4:] for line in lines[2:3]] == ["no |"] and lines[4].endswith("a 0.1000")
    assert len(lines) == 5 + 9 and max(map(len, lines[5:])) == gpu_check.MOST_CHARS
    assert (
        gpu_check.render({"aims": [], "parts": {"peer": {"missing": "x is not there"}}}).splitlines()[-1]
        == "peer: x is not there"
    )
    many = {f"part {i}": {"error": "x"} for i in range(50)} | {"b": {"left_out": "x"}}
    lines = gpu_check.render({"aims": 20 * [row for row in aims if row["found"]], "parts": many}).splitlines()
    assert len(lines) == 60 and "JSON file" in lines[8] and lines[-1] == "Left out for --deadline: b (x)"


def test_the_commands_of_the_manual_fit_fifteen_minutes() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    calls = re.findall(r"benchmarks.gpu_check --parts (\S+) --deadline (\d+)", text)
    assert len(calls) == 2
    for parts, deadline in calls:
        assert gpu_check.expected_s(parts.split(",")) <= int(deadline), parts
    start_s, between_s = 90, 25
    assert start_s + between_s + sum(int(deadline) for _, deadline in calls) < 900 - 50


def test_rows_of_a_step_have_tokens_and_experts_of_their_own() -> None:
    """Rows alike would take the same experts, and read the same of them."""
    target = Target(small=True, limits={})
    flags = {"attention_backend": "cpu", "max_running_requests": 8, "max_total_tokens": 512}
    parts = make_engine(target, TINY_MIXTURE.fields(context=64), **flags)
    steps = Steps(parts, batch=8, context=20)
    assert float(parts.pool.k(0).std()) > 0.5
    plan = steps.decode()
    assert len({tuple(item.tokens) for item in plan.items}) == 8
    executor = parts.device.executor
    reached = experts_reached(parts, lambda: executor.collect(executor.launch(plan)))
    executor.close()
    assert reached > TINY_MIXTURE.per_token + 1
    prompts = [item.tokens for item in Steps(parts, batch=8, context=20).prefill().items]
    assert len({tuple(prompt) for prompt in prompts}) == 8 and len(set(prompts[0])) == 20


def test_the_planner_reads_the_steps_of_one_engine() -> None:
    """As it reads a report of parts with an engine each."""
    old = json.loads(REPORT.read_text())["parts"]
    prompts = [row for row in old["short_prompts"]["rows"] if row["graphs"]]
    engine = {"decode": old["decode"], "gap": old["gap"], "prefill": {"rows": [*prompts, old["prefill"]]}}
    assert measured_steps({"engine8b": engine, "adapters": old["adapters"]}) == measured_steps(old)
    assert len(measured_steps({"engine8b": engine})) == len(measured_steps(old)) - 1, "without adapters"


SERVERS = ["serve", "pdmux", "kill", "updates", "drafters"]


def test_parts_run_on_a_cpu_at_a_small_size(tmp_path: Path) -> None:
    """Kernels by Triton's interpreter: what the GPU run does, but for the figures."""
    result = run_small([name for name in gpu_check.PARTS if name not in SERVERS], tmp_path / "gpu.json")
    parts = result["parts"]
    assert parts["limits"]["copy_gb_s"] > 0
    assert [(row["batch"], row["depth"]) for row in parts["engine8b"]["gap"]["rows"]] == [(2, 1), (2, 2)]
    assert {row["work"] for row in parts["tiles"]["rows"]} == {"2 x 1 at 40", "1 x 20 at 40"}
    assert len({row["family"] for row in parts["hybrid"]["rows"]}) == 5
    assert parts["ranks"]["tokens"] == {"--tp-size 2": True} and parts["ranks"]["same_bits"]
    assert parts["families"]["rows"] == [{"family": "qwen3", "triton": "same", "torch": "same"}]
    assert all(parts["identity"][way] for way in parts["identity"] if "," in way)
    assert len(parts["numerics"]["rows"]) == 5 and parts["numerics"]["checksum"]
    assert parts["mixture"]["decode"]["rows"][0]["experts"] > TINY_MIXTURE.per_token
    assert len(parts["peer"]["rows"]) == 6
    met = {row["what"]: row["met"] for row in result["aims"]}
    assert met["idle between steps at depth 2, batch 64"] is not None
    assert met["memory of a killed worker that is not given back, MB"] is None, "a part that did not run"
    check_words(result, tmp_path)


@pytest.mark.slow  # eleven workers start, in nine servers
def test_whole_servers_run_on_a_cpu(tmp_path: Path) -> None:
    result = run_small(SERVERS, tmp_path / "gpu.json")
    parts = result["parts"]
    assert parts["kill"]["prefill_lives"] == 1
    assert parts["serve"]["rows"][0]["output_tokens_s"] > 0 and parts["serve"]["rows"][0]["errors"] == {}
    assert set(parts["serve"]["rows"][0]["cores"]) >= {"prefill's scheduler", "decode's scheduler", "router"}
    lanes = [(row["layout"], row["sms"], row["decode_share"]) for row in parts["pdmux"]["rows"]]
    assert lanes == [("mixed chunks", "-", None), ("PD multiplexing", "-", 1.0)], "one thread in one part"
    assert [row["what"] for row in parts["updates"]["rows"]][3:] == ["update 4", "release", "resume", "answer"]
    assert [row["drafter"] for row in parts["drafters"]["rows"]] == ["none", "EAGLE3", "none", "NEXTN"]
    check_words(result, tmp_path)


def check_words(result: dict[str, Any], folder: Path) -> None:
    """The terminal's table is short, and each table has its figures, here and on the page."""
    lines = gpu_check.render(result).splitlines()
    assert len(lines) <= gpu_check.MOST_LINES
    page = (folder / "gpu.md").read_text()
    ran = {name: part for name, part in result["parts"].items() if "error" not in part}
    for one in TABLES:
        if one["part"] in ran:
            assert f"## {one['title']}" in page, one["title"]
            assert one.get("on_page") or any(line.startswith(one["title"]) for line in lines), one["title"]


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
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(output.read_text())
    assert list(result["parts"]) == names
    return result
