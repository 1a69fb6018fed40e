"""`make gpu-profile`: the profile of a GPU for `tandem plan`, fitted to the step times of gpu_check.json.

One share of the data sheet's FLOP/s, one of its bandwidth, and one overhead, for steps of Qwen3-8B's shape in bfloat16 on one GPU.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.target import QWEN3_8B
from planner.fit import Profile, least_squares, save_profile
from planner.hardware import PROFILES
from planner.step_time import GPUS, Efficiency, Gpu, Roofline, Shape, StepLoad, shape_of

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "reports" / "gpu_check.json"
GAP_CONTEXT = 64 + 60 // 2  # of the median step in benchmarks/gpu/steps.py: a prompt and half of the answers
PARTS = ("decode", "adapters", "gap", "short_prompts", "prefill")
ENGINE = "engine8b"  # has these, of a report after 2026-11-26
_SIDES = 10  # rounds of choosing whether FLOP/s or bandwidth bounds a step

Step = tuple[str, StepLoad, float]  # (name, load, seconds)


def main() -> None:
    result = json.loads(REPORT.read_text())
    profile = profile_of(result)
    assert profile.gpu is not None, "made here"
    PROFILES.mkdir(exist_ok=True)
    path = PROFILES / f"{profile.gpu.name.lower()}.json"
    save_profile(profile, str(path))
    print(f"{path.relative_to(ROOT)}: {profile.source}")
    for name, measured_s, modelled_s in compare(result, profile):
        print(f"{name:24} {1e3 * measured_s:8.2f} ms, modelled {1e3 * modelled_s:8.2f} ms")


def profile_of(result: Mapping[str, Any]) -> Profile:
    """Fit the profile of the GPU of a report of `make gpu-check`."""
    name = result["gpu"]["name"].removeprefix("NVIDIA ")
    memory_gb = round(result["gpu"]["memory_gib"] * 2**30 / 1e9, 1)
    gpu = replace(GPUS[name], memory_gb=memory_gb)
    steps = measured_steps(result["parts"])
    found = _fitted([(load, seconds) for _, load, seconds in steps], gpu, shape())
    model = Roofline(gpu=gpu, shape=shape(), efficiency=found)
    worst = max(abs(model.seconds(load) / seconds - 1) for _, load, seconds in steps)
    named = " ".join(result["parts"].get(part, {}).get("commit", result["environment"]["commit"]) for part in PARTS)
    commits = " and ".join(dict.fromkeys(re.findall(r"\b[0-9a-f]{8,40}\b", named)))
    return Profile(
        gpu=gpu,
        compute_efficiency=round(found.compute, 4),
        memory_efficiency=round(found.memory, 4),
        step_overhead_ms=round(1e3 * found.step_s, 4),
        source=f"as measured ({REPORT.relative_to(ROOT)} of {result['environment']['time'][:10]}, commits {commits}): "
        f"{len(steps)} steps of Qwen3-8B's shape within {100 * worst:.0f} %, other models by the same shares",
    )


def _fitted(steps: Sequence[tuple[StepLoad, float]], gpu: Gpu, shape: Shape) -> Efficiency:
    """Fit the reached shares of a data sheet, and the overhead, to (load, seconds) of steps.

    `Roofline` is linear in overhead and inverse shares once each step's slower side is known: least
    squares, then the sides again.
    """
    found = Efficiency(compute=1.0, memory=1.0, step_s=0.0)
    for _ in range(_SIDES):
        rows = [_sides(load, Roofline(gpu=gpu, shape=shape, efficiency=found)) for load, _ in steps]
        step_s, compute, memory = least_squares(rows, [seconds for _, seconds in steps])
        found = Efficiency(compute=1 / max(compute, 1.0), memory=1 / max(memory, 1.0), step_s=step_s)
    return found


def _sides(load: StepLoad, model: Roofline) -> tuple[float, float, float]:
    """1, and the seconds at the data sheet's FLOP/s and bandwidth."""
    parts = model.parts(load)
    shares = model.efficiency.compute, model.efficiency.memory
    compute = sum(part.compute_s for part in parts if part.compute_s > part.memory_s)
    memory = sum(part.memory_s for part in parts if part.compute_s <= part.memory_s)
    return 1.0, compute * shares[0], memory * shares[1]


def compare(result: Mapping[str, Any], profile: Profile) -> list[tuple[str, float, float]]:
    """Return each measured step with its seconds, measured and modelled."""
    model = model_of(profile)
    return [(name, seconds, model.seconds(load)) for name, load, seconds in measured_steps(result["parts"])]


def model_of(profile: Profile) -> Roofline:
    """Return the cost model of a profile's GPU, for the measured shape."""
    assert profile.gpu is not None and profile.compute_efficiency is not None, "written here"
    assert profile.memory_efficiency is not None and profile.step_overhead_ms is not None, "written here"
    reached = Efficiency(
        compute=profile.compute_efficiency,
        memory=profile.memory_efficiency,
        step_s=profile.step_overhead_ms / 1e3,
    )
    return Roofline(gpu=profile.gpu, shape=shape(), efficiency=reached)


def shape() -> Shape:
    return shape_of(QWEN3_8B.config(context=8192))


def measured_steps(parts: Mapping[str, Any]) -> list[Step]:
    """Return the steps of a dense model with graphs, as served: decodes by batch and context, prompts by length."""
    parts = {**parts, **parts.get(ENGINE, {})}
    decode, gap, adapters = parts["decode"], parts["gap"], parts.get("adapters", {"rows": []})
    prompts = parts["prefill"].get("rows") or [
        *(row for row in parts["short_prompts"]["rows"] if row["graphs"]),
        parts["prefill"],
    ]
    return [
        *(_decode(row, decode["context"], row["ms"]) for row in decode["rows"] if row["graphs"]),
        *(_decode(row, adapters["context"], row["ms"]) for row in adapters["rows"] if not row["adapters"]),
        *(_decode(row, GAP_CONTEXT, row["step_p50_ms"]) for row in gap["rows"] if row["depth"] == 2),
        *(_prompt(row["tokens"], row["ms"]) for row in prompts),
    ]


def _decode(row: Mapping[str, Any], context: int, ms: float) -> Step:
    batch = row["batch"]
    load = StepLoad(decodes=batch, decode_context=batch * context, samples=batch)
    return f"{batch} x 1 at {context}", load, ms / 1e3


def _prompt(tokens: int, ms: float) -> Step:
    load = StepLoad(prefill_tokens=tokens, prefill_pairs=tokens * (tokens + 1) / 2, prefill_context=tokens, samples=1)
    return f"prompt of {tokens}", load, ms / 1e3


if __name__ == "__main__":
    main()
