"""A worker for the frontend's tests: a real frontend process, and a scheduler stand-in in a thread."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.ipc import IpcPaths
from engine.messages import GenerateRequest
from engine.text.tokenizer import Tokenizer
from tests.frontend.stand_in import StandIn
from tests.frontend.worker_main import WorkerThread

CONTEXT = 512
ROOT = Path(__file__).parents[2]
SECRET = b"by which it knows its router"
# What the stand-in's model, which repeats its prompt, writes as a call of qwen25's format; and the function that it calls.
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 260, "max_position_embeddings": CONTEXT},
    **{"rms_norm_eps": 1e-6, "eos_token_id": 256},
}


def byte_backend(*special: str) -> tokenizers.Tokenizer:
    """One token a byte, and behind them special ones."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


@cache
def byte_tokenizer() -> Tokenizer:
    """One token a byte, BOS 256: the text of any ids is plain to see."""
    backend = byte_backend("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend, config={"bos_token": "<s>", "eos_token": "<s>"})


def write_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def wait_for(what: Callable[[], Any], *, timeout_s: float = 60.0, every_s: float = 0.005) -> Any:
    """Poll until `what` gives something true; its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline_s, "nothing came in time"
        time.sleep(every_s)
    return value


@dataclass
class Worker:
    """`scheduler`: of DP rank 0; `schedulers`: of all ranks."""

    url: str
    http: httpx.Client
    schedulers: tuple[StandIn, ...]
    process: WorkerThread | subprocess.Popen[bytes]
    log: Path

    @property
    def scheduler(self) -> StandIn:
        return self.schedulers[0]

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    @contextmanager
    def stream(self, text: str, **more: Any) -> Iterator[Callable[[], Any]]:
        """A stream of /generate whose first event has come; the value waits for its last event."""
        with self.http.stream("POST", "/generate", json={"text": text, "stream": True, **more}) as response:
            lines = response.iter_lines()
            next(lines)
            yield lambda: json.loads([line for line in lines if line.startswith("data: {")][-1][6:])

    def error(self, path: str, body: Any, status: int = 400, **kwargs: Any) -> Any:
        """The error with which a request is refused; in OpenAI's APIs it has four fields."""
        answer = self.post(path, body, **kwargs)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        if isinstance(error, dict) and "param" in error:
            assert error["message"] and set(error) == {"message", "type", "param", "code"}, error
        return error

    def sent(self, path: str, body: Any, **kwargs: Any) -> list[GenerateRequest]:
        """What the scheduler gets for a request that is served."""
        before = len(self.scheduler.seen)
        answer = self.post(path, body, **kwargs)
        assert answer.status_code == 200, answer.text
        return self.scheduler.seen[before:]

    @property
    def prompt(self) -> str:
        return byte_tokenizer().decode(self.scheduler.seen[-1].input_ids)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream that ends well."""
        response = self.post(path, body)
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def named_events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream in which each is named by its type."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        events = []
        for text in response.text.removesuffix("\n\n").split("\n\n"):
            name, _, data = text.partition("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events

    def wait_idle(self) -> None:
        wait_for(lambda: not any(scheduler.num_running for scheduler in self.schedulers))


@contextmanager
def start_worker(
    folder: Path,
    *,
    ready: bool = True,
    drain_s: float = 0.2,
    server: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    process: bool = False,
    **given: Any,
) -> Iterator[Worker]:
    """`process`: a process of its own, else a thread. `given`: mode, allowed, warms_up, secret.

    Raises what a thread's start raises.
    """
    checkpoint = folder / "tiny"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    ipc = IpcPaths.create()
    args = {
        "folder": str(folder),
        "ipc_dir": ipc.dir,
        **{"mode": "null", "allowed": None, "warms_up": False, "secret": "", **given},
        "server": {"port": 0, "drain_timeout_s": drain_s, **(server or {})},
        "engine": {"model_path": str(checkpoint), **(engine or {})},
    }
    with ExitStack() as stack:
        stack.callback(ipc.remove)
        ranks = ipc.of_ranks((engine or {}).get("dp_size", 1))  # they end last: a draining worker asks for their state
        schedulers = tuple(stack.enter_context(StandIn(paths, byte_tokenizer())) for paths in ranks)
        running = _start_process(args, stack) if process else WorkerThread(args)
        stack.callback(_end, running)
        url = wait_for(lambda: _url_of(folder) or running.poll() is not None)
        http = stack.enter_context(httpx.Client(base_url=url, timeout=30))
        wait_for(lambda: running.poll() is not None or _listens(http))
        if isinstance(running, WorkerThread) and running.error is not None:
            raise running.error
        if ready:
            for scheduler in schedulers:
                scheduler.say_ready()
            wait_for(lambda: (folder / "ready").exists())
        yield Worker(url, http, schedulers, running, folder / "log")


def _url_of(folder: Path) -> str:
    return (folder / "url").read_text() if (folder / "url").exists() else ""


def _listens(http: httpx.Client) -> bool:
    try:
        return http.get("/liveness").status_code == 200
    except httpx.ConnectError:
        return False


def _start_process(args: dict[str, Any], stack: ExitStack) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    log = stack.enter_context((Path(args["folder"]) / "log").open("wb"))
    command = [sys.executable, "-m", "tests.frontend.worker_main", json.dumps(args)]
    return subprocess.Popen(command, env=env, stderr=log, stdout=log, cwd=ROOT)


def _end(running: WorkerThread | subprocess.Popen[bytes]) -> None:
    if running.poll() is None:
        running.send_signal(signal.SIGTERM)
    assert running.wait(60) is not None


@pytest.fixture(scope="package")  # its log is that of the process: it ends before tests of other folders plant faults
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One unified worker for all tests that leave it as they found it. None of them meets a bug of ours."""
    with start_worker(tmp_path_factory.mktemp("worker")) as w:
        yield w
        check_log(w)


def check_log(w: Worker) -> None:
    log = w.log.read_text()
    assert "Traceback" not in log and "internal error" not in log, log[-3000:]


@pytest.fixture(scope="package")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that reads calls, and whose template for tools shows what tools have answered."""
    folder = tmp_path_factory.mktemp("qwen")
    write_tool_template(folder)
    with start_worker(folder, engine={"tool_call_parser": "qwen25"}) as w:
        yield w


@pytest.fixture(scope="package")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One that reads reasoning and calls, behind a router that knows `SECRET`."""
    folder = tmp_path_factory.mktemp("thinker")
    write_tool_template(folder)
    engine = {"reasoning_parser": "deepseek-r1", "tool_call_parser": "qwen25"}
    with start_worker(folder, engine=engine, secret=SECRET.decode()) as w:
        yield w


def write_tool_template(folder: Path) -> None:
    named = write_checkpoint(folder / "tiny") / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text(TEMPLATE.replace("== 'tool'", "== 'nobody'"))


@pytest.fixture(scope="package")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    from tests.frontend.vision import write_vision_checkpoint

    folder = tmp_path_factory.mktemp("seeing")
    write_vision_checkpoint(folder / "tiny")
    with start_worker(folder) as w:
        yield w
        check_log(w)
