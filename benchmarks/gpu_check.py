"""What one GPU reaches, in one JSON file and the page gpu.md beside it: `make gpu-check`. Without one it says so and exits with 2.

usage: python -m benchmarks.gpu_check [--output FILE] [--parts limits,tiles,...] [--deadline SECONDS] [--small]

Each part runs in a process of its own with a time of its own: one that fails or hangs leaves its error, and what it has found so far,
in the file and the others their figures. Parts run in the order given; neighbours that time nothing (checks) run side by side, a
measurement runs alone. A part that would end after --deadline is left out and named; one that reaches it is ended. Shares are of what
the part `limits` measured in the same run. --small walks the same code on a CPU, at sizes that mean nothing, in this one process.
At the end comes a table of at most 60 lines. docs/gpu.md has the commands for a GPU that is there for fifteen minutes.

Needs torch with CUDA, triton, numpy, safetensors, tokenizers, tqdm, msgspec and pyzmq; the parts `transfer...` need NIXL and Mooncake besides,
`serve` and what follows it all that a worker needs.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench import environment

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 2
MOST_LINES, MOST_CHARS = 60, 300


class Part(msgspec.Struct, frozen=True):
    """`run`: "module:function". `takes_s`: expected on an H200; `budget_s`: at most. `is_timed`: it has the GPU to itself."""

    run: str
    takes_s: float
    budget_s: float
    is_timed: bool = True


class Aim(msgspec.Struct, frozen=True):
    """`at`: where in the result of its part. `bound`: ">=", at least, or "<=", at most."""

    what: str
    part: str
    at: str
    bound: str
    aim: float


class Table(msgspec.Struct, frozen=True):
    parts: dict[str, Part]
    aims: list[Aim]


TABLE = msgspec.toml.decode((ROOT / "benchmarks/gpu/parts.toml").read_bytes(), type=Table)
PARTS = TABLE.parts


def in_turn(names: Iterable[str]) -> list[list[str]]:
    """Group the names of parts by what runs at a time."""
    return [list(group) for _, group in groupby(names, lambda name: name if PARTS[name].is_timed else "checks")]


def expected_s(names: Iterable[str]) -> float:
    return sum(max(PARTS[name].takes_s for name in group) for group in in_turn(names))


RunPart = Callable[[str, dict[str, float], float], dict[str, Any]]  # from a part's name, the limits and its seconds
Save = Callable[[dict[str, Any]], None]


def check(
    names: list[str],
    run: RunPart,
    *,
    side_by_side: bool = True,
    left_s: Callable[[], float] = lambda: inf,
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """{part: its result, or {"error": ...}, or {"left_out": ...}}; each with its seconds. `side_by_side`: of the checks, which time nothing.

    `left_s`: seconds to the deadline. `save` gets what is found after each part: a run that is cut off leaves the parts that were done.
    """
    found: dict[str, Any] = {}

    def run_one(name: str) -> None:
        begin, part = time.monotonic(), PARTS[name]
        limits = {key: value for key, value in found.get("limits", {}).items() if isinstance(value, float)}
        if (left := left_s()) < part.takes_s:
            result = {"left_out": f"takes {part.takes_s:.0f} s, {max(0.0, left):.0f} s were left"}
        else:
            result = run(name, limits, min(part.budget_s, left))
        result["seconds"] = round(time.monotonic() - begin, 1)
        said = result.get("error", result.get("left_out", "done"))
        print(f"{name}: {said} ({result['seconds']} s)", file=sys.stderr, flush=True)
        found[name] = result
        save({name: found[name] for name in names if name in found})

    for group in in_turn(names):
        with ThreadPoolExecutor(len(group) if side_by_side else 1) as pool:
            list(pool.map(run_one, group))
    return {name: found[name] for name in names}


def run_here(
    name: str, limits: dict[str, float], _within_s: float = inf, *, small: bool = True, output: str = ""
) -> dict[str, Any]:
    """Run a part in this process. `output`: where it keeps what it has found so far."""
    module, _, function = PARTS[name].run.partition(":")
    target = _target(small=small, limits=limits, output=output)
    try:
        return getattr(importlib.import_module(module), function)(target)  # type: ignore[no-any-return]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-3000:]}


def run_apart(name: str, limits: dict[str, float], within_s: float) -> dict[str, Any]:
    """Run a part on the GPU, in a process of its own that ends with its time."""
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        output = Path(folder) / "part.json"
        argv = [sys.executable, "-m", "benchmarks.gpu_check", "--one", name, "--limits", json.dumps(limits)]
        # its own session: what it started ends with it
        child = subprocess.Popen(
            [*argv, "--output", str(output)],
            cwd=ROOT,
            start_new_session=True,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
        )
        error, said = "", ""
        try:
            _, said = child.communicate(timeout=within_s)
            error = f"its process ended with {child.returncode}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            _kill_group(child)
            error = f"not done after {within_s:.0f} s"
        found = kept(output)
        if error and "error" not in found:
            found["error"] = error
        if "error" in found and (reasons := [line for line in said.splitlines() if "error: " in line]):
            found["error"] = f"{reasons[-1].strip()[:200]} ({found['error']})"  # of a server that did not start
        return found | {"said": said[-3000:]} if "error" in found else found


def kept(output: Path) -> dict[str, Any]:
    """What a part wrote, if it was not ended in the middle of that."""
    try:
        return dict(json.loads(output.read_text()))
    except (OSError, ValueError):
        return {}


def _kill_group(child: "subprocess.Popen[str]") -> None:
    os.killpg(child.pid, 9)
    child.communicate()


def _target(*, small: bool, limits: dict[str, float], output: str) -> Any:
    import torch

    from benchmarks.gpu.target import Target

    torch.set_grad_enabled(False)
    return Target(small=small, limits=limits, output=output)


def _versions() -> dict[str, Any]:
    """Of what decides a GPU's figures."""
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda, "torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "multiprocessors": properties.multi_processor_count}
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        found[name] = importlib.util.find_spec(name) is not None
    return found


