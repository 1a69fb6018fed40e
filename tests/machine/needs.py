"""What the tests need of the machine and of the environment, and the line that brings what is missing."""

import subprocess
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

TREE = Path(__file__).parents[2]
TESTS = TREE / "tests"
SCRIPT = TREE / "deploy/system_packages.sh"
INSTALL_PACKAGES = "bash deploy/system_packages.sh tests"
INSTALL_MODULES = "make setup"
# One of each extra that the tests use; they come together. Looked for where the whole suite is to run.
MODULES = ("torch", "nixl_cu12", "mooncake", "kubernetes", "opentelemetry", "prompt_toolkit", "hypothesis")
BROWSER = (
    "e2e/shared/test_dashboard.py",
    "machine",
    "router/http/conftest.py",
    "router/http/test_chat_kept.py",
    "router/http/test_chat_page.py",
    "router/http/test_cross_origin.py",
    "router/http/test_dashboard.py",
    "router/http/test_home.py",
)
MOONCAKE = ("deploy", "e2e", "machine", "security", "tools", "transfer")
OTHER_CPUS = ("kernels/test_other_cpus.py",)
ALERTS = ("deploy/test_alert_rules.py",)
# Which tests need a package. A package that is not here is needed by all.
USERS = {
    "chromium": BROWSER,
    "libibverbs1": MOONCAKE,
    "libnuma1": MOONCAKE,
    "libcurl4": MOONCAKE,
    "prometheus": ALERTS,
    "gcc-aarch64-linux-gnu": OTHER_CPUS,
    "libc6-dev-arm64-cross": OTHER_CPUS,
    "qemu-user": OTHER_CPUS,
    "python3-venv": (),  # of `make setup`, not of tests
}


def complaint(selected: Sequence[Path] = (TESTS,)) -> str:
    """One line that names what the `selected` files and folders lack and what brings it; "" if the machine has all."""
    packages = [
        name for name in missing_packages() if any(_meet(selected, TESTS / user) for user in USERS.get(name, [""]))
    ]
    modules = [name for name in MODULES if find_spec(name) is None] if _whole(selected) else []
    said = [
        f"{kind} that are missing here ({' '.join(names)}); run: {line}"
        for kind, names, line in (
            ("system packages", packages, INSTALL_PACKAGES),
            ("Python packages", modules, INSTALL_MODULES),
        )
        if names
    ]
    return f"the tests need {', and '.join(said)}" if said else ""


def missing_packages() -> list[str]:
    """Debian's names of what this machine lacks, by the script that would install it."""
    done = subprocess.run(["bash", SCRIPT, "--list", "tests"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def _whole(selected: Iterable[Path]) -> bool:
    return any(TESTS.is_relative_to(path) for path in selected)


def _meet(selected: Iterable[Path], user: Path) -> bool:
    return any(path.is_relative_to(user) or user.is_relative_to(path) for path in selected)
