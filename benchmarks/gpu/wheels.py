"""`make gpu-wheels`: the wheels of gpu_check for a GPU machine that has torch but no network."""

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("engine", "nixl-cu13")
PRESENT = "torch triton numpy pillow jinja2 safetensors tokenizers huggingface-hub aiohttp requests prometheus-client tqdm uvloop"
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)  # pip takes exact numbers
# NIXL's expert kernels, storage plugins and tools: two thirds of its wheel. UCX moves KV.
UNUSED = re.compile(r"nixl_ep|\.scripts/|perftest|plugin_(?!UCX)")


def main() -> None:
    """Downloads to --output. Raises CalledProcessError where an index lacks a wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="the machine's Python")
    parser.add_argument("--present", default=PRESENT, help="packages of the machine, with all they need")
    parser.add_argument("--output", type=Path, default=Path(".whl"))
    args = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    roots = project["dependencies"] + [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    names = closure(roots) - closure(args.present.split())
    pins = [_pin(name, roots) for name in sorted(names)]
    systems = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run(
        [*pip, f"--python-version={args.python}", "--implementation=cp", *systems, f"--dest={args.output}", *pins],
        check=True,
    )
    for wheel in args.output.glob("nixl_cu*.whl"):
        slim(wheel)
    print(
        f"{sum(wheel.stat().st_size for wheel in args.output.glob('*.whl')) / 1e6:.1f} MB in {args.output}: {' '.join(pins)}"
    )


def closure(lines: list[str]) -> set[str]:
    """Packages that these requirements need, by what is installed here."""
    found, left = set(), list(lines)
    while left:
        requirement = Requirement(left.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            left += metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a CUDA build, which a CPU's environment lacks
    return found


def slim(wheel: Path) -> None:
    """Removes what gpu_check does not load."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            if not UNUSED.search(entry.filename):
                new.writestr(entry, old.read(entry))
    smaller.replace(wheel)


def _pin(name: str, roots: list[str]) -> str:
    try:
        return f"{name}=={metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return next(line for line in roots if Requirement(line).name == name)


if __name__ == "__main__":
    main()
