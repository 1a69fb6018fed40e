"""A worker whose ranks are on two machines, alone and with a peer: it answers, and ends by name with any of them."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.client import SETTLE_S, assert_state_stays, generate_all, post, session, state_of, wait_for_state
from tests.e2e.cluster import child_of, wait_until
from tests.e2e.ranks.nodes import FLAGS, Part, fleet
from tests.e2e.ranks.test_ranks import prompt_of
from tools.family import children, family
from tools.faults.machines import Machines
from tools.recall.oracle import continuation

WITHIN_S = 20.0
RESEND_S = 120.0  # how long a kernel may hold bytes of a dead process
PROMPTS = [prompt_of(size, seed) for seed, size in enumerate((3, 90, 40, 12))]
BODIES = [{"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 16}} for ids in PROMPTS]
TOKENS = [continuation(ids, 16) for ids in PROMPTS]


async def test_two_machines_answer_and_end_together(tmp_path: Path) -> None:
    with fleet(tmp_path, "near", "far") as machines:
        group = ("serve", *FLAGS, "--tp-size", "2", *machines.group("near", 2))
        far = machines.start("far", *group, "--node-rank", "1")
        near = machines.start("near", *group, *machines.off_loopback("near"))
        url = near.wait()["url"]
        assert far.ready.exists()
        answers = await generate_all(url, [{**body, "stream": True} for body in BODIES])
        assert [answer["output_ids"] for answer in answers] == TOKENS

        members = [process for end in (near, far) for process in family(end.process.pid)[1:]]
        (rank,) = children(far.process.pid)
        rank.kill()
        wait_until(
            lambda: near.process.poll() is not None and far.process.poll() is not None,
            within_s=WITHIN_S,
            what="the end of both",
        )
        _, left = psutil.wait_procs(members, timeout=WITHIN_S)
        assert not left, left
        assert (near.process.returncode, far.process.returncode) == (1, 1)
        assert [len(end.errors()) for end in (near, far)] == [1, 1]
        assert near.errors()[0].startswith("tandem serve: error: rank 1 of 2 (node 1, ")
        assert far.errors()[0] == f"tandem serve: error: rank 1 of 2 (pid {rank.pid}) ended: SIGKILL; node 0 ends, too"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("--tp-size", "4"), ("--pp-size", "4")], ids=" ".join)
async def test_four_machines_answer_and_end_together(tmp_path: Path, sizes: tuple[str, str]) -> None:
    names = [f"m{number}" for number in range(4)]
    with fleet(tmp_path, *names) as machines:
        group = ("serve", *FLAGS, *sizes, *machines.group("m0", 4))
        others = [machines.start(name, *group, "--node-rank", name[1:]) for name in names[1:]]
        near = machines.start("m0", *group, *machines.off_loopback("m0"))
        answers = await generate_all(near.wait()["url"], BODIES)
        assert [answer["output_ids"] for answer in answers] == TOKENS
        nodes = [near, *others]
        (rank,) = children(others[-1].process.pid)
        rank.kill()
        wait_until(
            lambda: all(node.process.poll() is not None for node in nodes), within_s=WITHIN_S, what="the end of all"
        )
        assert [len(node.errors()) for node in nodes] == [1] * 4
        of_node_3 = 3 if "--tp-size" in sizes else 2  # node 0 has the leader, whose stage is the last
        assert near.errors()[0].startswith(f"tandem serve: error: rank {of_node_3} of 4 (node 3, ")
        assert f"(pid {rank.pid}) ended: SIGKILL" in others[-1].errors()[0]
        assert all("node 0 (--dist-init-addr " in node.errors()[0] for node in others[:-1])


@dataclass
class Pair:
    """A prefill and a decode worker, one of them on two machines, and a router. `far`: the second machine's part."""

    prefill: Part
    decode: Part
    far: Part
    machines: Machines | None
    router: str
    urls: dict[str, str]

    @property
    def far_rank(self) -> psutil.Process:
        return next(p for p in family(self.far.process.pid)[1:] if "disagg.processes.rank_process" in p.cmdline())


@contextmanager
def pair(folder: Path, backend: str, wide: str, *, as_pods: bool = False) -> Iterator[Pair]:
    """`wide`: the role on two machines. `as_pods`: the one without HTTP gets flags of its own address, as in Kubernetes."""
    with fleet(folder, "near", "far", "other") as machines:
        common = ("serve", *FLAGS, "--kv-units", "2", "--disaggregation-kv-checksum", "--drain-timeout", "1")
        common += ("--disaggregation-transfer-backend", backend, "--disaggregation-bootstrap-port", "0")
        group = ["--tp-size", "2", *machines.group("near", 2), "--disaggregation-mode", wide]
        env = {"UCX_TLS": "tcp"}  # the kernel is one, so that UCX would find shared memory
        own = ["--host", "0.0.0.0", "--disaggregation-control-host", machines.host("far")] if as_pods else []
        far = machines.start("far", *common, *group, "--node-rank", "1", *own, own_pids=True, env=env)
        parts = {wide: machines.start("near", *common, *group, *machines.off_loopback("near"), env=env)}
        (role,) = {"prefill", "decode"} - {wide}
        alone = ["--disaggregation-mode", role, *machines.off_loopback("other")]
        parts[role] = machines.start("other", *common, *alone, env=env)
        urls = {role: part.wait()["url"] for role, part in parts.items()}
        router = machines.start(
            "router",
            "router",
            "--pd-disaggregation",
            "--route",
            "pair",
            "--prefill",
            urls["prefill"],
            "--decode",
            urls["decode"],
            "--port",
            "0",
        )
        yield Pair(parts["prefill"], parts["decode"], far, machines.machines, router.wait()["router"], urls)