def aims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each aim beside what was found; `found` None where its part has no figure."""
    rows = []
    for one in TABLE.aims:
        value = _at(found.get(one.part), one.at)
        met = None if value is None else (value >= one.aim if one.bound == ">=" else value <= one.aim)
        rows.append({"what": one.what, "found": value, "aim": f"{one.bound} {one.aim}", "met": met})
    return rows


def _at(value: Any, path: str) -> float | None:
    for key in path.split("."):
        if isinstance(value, list):
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else float(value)


def render(result: dict[str, Any]) -> str:
    """Write the table of a result: at most MOST_LINES lines."""
    from benchmarks.gpu.page import aim_table, lines_of

    parts, met = result["parts"], [row for row in result["aims"] if row["found"] is not None]
    last = [f"{name} failed: {part['error']}"[:MOST_CHARS] for name, part in parts.items() if "error" in part]
    last += [f"{name}: {part['missing']}" for name, part in parts.items() if "missing" in part]
    left_out = [f"{name} ({part['left_out']})" for name, part in parts.items() if "left_out" in part]
    last += [f"Left out for --deadline: {', '.join(left_out)}"] if left_out else []
    lines = [*(aim_table(met).split("\n") if met else []), "", *lines_of(parts)]
    room = max(1, MOST_LINES - len(last))
    lines = lines if len(lines) <= room else [*lines[: room - 1], "... the rest is in the JSON file"]
    return "\n".join([*lines, *last[: MOST_LINES - 1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--deadline", type=float, default=inf, help="seconds of the whole run")
    parser.add_argument("--small", action="store_true", help="on a CPU, to see that everything runs")
    parser.add_argument("--one", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--limits", default="{}", help=argparse.SUPPRESS)
    args, begin = parser.parse_args(), time.monotonic()
    if args.one:
        found = run_here(args.one, json.loads(args.limits), small=False, output=str(args.output))
        args.output.write_text(json.dumps({**kept(args.output), **found}))
        return
    names = args.parts.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"--parts: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    gpu = _versions()
    if args.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a kernel
        importlib.import_module("tests.triton_interpreter")
    elif "name" not in gpu:
        print(
            "gpu_check: torch finds no CUDA device here; --small shows on a CPU that everything runs", file=sys.stderr
        )
        raise SystemExit(NO_GPU)
    made_by = {"environment": environment.describe(), "gpu": gpu}

    def save(parts: dict[str, Any]) -> None:
        if args.output:
            args.output.write_text(json.dumps({**made_by, "aims": aims(parts), "parts": parts}, indent=1))

    run: RunPart = run_here if args.small else run_apart
    left_s = lambda: args.deadline - (time.monotonic() - begin)  # noqa: E731
    parts = check(names, run, side_by_side=not args.small, left_s=left_s, save=save)
    print(render({"aims": aims(parts), "parts": parts}))
    if args.output:
        from benchmarks.gpu.page import page

        args.output.with_name("gpu.md").write_text(page(json.loads(args.output.read_text())))
    if any("error" in part for part in parts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
