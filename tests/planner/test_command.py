"""`tandem plan` as its users call it: a table, JSON, a picture, and one line for what cannot be done."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu.profile import REPORT, compare, profile_of
from deploy.cli import main
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH, load_model_config
from engine.parallel.layout import check_layout
from planner.cluster import ClusterLayout
from planner.config import PlanConfig
from planner.fit import Report, ReportTarget
from planner.hardware import hardware_of, shipped_profile
from planner.step_time import StepLoad
from planner.study import planned_cluster, study_of, try_rate
from service.flags import ConfigError
from tests.models.files.hub_stand_in import hub_stand_in
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.planner.planned import LINK, STEP_TIME, in_process
from tests.planner.test_fit import one_after_another, together

MODEL = ["--model-path", DEFAULT_MODEL_PATH]
LOAD = ["--num-requests", "40", "--input-len", "400", "--output-len", "20", "--disable-progress"]
# Four requests at once, 20 steps of 20 ms each: 10 requests a second and worker at most.
MACHINE = ["--gpu", "L4", "--step-overhead", "0.02", "--max-running-requests", "4"]
LIMITS = ["--slo-ttft", "0.2", "--slo-tpot", "0.06"]


def test_a_plan_from_flags_to_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, output = tmp_path / "goodput.png", tmp_path / "plan.json"
    flags = ["--layouts", "1P1D", "2U", "--jobs", "2", "--total-rate", "5000", "--plot", str(picture)]
    assert main(["plan", *MODEL, *MACHINE, *LOAD, *LIMITS, *flags, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    found = json.loads(output.read_bytes())
    best = max(found["layouts"], key=lambda layout: layout["best"]["rate"])
    assert f"best: {best['layout']}, {best['best']['rate']:.3g} requests a second and GPU" in text
    assert "for 5000 requests a second: " in text and f" x {best['layout']}" in text
    assert {layout["layout"] for layout in found["layouts"]} == {"1P1D", "2U"}
    for layout in found["layouts"]:
        assert layout["best"]["good_share"] >= 0.9
        above = [p for p in layout["points"] if p["rate"] > layout["best"]["rate"]]
        assert above and above[0]["good_share"] < 0.9  # it is the best because more is too much
        assert 2 < layout["best"]["rate"] < 15
    assert "warning" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@in_process
def test_measured_step_times_are_fitted_saved_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for number, records in enumerate((one_after_another(), together())):
        path = tmp_path / f"report{number}.json"
        path.write_bytes(msgspec.json.encode(Report([ReportTarget(records)])))
        reports.append(str(path))
    profile = tmp_path / "profile.json"
    machine = ["--gpu-memory-gb", "8", "--transfer-gb-s", "1", "--layouts", "1U", "--rates", "2", "5"]
    assert main(["plan", *MODEL, *LOAD, *machine, "--fit", *reports, "--save-profile", str(profile)]) == 0
    fitted = capsys.readouterr().out
    saved = json.loads(profile.read_bytes())
    assert saved["step_time"]["prefill_token_s"] == pytest.approx(STEP_TIME.prefill_token_s, rel=0.02)
    assert main(["plan", *MODEL, *LOAD, *machine, "--gpu-profile", str(profile)]) == 0
    again = capsys.readouterr().out
    assert again == fitted and again.count("| 1U ") == 2 and "measured: 20 prefills" in again
    assert main(["plan", *MODEL, *LOAD, *machine, "--gpu-profile", str(profile), "--tp-size", "2"]) == 1
    assert "--tp-size: the step times were measured on 1 GPUs a worker" in capsys.readouterr().err


@in_process
def test_a_measured_hand_over_is_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = one_after_another("1P1D", link=LINK / 4)
    single, both, other = tmp_path / "single.json", tmp_path / "both.json", tmp_path / "other.json"
    single.write_bytes(msgspec.json.encode(Report([ReportTarget(one_after_another())])))
    both.write_bytes(msgspec.json.encode(Report([ReportTarget(one_after_another()), ReportTarget(pair)])))
    other.write_bytes(msgspec.json.encode(Report([ReportTarget(together())])))
    command = ["plan", *MODEL, *LOAD, "--gpu-memory-gb", "8", "--layouts", "1P1D", "--rates", "2"]
    fit = ["--fit", str(single), str(other), "--fit-pair"]
    assert main([*command, *fit, str(both)]) == 0
    assert "; hand-over 8.2 ms and 245.2 us a token" in capsys.readouterr().out
    assert main([*command, *fit, str(single)]) == 1
    assert "it has no second target (--compare)" in capsys.readouterr().err


def big_model(folder: Path) -> str:
    """The shape of Llama 3 70B: 141 GB, 64 heads, 8 KV heads."""
    config = json.loads(Path("docs/planning/config.json").read_text())
    config |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@in_process
def test_a_model_larger_than_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says how many it takes; with them it is planned, in GPUs."""
    command = ["plan", "--model-path", big_model(tmp_path), "--gpu", "H100", "--layouts", "1P1D", "--rates", "0.5"]
    output = tmp_path / "plan.json"
    load = [*LOAD, "--input-len", "30000", "--num-requests", "10", "--output", str(output)]
    assert main([*command, *load]) == 1
    assert "--gpu H100: 80 GB do not hold the model's 141 GB of weights; --tp-size 4 does" in capsys.readouterr().err
    assert main([*command, *load, "--tp-size", "3"]) == 1
    assert "--tp-size 3: does not divide the model's 64 attention heads" in capsys.readouterr().err
    assert main([*command, *load, "--tp-size", "4", "8", "--total-rate", "100"]) == 0
    text = capsys.readouterr().out
    assert "| 1P1D-tp4 |" in text and "| 1P1D-tp8 |" in text and "10 us an all-reduce besides" in text
    small, large = json.loads(output.read_bytes())["layouts"]
    assert (small["gpus"], large["gpus"]) == (8, 16) and large["kv_tokens"] > 2 * small["kv_tokens"]
    assert large["points"][0]["ttft_p50_s"] < small["points"][0]["ttft_p50_s"]


