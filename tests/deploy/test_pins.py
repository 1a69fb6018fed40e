"""What pip made of the pins (`make pins`), held against the files that it was made from and the versions that the tests run with."""

import json
import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.deploy.test_images import pins_in
from tools.image_pins import LEFT_TO_TORCH, canonical, direct
from tools.pins import REPO, REPORT, SETS, digest
from transfer_backends.engines.wheels import MOONCAKE, NIXL, installed_torch, torch_cuda_major

RESOLVED: dict[str, dict[str, str]] = {
    name: found["versions"] for name, found in json.loads(REPORT.read_text())["sets"].items()
}
each_set = pytest.mark.parametrize("name", SETS)


def test_the_report_is_of_these_files() -> None:
    assert json.loads(REPORT.read_text())["digest"] == digest(), "run `make pins`"
    assert list(RESOLVED) == list(SETS)


@each_set
def test_every_requirement_is_met_and_no_pin_is_passed_over(name: str) -> None:
    versions, wanted = RESOLVED[name], SETS[name]
    for requirement in [*direct(wanted.extras), *([Requirement(wanted.torch)] if wanted.torch else [])]:
        assert requirement.specifier.contains(versions[canonical(requirement.name)]), requirement
    if wanted.constraints:
        public = {package: version.partition("+")[0] for package, version in versions.items()}
        pins = {package: version for package, version in pins_in(wanted.constraints).items() if package in public}
        assert pins.items() <= public.items()
        assert [package for package in public.keys() - pins.keys() if not LEFT_TO_TORCH.match(package)] == []


@each_set
def test_transfer_engines_are_for_the_cuda_of_torch(name: str) -> None:
    versions, wanted = RESOLVED[name], SETS[name]
    if wanted.torch is None:
        assert "torch" not in versions
        return
    major = torch_cuda_major(versions["torch"])
    assert major == (13 if wanted.cuda else None)
    assert wanted.cuda == any(n.startswith("nvidia-") for n in versions)
    assert versions.keys() & {*NIXL.values(), *MOONCAKE.values()} == {NIXL[major], MOONCAKE[major]}


def test_the_triton_that_is_tested_is_the_one_that_ships() -> None:
    """A torch with CUDA brings its own, and the tests run with that."""
    if torch_cuda_major(installed_torch()) is None:
        assert metadata.version("triton") == RESOLVED["image worker-cuda"]["triton"], "bring .venv up to date"


def test_the_venv_of_make_has_extras_that_there_are() -> None:
    (line,) = re.findall(r"^EXTRAS \?= (.*)$", (REPO / "Makefile").read_text(), re.MULTILINE)
    for wheels in ("cpu", "cu13"):
        named = [word for word in line.replace("$(WHEELS)", wheels).split(",") if word != "smollm2"]
        assert direct(named, base=False)
