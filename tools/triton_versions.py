"""`make triton-versions`: what each Triton makes of the kernels for an H100/H200, without a GPU: registers, spills, shared memory.

The compile tests run once in a virtual environment for each version; every kernel that they compile is a row of
docs/reports/triton_versions.json. A version whose tests fail leaves no report.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.environment import describe

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "reports" / "triton_versions.json"
TESTS = ("tests/attention", "tests/sampler", "tests/lora", "tests/quant", "tests/kernels/test_linear_on_gpu.py")


class Compilations:
    """A plugin of pytest: kernels compiled to a cubin, by test and order, with what they use."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._test = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.name

    def watch(self) -> None:
        """Note each compilation from now on."""
        import triton

        from tests.attention.triton.test_triton import resource_usage

        compile_one = triton.compile

        def noting(source: Any, **options: Any) -> Any:
            made = compile_one(source, **options)
            usage = resource_usage(made.asm["cubin"])
            row = {
                "kernel": source.fn.__name__,
                "registers": usage["REG"],
                "stack_bytes": usage["STACK"],
                "local_bytes": usage["LOCAL"],
                "shared_bytes": made.metadata.shared,
            }
            number = sum(name.startswith(f"{self._test} #") for name in self.found)
            self.found[f"{self._test} #{number}"] = row
            return made

        triton.compile = noting


def measure(output: Path) -> int:
    """Run the compile tests with this interpreter's Triton; write what they compiled."""
    import triton

    compilations = Compilations()
    compilations.watch()
    there = [path for path in TESTS if (ROOT / path).exists()]
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "compile", *there], plugins=[compilations])
    if status == pytest.ExitCode.OK:
        output.write_text(json.dumps({"triton": triton.__version__, "kernels": compilations.found}))
    return int(status)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.triton_versions", description=__doc__)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--python", nargs="*", default=[], help="interpreters of environments with other versions of Triton"
    )
    args = parser.parse_args(argv)
    if args.measure is not None:
        return measure(args.measure)
    versions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for python in (sys.executable, *args.python):
            output = Path(folder) / "found.json"
            command = [python, "-m", "tools.triton_versions", "--measure", str(output)]
            if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
                return status
            found = json.loads(output.read_text())
            versions[found["triton"]] = found["kernels"]
    rows = {name: {v: kernels.get(name) for v, kernels in versions.items()} for name in versions[max(versions)]}
    about = {**describe(), "command": "make triton-versions"}
    REPORT.write_text(json.dumps({"about": about, "target": "sm_90", "kernels": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