def test_a_plan_takes_and_refuses_the_sizes_that_serving_does() -> None:
    model, refused = load_model_config(WIDE_MODEL_PATH), 0
    for tp in range(1, 33):
        config = PlanConfig(
            model_path=WIDE_MODEL_PATH, gpu="L4", layouts=("1U",), tp_size=(tp,), num_requests=10, input_len=100
        )
        try:
            check_layout(model, tp_size=tp, pp_size=1)
        except ConfigError as error:
            with pytest.raises(ConfigError) as caught:
                study_of(config)
            assert str(caught.value) == str(error)
            refused += 1
        else:
            assert study_of(config).kv_tokens(ClusterLayout(unified=1, tp=tp)) > 0
    assert refused == 28  # all but 1, 2, 4 and 8


@in_process
def test_a_gpu_of_no_table_and_what_is_assumed_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = {"name": "X1", "tflops": 500, "memory_gb": 48, "memory_gb_s": 2000, "link_gb_s": 10, "peer_gb_s": 100}
    profile = tmp_path / "gpu.json"
    command = ["plan", *MODEL, *LOAD, "--gpu-profile", str(profile), "--layouts", "1U", "--rates", "2"]
    profile.write_text(json.dumps({"gpu": gpu}))
    assert main(command) == 0
    assumed = (
        "assumed, not measured: 55 % of its FLOP/s, 75 % of its bandwidths, 2 ms a step besides, transfers at 10 GB/s"
    )
    text = capsys.readouterr().out
    assert text.startswith("X1, by its data sheet; ") and assumed in text
    known = {"compute_efficiency": 0.4, "memory_efficiency": 0.8, "step_overhead_ms": 1, "outside_s": 0.001}
    profile.write_text(json.dumps({"gpu": gpu, **known}))
    assert main([*command, "--transfer-gb-s", "9"]) == 0
    assert "assumed" not in capsys.readouterr().out
    profile.write_text(json.dumps({"outside_s": 1.0}))
    assert main(command) == 1
    assert "has neither `step_time` nor `gpu`" in capsys.readouterr().err


