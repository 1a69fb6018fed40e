"""How much host memory is left: the machine's, or less where a cgroup above this process says so."""

from pathlib import Path

import pytest

from engine.kv.host_memory import HostMemory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {64 * GIB // 1024} kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/kubepods/pod1\n"}
V1 = {"proc/self/cgroup": "5:cpu:/\n9:memory:/docker/a\n"}


@pytest.mark.parametrize(
    ("files", "expected_gib"),
    [
        ({}, 64),
        (
            V2
            | {
                "sys/fs/cgroup/kubepods/pod1/memory.max": "max\n",
                "sys/fs/cgroup/kubepods/pod1/memory.current": f"{GIB}\n",
            },
            64,
        ),
        (
            V2
            | {
                "sys/fs/cgroup/kubepods/memory.max": f"{16 * GIB}\n",  # above the process' own group
                "sys/fs/cgroup/kubepods/memory.current": f"{10 * GIB}\n",
                "sys/fs/cgroup/kubepods/memory.stat": f"anon {7 * GIB}\ninactive_file {3 * GIB}\n",
            },
            9,
        ),
        (
            V2 | {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/memory.current": f"{5 * GIB}\n"},
            0,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",  # a container sees its group as the base
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
            },
            6,
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, files: dict[str, str], expected_gib: int) -> None:
    assert HostMemory(write(tmp_path, files)).available() == expected_gib * GIB


def test_this_machine_has_some() -> None:
    assert HostMemory().available() > 1 << 20
