"""Writes constraints.txt: the versions that this virtual environment has, of everything the images install.

`make image-pins`, after the tests passed with them. torch pins its own CUDA libraries.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]
EXTRAS = ("k8s", "otel", "engine", "nixl", "mooncake-cpu", "mooncake")
BUILD = ("setuptools",)
LEFT_TO_TORCH = re.compile(r"^(nvidia-|cuda-|triton$)")


def direct() -> list[Requirement]:
    """Return the requirements of the images' extras in pyproject.toml."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def closure(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Name to version, with all that these need in turn; what is not installed here is left out."""
    found: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = _canonical(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name in found or LEFT_TO_TORCH.match(name):
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version.partition("+")[0]
        waiting += [(Requirement(line), e) for line in distribution.requires or () for e in ("", *requirement.extras)]
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    pins = closure([*direct(), *map(Requirement, BUILD)])
    for requirement in direct():  # those of other machines (CUDA) are exact in pyproject.toml
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        pins.setdefault(_canonical(requirement.name), *exact[:1] or [""])
    lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
    (REPO / "deploy/docker/constraints.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