@in_process
def test_the_shipped_profile_is_the_fit_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of it comes from docs/reports/gpu_check.json, and flags override each."""
    report = json.loads(REPORT.read_text())
    shipped = shipped_profile("H200")
    assert shipped is not None and shipped.gpu is not None and shipped == profile_of(report)
    within = max(abs(modelled / measured - 1) for _, measured, modelled in compare(report, shipped))
    assert f"within {100 * within:.0f} %" in shipped.source and within < 0.105
    command = ["plan", *MODEL, *LOAD, "--gpu", "H200", "--layouts", "1U", "--rates", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("H200, as measured (docs/reports/gpu_check.json of ") and "% of its FLOP/s" not in text
    assert "assumed, not measured: transfers at 50 GB/s a GPU" in text
    model, config = load_model_config(DEFAULT_MODEL_PATH), PlanConfig(gpu="H200")
    measured = hardware_of(config, model, tps=[1], profile=shipped)
    faster = hardware_of(replace(config, memory_efficiency=0.9), model, tps=[1], profile=shipped)
    load = StepLoad(decodes=1, decode_context=100, samples=1)
    assert faster.step_times[1].seconds(load) < measured.step_times[1].seconds(load)
    assert measured.memory_bytes == round(shipped.gpu.memory_gb * 1e9)


def test_a_model_of_the_hub_is_its_configuration(tmp_path: Path) -> None:
    """A process of its own: `huggingface_hub` reads its environment once."""
    make_tiny_checkpoint(tmp_path / "hub" / "acme/tiny" / "main", "qwen3")
    load = ["--num-requests", "10", "--input-len", "20", "--output-len", "4", "--jobs", "1", "--disable-progress"]
    command = [sys.executable, "-m", "deploy", "plan", "--gpu", "L4", "--layouts", "1U", "--rates", "2", *load]
    root = str(Path(__file__).parents[2])
    with hub_stand_in(tmp_path / "hub") as hub:
        settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "PYTHONPATH": root}
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | settings

        def plan(model: str) -> "subprocess.CompletedProcess[str]":
            argv = [*command, "--model-path", model]
            return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

        done = plan("acme/tiny")
        assert (done.returncode, done.stderr) == (0, "") and "| 1U " in done.stdout
        assert hub.downloads == {"config.json": 1}
        refused = plan("acme/other")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "--model-path acme/other: no such directory, and no such model at " in refused.stderr


def test_rates_and_ports_are_of_gpus(tmp_path: Path) -> None:
    """Workers of two GPUs get twice a GPU's rate, and send by two ports."""
    points, links = {}, {}
    for tp in (1, 2):
        profile = tmp_path / f"tp{tp}.json"
        profile.write_bytes(msgspec.json.encode({"step_time": STEP_TIME, "outside_s": 0.0, "tp_size": tp}))
        study = study_of(
            PlanConfig(
                model_path=DEFAULT_MODEL_PATH,
                gpu_profile=str(profile),
                gpu="L4",
                layouts=("1P1D",),
                num_requests=40,
                input_len=400,
                output_len=20,
            )
        )
        (layout,) = study.layouts
        assert layout.tp == tp
        points[tp] = try_rate(study, layout, 4.0 / tp)
        links[tp] = planned_cluster(study, layout).pools["prefill"][0].spec.link_bytes_per_s
    assert links == {1: 12.5e9, 2: 25e9}
    assert points[2].busy["prefill"] == pytest.approx(points[1].busy["prefill"], rel=0.01)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--transfer-gb-s", "1"], "--gpu-memory-gb: step times say nothing of memory"),
        (["--gpu-memory-gb", "1"], "--transfer-gb-s: step times say nothing of the network"),
    ],
)
def test_step_times_are_not_all(
    tmp_path: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode({"step_time": STEP_TIME, "outside_s": 0.0}))
    assert main(["plan", *MODEL, "--gpu-profile", str(profile), *flags]) == 1
    assert said in capsys.readouterr().err


TOO_BIG = ["--gpu", "L4", "--max-total-tokens", "384", "--rates", "1"]
# At 60 requests a second forty come within one second, and the worker's limit of one is never reached.
TOO_SHORT = [*MACHINE, "--slo-ttft", "5", "--slo-tpot", "1"]
TOO_STRICT = ["--gpu", "L4", "--slo-ttft", "1e-06", "--num-requests", "10"]


@in_process
@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (TOO_BIG, 0, "need more KV than a worker of 1U has; they fail there"),
        (TOO_SHORT, 0, "warning: at the best rate of 1U all 40 requests came within 5 x"),
        (TOO_STRICT, 1, "No layout keeps the limits"),
    ],
)
def test_what_a_plan_warns_of(flags: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, *LOAD, "--layouts", "1U", *flags]) == status
    assert said in capsys.readouterr().out


