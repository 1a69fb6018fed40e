"""How an engine ends: closed, with its program, by a death; and what a program sees that has no `if __name__ == "__main__"`."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest

from deploy.chat.local_cluster import NotStarted
from service.process.child_process import HTTP_SERVER_VARIABLE, SERVER_VARIABLE
from tandem import LLM, AsyncLLM, Cluster, ConfigError, EngineDeadError, TandemError
from tests.e2e.cluster import wait_until
from tests.e2e.leftovers import Leftovers
from tests.tandem.conftest import FLAGS
from tests.tandem.test_llm import LONG, PROMPT, running
from tools.family import children, lives

STARTED = "tandem up: router, prefill-0, decode-0 (logs: /tmp/x)"
# As a beginner writes it: no guard, no `close`. It ends with its input, so that the test may look at the engine before.
PROGRAM = """
import sys
from tandem import LLM
llm = LLM(max_total_tokens=16384)
print("ready", flush=True)
try:
    llm.generate(["k17 v42 k17"] * 2, max_tokens=4000, ignore_eos=True)
except KeyboardInterrupt:
    print(llm.generate("k17 v42 k17", max_tokens=1, temperature=0)[0].text, flush=True)
sys.stdin.read()
"""
GONE_S = 10.0


def schedulers(llm: LLM) -> list[psutil.Process]:
    pids = llm._services.leaders.info["rank_pids"]
    assert isinstance(pids, list)
    return [psutil.Process(pid) for pid in pids]


def test_a_dead_scheduler_ends_calls_with_one_clear_error(tmp_path: Path) -> None:
    llm = LLM(**FLAGS)
    (scheduler,) = schedulers(llm)
    left = Leftovers(scheduler.pid, tmp_path)
    message = r"the scheduler process ended \(status -9\)"
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [PROMPT] * 3, **LONG)
        wait_until(lambda: bool(running(llm)), within_s=30, what="it runs")
        scheduler.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=message):
            call.result(timeout=30)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=message):
            llm.generate(PROMPT, max_tokens=1)
    llm.close()
    left.assert_gone(within_s=GONE_S)


def test_a_closed_engine_fails_its_calls(tmp_path: Path) -> None:
    with LLM(**FLAGS) as llm:
        left = Leftovers(schedulers(llm)[0].pid, tmp_path)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(llm.generate, PROMPT, **LONG)
            wait_until(lambda: bool(running(llm)), within_s=30, what="it runs")
            if (pid := os.fork()) == 0:  # a fork, as a data loader is, neither ends it nor waits for ever
                llm.close()
                try:
                    llm.generate(PROMPT)
                except EngineDeadError as error:
                    os._exit(7 if "which forked this one" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7 and running(llm)
            llm.close()
            with pytest.raises(EngineDeadError, match="this engine is closed; make another LLM"):
                call.result(timeout=30)
        with pytest.raises(EngineDeadError, match="is closed"):
            llm.generate(PROMPT)
    left.assert_gone(within_s=GONE_S)


def test_an_engine_ends_with_its_last_reference(tmp_path: Path) -> None:
    llm = LLM(**FLAGS)
    left = Leftovers(schedulers(llm)[0].pid, tmp_path)
    del llm
    gc.collect()
    left.assert_gone(within_s=GONE_S)


def test_what_the_engine_cannot_start_with_is_in_the_error() -> None:
    """Also what its child process alone finds out."""
    for flags, message in (
        ({"model": "/nowhere"}, "/nowhere"),
        ({"device": "cuda"}, "device cuda: "),
        ({"tokenizer_path": "x"}, "tokenizer_path: the checkpoint decides"),
        ({"lora_paths": {"a": "/nowhere"}}, "lora_paths a: /nowhere: no such directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(**flags)


async def test_an_engine_that_starts_beside_the_loop_reports_at_the_first_call() -> None:
    llm = AsyncLLM("/nowhere")
    for _ in range(2):
        with pytest.raises(ConfigError, match="/nowhere"):
            await llm.embed("a")
    llm.close()


def engine_of(worker: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    """An engine whose worker has these parts."""
    made = SimpleNamespace(close=lambda: None, **worker)
    monkeypatch.setattr("tandem.llm.LocalWorker", lambda make_plan: made)
    return AsyncLLM()


async def test_a_call_that_is_cancelled_while_the_model_loads_leaves_it_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading: Future[Any] = Future()
    call = asyncio.create_task(engine_of({"started": loading}, monkeypatch).pause())
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() and not loading.cancelled()


@pytest.mark.parametrize("over", [EngineDeadError("it died"), None])
async def test_a_call_that_the_end_of_the_engine_cancels_says_so(
    over: EngineDeadError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, ended = Future[Any](), Future[Any]()
    ready.set_result(None)
    ended.cancel()

    def submit(call: Coroutine[Any, Any, object]) -> Future[Any]:
        call.close()
        return ended

    llm = engine_of({"started": ready, "submit": submit, "over": over}, monkeypatch)
    with pytest.raises(asyncio.CancelledError if over is None else EngineDeadError):
        await llm.pause()


@pytest.mark.usefixtures("ctrl_c")
def test_a_program_without_guard_or_close_leaves_no_process(tmp_path: Path) -> None:
    """Its engine is started anew, not forked by the tests' server. Ctrl-C ends the call, not the engine."""
    env = {**os.environ, SERVER_VARIABLE: "", HTTP_SERVER_VARIABLE: "", "TMPDIR": str(tmp_path)}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command, pipe = [sys.executable, str(program)], subprocess.PIPE
    process = subprocess.Popen(command, env=env, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        left = Leftovers(process.pid, tmp_path)
        (scheduler,) = children(process.pid)
        begun_s = scheduler.cpu_times().user
        wait_until(lambda: scheduler.cpu_times().user > begun_s + 0.2, within_s=60, what="it computes")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == " v42\n" and lives(scheduler)
        process.stdin.close()
        assert process.wait(timeout=30) == 0
    left.assert_gone(within_s=GONE_S)


def test_a_cluster_answers_openais_client_and_ends(tmp_path: Path) -> None:
    with Cluster(max_total_tokens=16384, transfer_backend="nixl", served_model_name="m", api_key="secret") as cluster:
        (up,) = [p for p in psutil.Process().children() if "up" in p.cmdline()]
        left = Leftovers(up.pid, tmp_path)
        assert len(left.family) >= 4
        with cluster.openai(max_retries=0) as client:
            answer = client.completions.create(model="m", prompt="k17 v42 k17", max_tokens=1, temperature=0)
        assert answer.choices[0].text == " v42"
    cluster.close()
    left.assert_gone(within_s=GONE_S)


def test_a_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match=r"unknown argument 'decodes=2'; did you mean decode\?$"):
        Cluster(decodes=2)
    with pytest.raises(ConfigError, match=r"^model_path /nowhere: no such directory"):
        Cluster("/nowhere")
    with pytest.raises(ConfigError, match=r"^prefill: must be 1 to 64, got 0"):
        Cluster(prefill=0)


@pytest.mark.parametrize(
    ("status", "lines", "kind", "message"),
    [
        (2, "tandem up: gpu: is ambiguous (see tandem up --help)", ConfigError, "gpu: is ambiguous"),
        (1, "tandem up: error: --port: 8000 is taken", ConfigError, "port: 8000 is taken"),
        (1, f"{STARTED}\ntandem up: error: decode-0 died", TandemError, "the cluster did not start: decode-0 died"),
        (9, f"{STARTED}\nKilled", TandemError, f"the cluster did not start: {STARTED} / Killed"),
        (9, "", TandemError, "the cluster did not start: 9"),
    ],
)
def test_why_a_cluster_ended(
    status: int, lines: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong flag is found before anything starts."""

    @contextmanager
    def ended(argv: Sequence[str], *, output: IO[str], is_wanted: object) -> Iterator[str]:
        assert argv == ["--unified"]  # one worker, which a default for prefill workers would refuse
        output.write(lines)
        raise NotStarted(status)
        yield ""

    monkeypatch.setattr("tandem.cluster.local_cluster", ended)
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        Cluster(unified=True)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install 'tandem-serve\[openai\]'"):
        Cluster.openai(Cluster.__new__(Cluster))
