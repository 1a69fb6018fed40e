"""A bare Debian root: made by mmdebstrap, furnished with the package clients' settings and a clone of this tree."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.fresh import clients

TREE = Path(__file__).parents[2]
CLONE = "root/tandem"  # inside the root
CA_COPY = "etc/ca-of-the-host.pem"  # apart from Debian's file, which the package ca-certificates overwrites
PIP_CACHE = "root/.cache/pip"
REMOVE_TRIES = 5


class CannotCheckError(Exception):
    """This machine cannot make a bare root; the message says why and what would help."""


@contextlib.contextmanager
def bare_root() -> Iterator[Path]:
    """A fresh root with a clone of HEAD; removed at the end, whatever happened."""
    require_machine()
    folder = Path(tempfile.mkdtemp(prefix="tandem-fresh-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    folder.chmod(0o755)  # apt reads in it as another user
    try:
        root = folder / "root"
        _bootstrap(root, folder)
        _furnish(root)
        _clone(root, folder)
        yield root
    finally:
        _remove(folder)


def require_machine() -> None:
    """Raises CannotCheckError where no bare root can be made; installs mmdebstrap if that is all that lacks."""
    if os.geteuid() != 0:
        raise CannotCheckError("it makes a Debian root and mounts in it, which needs root; run: sudo make fresh-check")
    if not shutil.which("apt-get"):
        raise CannotCheckError("it needs Debian's apt and mmdebstrap, and this machine has no apt-get")
    for name in ("git", "setpriv", "unshare"):
        if not shutil.which(name):
            raise CannotCheckError(f"it needs the command {name} (Debian: apt-get install git util-linux)")
    probe = subprocess.run(
        [*NAMESPACES, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        raise CannotCheckError(
            f"this machine refuses namespaces of mounts and processes ({probe.stderr.strip()});"
            " in a container, give it CAP_SYS_ADMIN"
        )
    if not shutil.which("mmdebstrap"):
        _install_mmdebstrap()


# Of what runs in the root: its mounts and processes end with it, also when this process is killed.
NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")


def host_release() -> dict[str, str]:
    """/etc/os-release of this machine."""
    lines = Path("/etc/os-release").read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


def _install_mmdebstrap() -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap"],
    ):
        if subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False).returncode:
            raise CannotCheckError(f"`{' '.join(command)}` failed: mmdebstrap is missing and no archive gives it")


def _bootstrap(root: Path, folder: Path) -> None:
    release = host_release()
    codename = release["VERSION_CODENAME"] if release.get("ID") == "debian" else "bookworm"
    settings = folder / "apt.conf"
    settings.write_text(clients.apt_settings())
    sources = clients.apt_sources(codename) if release.get("ID") == "debian" else []
    command = [
        *("mmdebstrap", "--mode=root", "--variant=minbase", f"--aptopt={settings}"),
        *(codename, str(root), *map(str, sources)),
    ]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise CannotCheckError(f"mmdebstrap could not make a root of Debian {codename} (its messages are above)")


def _furnish(root: Path) -> None:
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", root / "etc" / name)
    settings = clients.pip_settings(clients.pip_config_files(os.environ))
    (root / "etc/pip.conf").write_text(clients.pip_conf(settings))
    for named in clients.local_files(_values(settings)):
        copy = root / named.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(named, copy)
    if bundle := clients.ca_bundle(os.environ, settings):
        for copy in (root / CA_COPY, root / clients.CA_BUNDLE.relative_to("/")):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle, copy)


def _clone(root: Path, folder: Path) -> None:
    config = (
        folder / "gitconfig"
    )  # git refuses trees of another user unless a file of settings, no argument, allows them
    config.write_text("[safe]\n\tdirectory = *\n")
    command = ["git", "clone", "-q", f"file://{TREE}", str(root / CLONE)]
    done = subprocess.run(command, env={**os.environ, "GIT_CONFIG_GLOBAL": str(config)}, check=False)
    if done.returncode:
        raise CannotCheckError(
            f"{TREE} cannot be cloned (git's message is above): it needs a git repository with a commit"
        )


def _remove(folder: Path) -> None:
    """What ran in it has ended or is ending: its last files may still appear."""
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(1)
    print(f"fresh-check: could not remove all of {folder}", flush=True)


def bindings() -> list[tuple[Path, str, bool]]:
    """(folder of this machine, where in the root, whether it may be written): what pip's settings point to, and its cache."""
    values = _values(clients.pip_settings(clients.pip_config_files(os.environ)))
    folders = [(path, str(path.relative_to("/")), False) for path in clients.local_folders(values)]
    cache = clients.pip_cache(os.environ)
    return [*folders, (cache, PIP_CACHE, True)] if cache.is_dir() else folders


def _values(settings: clients.PipSettings) -> list[str]:
    """What pip is told by files and by variables."""
    values = [value for options in settings.values() for value in options.values()]
    return [*values, *clients.pip_environment(os.environ).values()]


def environment(root: Path) -> dict[str, str]:
    """Of commands in the root: nothing of this machine's but how to reach registries."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"HOME": "/root", "PATH": path, "TERM": "dumb", **clients.pip_environment(os.environ)}
    return {**env, "PIP_CERT": f"/{CA_COPY}"} if (root / CA_COPY).exists() else env
