"""Dockerfiles and compose.yaml: no engine builds them here, so everything that can be known without one is looked at."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.commands import router as router_command
from deploy.commands import serve as serve_command
from deploy.flags import config_from
from disagg.config import DisaggConfig
from engine.config import ServerConfig
from router.config import RouterConfig, check_config
from tools.image_pins import FILES, direct
from transfer_backends.engines.wheels import MOONCAKE, NIXL, torch_cuda_major

REPO = Path(__file__).parents[2]
IMAGES = ("router", "worker-cpu", "worker-cuda")
CONSTRAINTS = {"router": "constraints.txt", "worker-cpu": "constraints.txt", "worker-cuda": "constraints-cuda.txt"}
COMPOSE = yaml.safe_load((REPO / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
each_image = pytest.mark.parametrize("image", IMAGES)


@dataclass(frozen=True)
class Step:
    word: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Of the exec form."""
        found: list[str] = json.loads(self.rest)
        return found


def steps(image: str) -> list[Step]:
    text = (REPO / "deploy" / "docker" / f"{image}.Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [Step(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def last_stage(image: str) -> list[Step]:
    found = steps(image)
    start = max(i for i, step in enumerate(found) if step.word == "FROM")
    return found[start:]


def last(image: str, word: str) -> Step:
    return [step for step in last_stage(image) if step.word == word][-1]


def is_ignored(path: str) -> bool:
    """As docker reads .dockerignore: the last pattern that matches the path or a folder above it counts."""
    ignored = False
    for line in (REPO / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        bare = pattern.removeprefix("!").removeprefix("**/")
        parts = Path(path).parts
        above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        names = parts if "**/" in pattern else above
        if any(fnmatch.fnmatchcase(name, bare) for name in names):
            ignored = not pattern.startswith("!")
    return ignored


@each_image
def test_hadolint_has_nothing_to_say(image: str, tmp_path: Path) -> None:
    hadolint = str(Path(sys.executable).parent / "hadolint")
    file = REPO / "deploy" / "docker" / f"{image}.Dockerfile"
    done = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
    bad = tmp_path / "Dockerfile"
    shutil.copy(file, bad)
    bad.write_text(bad.read_text() + "RUN cd /tmp && sudo true\n")
    assert subprocess.run([hadolint, str(bad)], capture_output=True, check=False).returncode == 1


@each_image
def test_what_is_copied_is_there_and_reaches_the_builder(image: str) -> None:
    copies = [step.rest for step in steps(image) if step.word == "COPY" and "--from=" not in step.rest]
    sources = [source for copy in copies for source in copy.split()[:-1]]
    for source in sources:
        assert (REPO / source).exists() and not is_ignored(source), source
    packages = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} <= set(sources)


def test_keys_tests_and_histories_never_reach_the_builder() -> None:
    hidden = "deploy/kubernetes/base/secrets/api.keys tests/x.py .git/config .venv/x router/__pycache__/x"
    for path in hidden.split():
        assert is_ignored(path), path
    assert not is_ignored("engine/kernels/attention.c") and not is_ignored("deploy/cli.py")


@each_image
def test_it_runs_as_a_user_without_rights_on_a_pinned_base(image: str) -> None:
    assert last(image, "USER").rest == "10001:10001"
    (base,) = [step.rest for step in steps(image) if step.word == "ARG" and step.rest.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+", base)
    froms = [step.rest.split()[0] for step in steps(image) if step.word == "FROM"]
    assert froms == ["${PYTHON_IMAGE}"] * 2
    installs = [step.rest for step in steps(image) if step.word == "RUN" and "pip install" in step.rest]
    pinned = f"--constraint {CONSTRAINTS[image]}"
    assert all(pinned in line or "--no-deps" in line for line in installs) and any(pinned in line for line in installs)


@each_image
def test_its_command_is_parsed_by_the_real_parser(image: str) -> None:
    words = last(image, "ENTRYPOINT").words
    assert words == ["tandem", "router" if image == "router" else "serve"]
    args = last(image, "CMD").words
    port = parse(words[1], args).port
    assert str(port) in last(image, "EXPOSE").rest.split()
    assert f"127.0.0.1:{port}/" in last(image, "HEALTHCHECK").rest


def parse(command: str, args: list[str]) -> Any:
    if command == "router":
        config = router_command.config_of(router_command.build_parser().parse_strict(args))
        check_config(config)
        return config
    return config_from(serve_command.build_parser().parse_strict(args), ServerConfig)


def test_the_router_s_image_has_no_torch_and_each_worker_s_has_what_it_needs() -> None:
    installs = {i: " ".join(s.rest for s in steps(i) if "--constraint" in s.rest) for i in IMAGES}
    assert '".[k8s,otel]"' in installs["router"] and "torch" not in installs["router"]
    assert '".[engine,nixl-cpu,mooncake-cpu,otel]"' in installs["worker-cpu"] and "+cpu" in installs["worker-cpu"]
    assert (
        '".[engine,nixl-cu13,mooncake-cu13,otel]"' in installs["worker-cuda"] and "+cpu" not in installs["worker-cuda"]
    )


def pins_in(file: str) -> dict[str, str]:
    lines = (REPO / "deploy" / "docker" / file).read_text().splitlines()
    return {name.replace("_", "-").lower(): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("file", FILES)
def test_every_direct_dependency_is_pinned_to_a_version_that_the_project_takes(file: str) -> None:
    pins = pins_in(file)
    wanted: list[Requirement] = direct(FILES[file])
    assert len(wanted) > 15
    for requirement in wanted:
        version = pins[requirement.name.replace("_", "-").lower()]
        assert requirement.specifier.contains(version), f"{requirement}: {version}; run `make image-pins`"


def wheels_for_another_cuda(names: Iterable[str]) -> list[str]:
    """Of a set whose torch brings CUDA 13: a wheel for 12 cannot be imported beside it, or is slower."""
    return [name for name in names if name.endswith("-cu12") or name in (MOONCAKE[None], MOONCAKE[12])]


def test_the_cuda_image_has_nothing_for_another_cuda_than_torch_s() -> None:
    pins = pins_in("constraints-cuda.txt")
    assert torch_cuda_major(pins["torch"]) == 13
    assert wheels_for_another_cuda(pins) == [] and NIXL[13] in pins and MOONCAKE[13] in pins
    assert wheels_for_another_cuda(pins_in("constraints.txt")) == [MOONCAKE[None], NIXL[None]]


def test_both_sets_agree_where_they_have_the_same() -> None:
    cpu, cuda = pins_in("constraints.txt"), pins_in("constraints-cuda.txt")
    assert {name: cpu[name] for name in cuda if name in cpu} == {name: cuda[name] for name in cuda if name in cpu}
    assert cuda.keys() - cpu.keys() == {NIXL[13], MOONCAKE[13]}


def config_of(name: str) -> Any:
    return parse("router" if name == "router" else "serve", SERVICES[name]["command"])


def test_compose_starts_one_of_each_and_they_find_each_other() -> None:
    assert sorted(SERVICES) == ["decode", "prefill", "router"]
    address = {name: service["networks"]["cluster"]["ipv4_address"] for name, service in SERVICES.items()}
    router: RouterConfig = config_of("router")
    assert [(urlsplit(url).hostname, urlsplit(url).port, port) for url, port in router.prefill] == [
        (address["prefill"], config_of("prefill").port, 8998)
    ]
    assert [(urlsplit(url).hostname, urlsplit(url).port) for url in router.decode] == [
        (address["decode"], config_of("decode").port)
    ]
    for name in ("prefill", "decode"):
        disagg = config_from(serve_command.build_parser().parse_strict(SERVICES[name]["command"]), DisaggConfig)
        assert disagg.disaggregation_mode == name
        assert disagg.disaggregation_control_host == address[name]
    assert SERVICES["router"]["ports"] == [f"127.0.0.1:8080:{router.port}"]  # a laptop's cluster is a laptop's


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_each_compose_service_is_hardened_and_has_its_files(name: str) -> None:
    service = SERVICES[name]
    dockerfile = REPO / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
    assert dockerfile.exists() and service["image"].startswith(f"tandem-{dockerfile.name.partition('.')[0]}:")
    user, group = service["user"].split(":-")[1:]
    assert int(user.partition("}")[0]) > 0 and int(group.rstrip("}")) > 0
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and "privileged" not in service
    files = [arg.partition("=")[2] for arg in service["command"] if "=/" in arg]
    assert files and all(path.removeprefix("/run/secrets/") in service["secrets"] for path in files)
    assert set(service["secrets"]) == set(COMPOSE["secrets"])
    assert int(service["stop_grace_period"].rstrip("s")) >= config_of(name).drain_timeout_s + 5


def test_compose_s_keys_are_those_that_the_script_makes() -> None:
    script = (REPO / "deploy" / "kubernetes" / "make_secrets.sh").read_text()
    for name, secret in COMPOSE["secrets"].items():
        assert name in script and secret["file"] == f"kubernetes/base/secrets/{name}"


def test_the_workers_share_what_shared_memory_needs() -> None:
    prefill, decode = SERVICES["prefill"], SERVICES["decode"]
    assert prefill["ipc"] == "shareable" and decode["ipc"] == decode["pid"] == "service:prefill"
    assert prefill["user"] == decode["user"] and "shm_size" in prefill


def test_the_script_makes_keys_once_and_for_the_owner_only(tmp_path: Path) -> None:
    script = shutil.copy(REPO / "deploy" / "kubernetes" / "make_secrets.sh", tmp_path)
    subprocess.run(["bash", script], check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "base" / "secrets").iterdir()}
    assert set(made) == set(COMPOSE["secrets"]) and len(set(made.values())) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in made.values())
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "base" / "secrets").iterdir())
    subprocess.run(["bash", script], check=True, capture_output=True)
    assert made == {path.name: path.read_text() for path in (tmp_path / "base" / "secrets").iterdir()}