BAD = [
    (["--gpu", "L4"], "--model-path: say which model"),
    (["--model-path", "/no/such", "--gpu", "L4"], "--model-path /no/such: no such directory"),
    ([*MODEL], "--gpu: say what the workers run on (A100, "),
    ([*MODEL, "--fit", "/no/such.json", "--gpu", "L4"], "--fit /no/such.json: cannot be read"),
    ([*MODEL, "--gpu-profile", "/no/such.json", "--gpu", "L4"], "--gpu-profile /no/such.json: cannot be read"),
    ([*MODEL, "--gpu-profile", "pyproject.toml", "--gpu", "L4"], "--gpu-profile pyproject.toml: is no profile"),
    ([*MODEL, "--gpu-profile", "x", "--fit", "y"], "--fit: step times come from --gpu-profile already"),
    ([*MODEL, "--gpu", "L4", "--fit-pair", "x"], "--fit-pair: needs --fit"),
    ([*MODEL, "--gpu", "L4", "--host-token-time", "0.001"], "--host-token-time: needs --host-cores"),
    ([*MODEL, "--gpu", "L4", "--worker-cores", "2"], "--worker-cores 2: needs --host-cores of at least as many"),
    ([*MODEL, "--gpu", "L4", "--host-cores", "1.5", "--worker-cores", "2"], "--worker-cores 2: needs --host-cores"),
    ([*MODEL, "--gpu", "L4", "--host-cores", "4", "--worker-cores", "1", "--step-cores", "2"], "--step-cores 2: more than --worker-cores 1"),
    ([*MODEL, "--gpu", "L4", "--request-rate", "1", "--rates", "2"], "--rates: --request-rate is the rate of the whole"),
    ([*MODEL, "--gpu", "L4", "--request-rate", "1", "--total-rate", "2"], "--total-rate: --request-rate is the rate"),
    ([*MODEL, "--gpu", "L4", "--request-rate", "0"], "--request-rate: must be above 0 and finite, got 0"),
    ([*MODEL, "--gpu", "L4", "--log-file", "/no/such/log"], "--log-file: /no/such is no directory"),
    ([*MODEL, "--gpu", "L4", "--save-profile", "x"], "--save-profile: needs --fit"),
    ([*MODEL, "--gpu", "L4", "--gpu-memory-gb", "0.0001"], "--gpu-memory-gb: 0 GB do not hold the model's"),
    ([*MODEL, "--gpu", "L4", "--layouts", "PD"], "--layouts PD: write 2P3D"),
    ([*MODEL, "--gpu", "L4", "--trace", "/no/such"], "--trace /no/such: cannot be read"),
    ([*MODEL, "--gpu", "L4", "--slo-ttft", "0"], "--slo-ttft: must be above 0 and finite, got 0"),
    ([*MODEL, "--gpu", "L4", "--input-len", "40000"], "--model-path: its context of 32768 tokens is shorter"),
    ([*MODEL, "--gpu", "L4", "--mixed-chunk-size", "8"], "--mixed-chunk-size: must be at least --page-size (64), got 8"),
    ([*MODEL, "--gpu", "L4", "--plot", "x.gif"], "--plot x.gif: must end in .png"),
    ([*MODEL, "--gpu", "L4", "--output", "/no/such/x.json"], "--output: /no/such is no directory"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "said"), BAD, ids=[said.partition(":")[0] + str(i) for i, (_, said) in enumerate(BAD)]
)
def test_bad_input_is_one_line_that_names_the_flag(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *args, "--disable-progress"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("tandem plan: error: " + said) and text.count("\n") == 1


def test_a_mixture_of_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_checkpoint(tmp_path, "mixtral")
    assert main(["plan", "--model-path", path, "--gpu", "L4", "--disable-progress"]) == 1
    assert f"--model-path {path}: the cost model knows dense models" in capsys.readouterr().err


def test_recurrent_states_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_5_text")
    assert main(["plan", "--model-path", path, "--gpu", "L4", "--disable-progress"]) == 1
    assert f"--model-path {path}: the cost model knows memory that grows" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"input_length": "x"}, {"input_length": -5}, {"hash_ids": [-1]}])
def test_a_trace_with_nonsense_in_it(tmp_path: Path, wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    entry = {"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1]} | wrong
    path.write_text("\n".join([json.dumps(entry)] * 20))
    assert main(["plan", *MODEL, "--gpu", "L4", "--trace", str(path)]) == 1
    assert "line 1" in capsys.readouterr().err


def test_a_child_that_dies_is_no_riddle(tmp_path: Path) -> None:
    """Its end is an error of the run, and no process is left behind."""
    from planner.cluster import parse_layout
    from planner.run import RunPool

    with RunPool(PlanConfig(model_path=str(tmp_path), gpu="L4"), jobs=1) as pool:
        with pytest.raises(RuntimeError, match=r"^the run of 1U at 1 failed"):
            pool.submit(parse_layout("1U"), 1.0).result(timeout=60)
        children = pool._children
    assert not any(child.is_alive() for child in children)
