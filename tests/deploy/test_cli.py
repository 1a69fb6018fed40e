"""The `tandem` command as real processes: help, versions, and one clear line for what cannot be done."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import COMMANDS, operating_error
from tests.e2e.ranks.leaders import TANDEM, start_process


def tandem(log: Path, *args: str) -> tuple[int, str]:
    """Its status and all that it has said. It has its imports from a fork server."""
    return start_process([*TANDEM, *args], log).wait(60), log.read_text()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_help_lists_the_commands_at_once() -> None:
    """It imports nothing that takes long to import."""
    code = "import sys; from deploy.cli import main; status = main(['--help']); print(status, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and all(f"  {name} " in done.stdout for name in COMMANDS)
    status, *modules = done.stdout.splitlines()[-1].split()
    assert status == "0" and "deploy.cli" in modules
    assert not {"torch", "numpy", "aiohttp", "msgspec", "tokenizers", "zmq"}.intersection(modules)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_light_ones_never_import_torch(command: str) -> None:
    code = f"import atexit, sys; from deploy.cli import main; atexit.register(lambda: print(*sys.modules)); main([{command!r}, '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"usage: tandem {command}" in done.stdout and "default: " in done.stdout
    modules = done.stdout.splitlines()[-1].split()
    assert command == "serve" or not {"torch", "transformers", "numpy"}.intersection(modules)


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["nope"], 2, "unknown command 'nope'; one of: up, chat, serve, router"),
        (["serve", "--page-sise", "1"], 2, "did you mean --page-size?"),
        (["serve", "--page-size", "x"], 2, "--page-size: must be a whole number, got 'x'"),
        (["serve", "--model-path", "/no/such/dir"], 1, "--model-path"),
        (["up", "--model-path", "/no/such/dir"], 1, "--model-path"),
        (["up", "--prefill", "0"], 1, "--prefill: must be 1 to 64, got 0"),
        (["up", "--transfer-backend", "pigeon"], 2, "--transfer-backend: invalid choice: 'pigeon'"),
        (["up", "--port", "0", "--ready-file", "/no/such/dir/ready"], 1, "--ready-file: /no/such/dir is no directory"),
        (["router", "--prefill", "http://a", "b", "c"], 2, "--prefill: takes URL [BOOTSTRAP_PORT]"),
        (["router", "--prefill", "nonsense", "--port", "0"], 1, "--prefill"),
        (["bench", "--url", "ftp://x"], 1, "--url"),
        (["trace", "--url", "http://127.0.0.1:0"], 1, "--url http://127.0.0.1:0: no answer; is the server up"),
    ],
)
def test_what_cannot_be_done_is_one_line(args: list[str], status: int, said: str, tmp_path: Path) -> None:
    found, text = tandem(tmp_path / "log", *args)
    assert found == status, text
    assert said in text and "Traceback" not in text and text.count("\n") <= 1


@pytest.mark.parametrize("command", ["up", "router", "bootstrap"])
def test_a_taken_port_is_named(command: str, taken_port: int, tmp_path: Path) -> None:
    status, text = tandem(tmp_path / "log", command, "--port", str(taken_port))
    assert status == 1
    assert str(taken_port) in text and "--port" in text and text.count("\n") == 1


def test_no_command_is_an_error_that_lists_them(tmp_path: Path) -> None:
    status, text = tandem(tmp_path / "log")
    assert status == 2 and "Traceback" not in text and all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(("word", "says", "complains"), [("--version", "tandem ", ""), ("nope", "", "unknown command")])
def test_errors_and_answers_have_streams_of_their_own(word: str, says: str, complains: str) -> None:
    done = subprocess.run([sys.executable, "-m", "deploy", word], capture_output=True, text=True, timeout=60)
    for text, want in ((done.stdout, says), (done.stderr, complains)):
        assert want in text and bool(text) == bool(want)


def test_a_bug_keeps_its_traceback() -> None:
    assert operating_error(KeyError("x")) is None
    assert operating_error(OSError(5, "I/O error")) is None
