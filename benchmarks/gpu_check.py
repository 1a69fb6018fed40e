"""What one GPU reaches, in one JSON file and the page gpu.md beside it: `make gpu-check`. Without one it says so and exits with 2.

usage: python -m benchmarks.gpu_check [--output FILE] [--parts limits,decode_attention,...] [--small]

Each part runs in a process of its own with a time of its own (about four minutes in all, at most twelve): one that fails or hangs leaves
its error in the file and the others their figures. The checks, which time nothing, run side by side first and compile most
kernels; then come the measurements, one at a time. Shares are of what the part `limits` measured in the same run. --small
walks the same code on a CPU, at sizes that mean nothing, in this one process.

Needs torch with CUDA, triton, numpy, safetensors, tokenizers, tqdm, msgspec and pyzmq; the parts `transfer...` need NIXL and Mooncake besides.
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
from pathlib import Path
from typing import Any

import msgspec

from deploy.bench import environment

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 2


class Part(msgspec.Struct, frozen=True):
    """`run`: "module:function". `is_timed`: it has the GPU to itself."""

    run: str
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


def longest_s(parts: Iterable[Part]) -> float:
    """Return the seconds that these parts take at most."""
    checks, timed = [[part.budget_s for part in parts if part.is_timed is kind] for kind in (False, True)]
    return max(checks, default=0.0) + sum(timed)


RunPart = Callable[[str, dict[str, float]], dict[str, Any]]  # from a part's name and the limits


def check(
    names: list[str],
    run: RunPart,
    *,
    side_by_side: bool = True,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """{part: its result, or {"error": ...}}; each with its seconds. `side_by_side`: the checks, which time nothing.

    `save` gets what is found after each part: a run that is cut off leaves the parts that were done.
    """
    found: dict[str, Any] = {}

    def run_one(name: str) -> None:
        begin = time.monotonic()
        limits = {key: value for key, value in found.get("limits", {}).items() if isinstance(value, float)}
        result = run(name, limits)
        result["seconds"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {result.get('error', 'done')} ({result['seconds']} s)", file=sys.stderr, flush=True)
        found[name] = result
        save({name: found[name] for name in names if name in found})

    checks = [name for name in names if not PARTS[name].is_timed]
    with ThreadPoolExecutor(len(checks) if side_by_side and checks else 1) as pool:
        list(pool.map(run_one, checks))
    for name in names:
        if PARTS[name].is_timed:
            run_one(name)
    return {name: found[name] for name in names}


def run_here(name: str, limits: dict[str, float], *, small: bool = True) -> dict[str, Any]:
    """Run a part in this process."""
    module, _, function = PARTS[name].run.partition(":")
    target = _target(small=small, limits=limits)
    try:
        return getattr(importlib.import_module(module), function)(target)  # type: ignore[no-any-return]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-3000:]}


def run_apart(name: str, limits: dict[str, float]) -> dict[str, Any]:
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
        try:
            _, said = child.communicate(timeout=PARTS[name].budget_s)
        except subprocess.TimeoutExpired:
            _kill_group(child)
            return {"error": f"not done after {PARTS[name].budget_s:.0f} s"}
        if not output.exists():
            return {"error": f"its process ended with {child.returncode}", "trace": said[-3000:]}
        found = dict(json.loads(output.read_text()))
        return found | {"said": said[-3000:]} if "error" in found else found


def _kill_group(child: "subprocess.Popen[str]") -> None:
    os.killpg(child.pid, 9)
    child.communicate()


def _target(*, small: bool, limits: dict[str, float]) -> Any:
    import torch

    from benchmarks.gpu.target import Target

    torch.set_grad_enabled(False)
    return Target(small=small, limits=limits)


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


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


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
    """Write the table of a result."""
    from deploy.bench.stats import table

    words = {True: "yes", False: "no", None: "-"}
    rows = [
        [row["what"], "-" if row["found"] is None else f"{row['found']:.3f}", row["aim"], words[row["met"]]]
        for row in result["aims"]
    ]
    text = table(["", "found", "aim", "met"], rows)
    failed = [f"{name}: {part['error']}" for name, part in result["parts"].items() if "error" in part]
    return text + ("\n\nParts without figures: " + "; ".join(failed) if failed else "")


def write_page(output: Path) -> None:
    """Write the page beside the JSON file: gpu.md."""
    from benchmarks.gpu.page import page

    result = json.loads(output.read_text())
    output.with_name("gpu.md").write_text(page(result, render(result)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--small", action="store_true", help="on a CPU, to see that everything runs")
    parser.add_argument("--one", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--limits", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        args.output.write_text(json.dumps(run_here(args.one, json.loads(args.limits), small=False)))
        return
    names = args.parts.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"--parts: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a kernel
        importlib.import_module("tests.triton_interpreter")
    elif not has_gpu():
        print(
            "gpu_check: torch finds no CUDA device here; --small shows on a CPU that everything runs", file=sys.stderr
        )
        raise SystemExit(NO_GPU)
    made_by = {"environment": environment.describe(), "gpu": _versions()}

    def save(parts: dict[str, Any]) -> None:
        if args.output:
            args.output.write_text(json.dumps({**made_by, "aims": aims(parts), "parts": parts}, indent=1))

    parts = check(names, run_here if args.small else run_apart, side_by_side=not args.small, save=save)
    print(render({"aims": aims(parts), "parts": parts}))
    if args.output:
        write_page(args.output)
    if any("error" in part for part in parts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
