"""Pinned memory and the allocator, from literals; a worker that refuses at the start."""

import os
import resource
import subprocess
import sys

import pytest

from disagg.transfer_machine import check_allocator, expandable_segments, memlock_warning
from service.flags import ConfigError

IPC_LOCK = 1 << 14
ALL = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limit_bytes", "capabilities", "has_rdma", "warns"),
    [
        (8 << 20, 0, True, True),
        (8 << 20, ~IPC_LOCK & (1 << 40) - 1, True, True),
        (8 << 20, IPC_LOCK, True, False),
        (ALL, 0, True, False),
        (8 << 20, 0, False, False),
    ],
)
def test_memory_that_rdma_cannot_pin(limit_bytes: int, capabilities: int, has_rdma: bool, warns: bool) -> None:
    text = memlock_warning(limit_bytes=limit_bytes, effective_capabilities=capabilities, has_rdma=has_rdma)
    assert (text is not None) == warns
    assert text is None or ("may pin 8192 KiB" in text and "LimitMEMLOCK=infinity" in text)


@pytest.mark.parametrize(
    ("text", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:128, expandable_segments : True", True),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True,garbage_collection_threshold:0.8", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("not_expandable_segments:True", False),
    ],
)
def test_expandable_segments(text: str, expandable: bool) -> None:
    assert expandable_segments(text) == expandable


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_pool_that_peers_cannot_map_is_refused(name: str) -> None:
    check_allocator({name: "max_split_size_mb:128"})
    with pytest.raises(ConfigError, match=f"{name}: expandable_segments:True .* expandable_segments:False"):
        check_allocator({name: "expandable_segments:True"})


def test_a_worker_says_so_before_it_loads_the_model() -> None:
    env = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    argv = [sys.executable, "-m", "deploy", "serve", "--port=0", "--device=cuda", "--disaggregation-mode=decode"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "PYTORCH_ALLOC_CONF: expandable_segments:True" in done.stderr, done.stderr
