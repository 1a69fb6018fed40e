"""A GPU engine's window and polls against a link of 400 GB/s, in virtual time: the pipe must not run dry between two polls."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.transfer.cores import JoinedCores
from transfer_backends.contract import Caps, KVArgs, OpState, Pieces, Region
from transfer_backends.engines.fake import FakeEngine
from transfer_backends.engines.gpu_window import of_gpu
from transfer_backends.kvpoll import KVPoll
from transfer_backends.prefill.driver import Connected, EngineDriver
from transfer_backends.prefill.trials import Trials

LINK_BYTES_A_S = 400e9
POST_S = 20e-6  # of this thread, for a post
PIECE_S = 4.5e-6  # for a copy that it starts
POLL_S = 2e-6
LATE_S = 60e-6  # a thread that sleeps wakes up so much later than it asked for
PAGE_BYTES = 36 * 65536  # 16 tokens of Qwen3-8B
NUM_PAGES = 16384


class Time:
    """The clock of the run, and the event that the sender thread sleeps on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s + LATE_S

    @contextlib.contextmanager
    def locked(self) -> Iterator[float]:
        yield self.now_s


class Copying:
    """An operation of which `left` bytes have not landed."""

    def __init__(self, size_bytes: int) -> None:
        self.left = float(size_bytes)


class Link(FakeEngine):
    """Its operations share the rate, as copies on streams of their own: those posted together end together."""

    def __init__(self, time: Time, caps: Caps) -> None:
        super().__init__()
        self.caps = caps
        self._time = time
        self._seen_s = 0.0
        self._copying: list[Copying] = []

    def post(self, peer: Any, pieces: Pieces) -> Any:
        self._time.now_s += POST_S + PIECE_S * len(pieces)
        self._advance()
        self._copying.append(Copying(pieces.size_bytes))
        return self._copying[-1]

    def poll(self, op: Any) -> OpState:
        self._time.now_s += POLL_S
        self._advance()
        return OpState.PENDING if op in self._copying else OpState.DONE

    def _advance(self) -> None:
        bytes_left = (self._time.now_s - self._seen_s) * LINK_BYTES_A_S
        self._seen_s = self._time.now_s
        while self._copying and bytes_left > 0:
            share = min(bytes_left / len(self._copying), min(op.left for op in self._copying))
            bytes_left -= share * len(self._copying)
            for op in self._copying:
                op.left -= share
            self._copying = [op for op in self._copying if op.left > 1.0]


def utilisation(caps: Caps, pages: np.ndarray) -> float:
    """Share of the link's rate at which `pages` leave, from the first to the last."""
    time = Time()
    kv = Region(1 << 20, NUM_PAGES, PAGE_BYTES, 0)
    pair = JoinedCores(
        args=KVArgs(kv, Region(1 << 50, 16, 64, None), "m", 16, "bf16"), caps=caps, pages=pages.tolist(), sends=False
    )
    engine = Link(time, caps)
    trials = Trials(caps=caps, machine="", on_gpu=True, clock=lambda: time.now_s)
    driver = EngineDriver(engine=engine, of_ranks=engine, core=pair.core, trials=trials, locked=time.locked)
    driver._event = time  # type: ignore[assignment]
    driver._peers["d"] = Connected(engine, "d")
    pair.send(pages.tolist(), row=1)
    while pair.states[0] is not KVPoll.Success:
        driver._rest(driver.step())
        assert time.now_s < 10.0
    return len(pages) * PAGE_BYTES / LINK_BYTES_A_S / time.now_s


CPU_CAPS = FakeEngine().caps
GPU_CAPS = of_gpu(replace(CPU_CAPS, max_inflight=4096, max_post_pieces=1024), inside_machine="cuda_ipc")
NEIGHBOURS = np.arange(1, 8193)
SCATTERED = np.random.default_rng(1).permutation(NUM_PAGES - 1)[:8192] + 1


@pytest.mark.parametrize("pages", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
def test_a_gpu_s_window_keeps_its_link_busy(pages: np.ndarray) -> None:
    assert utilisation(GPU_CAPS, pages) >= 0.9


def test_naps_of_a_cpu_would_let_the_link_run_dry() -> None:
    assert utilisation(replace(GPU_CAPS, longest_nap_s=CPU_CAPS.longest_nap_s), NEIGHBOURS) < 0.8