async def _answers(workers: Pair) -> None:
    answers = await generate_all(workers.router, BODIES)
    assert [answer["output_ids"] for answer in answers] == TOKENS
    received = (await state_of(workers.urls["decode"]))["counters"]
    assert received["kv_checksum_verified"] == len(PROMPTS)


async def _until_pages_are_exposed(workers: Pair) -> "asyncio.Task[object]":
    """Prefill pauses, so that decode waits for KV."""
    async with session() as http:
        status, _ = await post(http, f"{workers.urls['prefill']}/pause_generation", {})
        assert status == 200
    asked = asyncio.create_task(generate_all(workers.router, BODIES[:1]))
    await wait_for_state(workers.urls["decode"], lambda state: state["counters"].get("exposed_rooms", 0) > 0)
    return asked


@pytest.mark.slow
async def test_prefill_on_two_machines(tmp_path: Path) -> None:
    """Its rank on the other machine is killed while decode waits for it: decode's pages stay, for what it may have sent."""
    with pair(tmp_path, "nixl", "prefill") as workers:
        await _answers(workers)
        asked = await _until_pages_are_exposed(workers)
        workers.far_rank.kill()
        wait_until(lambda: workers.prefill.process.poll() is not None, within_s=WITHIN_S, what="the end of prefill")
        assert workers.prefill.errors()[0].startswith("tandem serve: error: rank 1 of 2 (node 1, ")
        with suppress(AssertionError):
            await asked  # the router says that it failed
        await wait_for_state(workers.urls["decode"], lambda state: state["pages"]["quarantined"] > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "wide"), [("nixl", "decode"), ("mooncake", "decode"), ("mooncake", "prefill")])
async def test_either_side_on_two_machines(tmp_path: Path, backend: str, wide: str) -> None:
    with pair(tmp_path, backend, wide, as_pods=backend == "mooncake") as workers:
        await _answers(workers)


@pytest.mark.slow
async def test_pages_stay_until_the_rank_on_the_other_machine_is_proven_dead(tmp_path: Path) -> None:
    """The leader is dead; the other rank is frozen, as all of its machine, and could still write. Then it ends, too."""
    with pair(tmp_path, "mooncake", "prefill") as workers:
        asked, rank = await _until_pages_are_exposed(workers), workers.far_rank
        for process in family(workers.far.process.pid)[1:]:
            process.send_signal(signal.SIGSTOP)
        child_of(workers.prefill.process.pid, "scheduler").kill()
        with suppress(AssertionError):
            await asked
        decode = workers.urls["decode"]
        await wait_for_state(decode, lambda state: state["pages"]["quarantined"] > 0)
        await assert_state_stays(decode, lambda state: state["pages"]["quarantined"] > 0, for_s=RESEND_S + 10)
        rank.kill()
        await wait_for_state(
            decode, lambda state: state["pages"]["quarantined"] == 0, every_s=1.0, within_s=RESEND_S + SETTLE_S
        )


@pytest.mark.slow
async def test_pages_stay_while_the_other_machine_cannot_be_reached(tmp_path: Path) -> None:
    """Its cable is pulled: prefill ends, and decode proves nothing of the rank there before the cable is back."""
    with pair(tmp_path, "nixl", "prefill") as workers:
        if workers.machines is None:
            pytest.skip("needs network namespaces")
        asked = await _until_pages_are_exposed(workers)
        workers.machines.pull("far")
        wait_until(lambda: workers.prefill.process.poll() is not None, within_s=60.0, what="the end of prefill")
        assert workers.prefill.errors()[0].startswith("tandem serve: error: rank 1 of 2 (node 1, ")
        with suppress(AssertionError):
            await asked
        decode = workers.urls["decode"]
        wait_until(
            lambda: workers.far.process.poll() is not None, within_s=60.0, what="the end of the far machine's part"
        )
        await assert_state_stays(decode, lambda state: state["pages"]["quarantined"] > 0, for_s=RESEND_S + 10)
        workers.machines.plug("far")
        await wait_for_state(
            decode, lambda state: state["pages"]["quarantined"] == 0, every_s=1.0, within_s=RESEND_S + SETTLE_S
        )
