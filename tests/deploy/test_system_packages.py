"""deploy/system_packages.sh runs itself, on a PATH where every command that touches the machine is a stub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/system_packages.sh"
BASH = "/bin/bash"
LIBRARIES = ["libibverbs1", "libnuma1", "libcurl4"]


class Machine:
    """A folder of stub commands; each call of apt-get is a line in a log."""

    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.log = folder / "calls"
        self.stub("ldconfig", "true")
        self.stub("python3", f'exec {sys.executable} "$@"')

    def stub(self, name: str, body: str) -> None:
        path = self._bin / name
        path.write_text(f"#!{BASH}\n{body}\n")
        path.chmod(0o755)

    def user(self, uid: int, *, sudo: bool) -> None:
        self.stub("id", f"echo {uid}")
        self.stub("sudo", '[ "$1" = -n ] || exit 9; shift; SUDO=sudo- "$@"' if sudo else "exit 1")

    def apt_get(self, *, status: int = 0) -> None:
        self.stub("apt-get", f'echo "${{SUDO:-}}apt-get $*" >> {self.log}; exit {status}')

    def run(self, *args: str) -> str:
        """What it prints to stderr."""
        env = {**os.environ, "PATH": str(self._bin)}
        done = subprocess.run([BASH, SCRIPT, *args], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.apt_get()
    return machine


@pytest.mark.parametrize(("uid", "sudo", "prefix"), [(0, False, ""), (1000, True, "sudo-")], ids=["root", "sudo"])
def test_what_is_missing_is_installed(machine: Machine, uid: int, sudo: bool, prefix: str):
    machine.user(uid, sudo=sudo)
    said = machine.run()
    update, install = machine.calls()
    assert update.startswith(f"{prefix}apt-get update")
    assert install.startswith(f"{prefix}apt-get install -y --no-install-recommends")
    assert set(LIBRARIES) <= set(install.split())
    assert said == ""


def test_without_rights_it_prints_the_line_to_run(machine: Machine):
    machine.user(1000, sudo=False)
    said = machine.run()
    assert machine.calls() == []
    assert "sudo apt-get install -y --no-install-recommends" in said
    assert set(LIBRARIES) <= set(said.split())


def test_without_apt_it_names_the_packages(machine: Machine, tmp_path: Path):
    machine.user(0, sudo=False)
    (tmp_path / "bin/apt-get").unlink()
    said = machine.run()
    assert "package manager" in said and all(name in said for name in LIBRARIES)


def test_an_installation_that_fails_is_said(machine: Machine):
    machine.user(0, sudo=False)
    machine.apt_get(status=100)
    assert "could not install" in machine.run()


def test_the_server_that_comes_with_promtool_is_turned_off(machine: Machine):
    machine.user(0, sudo=False)
    machine.stub("systemctl", f'echo "systemctl $*" >> {machine.log}')
    machine.run("tests")
    _, install, *rest = machine.calls()
    assert "prometheus" in install.split() and rest == ["systemctl disable --now prometheus"]


@pytest.mark.parametrize("args", [(), ("tests",)], ids=["there is none", "it was there before"])
def test_nothing_else_is_turned_off(machine: Machine, args: tuple[str, ...]):
    machine.user(0, sudo=False)
    machine.stub("promtool", "true")
    machine.stub("systemctl", f'echo "systemctl $*" >> {machine.log}')
    machine.run(*args)
    assert not any(call.startswith("systemctl") for call in machine.calls())
