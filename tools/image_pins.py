"""Writes the constraints of the images: the versions that this virtual environment has, of everything they install.

`make image-pins`, after the tests passed with them, and then `make pins`. torch pins its own CUDA libraries.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]
DOCKER = REPO / "deploy" / "docker"
FILES: Mapping[str, Sequence[str]] = {
    "constraints.txt": ("k8s", "otel", "engine", "nixl-cpu", "mooncake-cpu"),
    "constraints-cuda.txt": ("otel", "engine", "nixl-cu13", "mooncake-cu13"),
}
ON_CPUS = ("nixl-cpu", "mooncake-cpu")  # installed here in place of CUDA's, which need the same packages in turn
BUILD = ("setuptools",)
LEFT_TO_TORCH = re.compile(r"^(nvidia-|cuda-|triton$)")


def direct(extras: Iterable[str], *, base: bool = True) -> list[Requirement]:
    """Return the requirements in pyproject.toml of `extras`, and of the project itself (`base`)."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    own = project["dependencies"] if base else []
    return [Requirement(line) for line in [*own, *(r for e in extras for r in project["optional-dependencies"][e])]]


def pins_of(extras: Sequence[str]) -> dict[str, str]:
    """Name to version, of all that `extras` need; wheels of other machines (CUDA) are exact in pyproject.toml."""
    wanted = direct(extras)
    foreign = {canonical(r.name) for r in direct(ON_CPUS, base=False)} - {canonical(r.name) for r in wanted}
    pins = closure([*wanted, *direct(ON_CPUS, base=False), *map(Requirement, BUILD)])
    exact = {canonical(r.name): s.version for r in wanted for s in r.specifier if s.operator == "=="}
    return {name: version for name, version in (exact | pins).items() if name not in foreign}


def closure(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Name to version, with all that these need in turn; what is not installed here is left out."""
    found: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonical(requirement.name)
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


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    for file, extras in FILES.items():
        lines = [f"{name}=={version}" for name, version in sorted(pins_of(extras).items())]
        (DOCKER / file).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
