"""Memory that is left, by files as Linux writes them, and by this machine's own."""

from pathlib import Path

import pytest

from engine.kv.host_memory import available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
IN_POD = MACHINE | {"proc/self/cgroup": "0::/pod/engine\n"}


def v2(folder: str, limit: str, used: int, idle: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    return {
        f"{at}memory.max": f"{limit}\n",
        f"{at}memory.current": f"{used}\n",
        f"{at}memory.stat": f"anon 5\ninactive_file {idle}\n",
    }


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (MACHINE, 8 * GIB),
        (IN_POD, 8 * GIB),
        (IN_POD | v2("pod/engine/", "max", 5), 8 * GIB),
        (IN_POD | v2("pod/engine/", str(4 * GIB), 3 * GIB), GIB),
        (IN_POD | v2("pod/engine/", str(4 * GIB), 3 * GIB, idle=GIB), 2 * GIB),
        (IN_POD | v2("pod/engine/", "max", 5) | v2("pod/", str(4 * GIB), 3 * GIB), GIB),
        (IN_POD | v2("", str(4 * GIB), GIB), 3 * GIB),
        (IN_POD | v2("pod/engine/", str(4 * GIB), 5 * GIB), 0),
        (
            MACHINE
            | {
                "proc/self/cgroup": "7:cpu:/a\n4:blkio,memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            },
            GIB,
        ),
        (MACHINE | {"proc/self/cgroup": "0::/../outside\n"}, 8 * GIB),
    ],
)
def test_the_least_of_machine_and_groups(tmp_path: Path, files: dict[str, str], left: int) -> None:
    assert available_bytes(write(tmp_path, files)) == left


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_machine_says() -> None:
    left = available_bytes()
    assert left is not None and left > 0
