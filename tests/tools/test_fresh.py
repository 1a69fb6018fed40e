"""The check itself: README is read as it stands, and a machine that cannot make a bare root says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fresh import readme
from tools.fresh.__main__ import CANNOT, main
from tools.fresh.bare_root import TREE
from tools.fresh.session import CheckFailedError, Session

README = (TREE / "README.md").read_text()


def test_readme_says_what_the_check_types():
    assert [readme.find(what, README) for what in ("run", "test", "chat")] == ["make run", "make test", "make chat"]
    assert readme.find("packages", README).startswith("apt-get install ")
    assert readme.find("pasted", README).startswith("curl -s http://127.0.0.1:8000/v1/chat/completions")
    assert readme.find("answer", README) == "v42"
    assert compile(readme.find("python", README), "README.md", "exec")
    assert readme.find("question", README).startswith("What is the capital of France?")


IN_A_TERMINAL = """
import os, sys
from prompt_toolkit import prompt
assert sys.stdin.isatty() and sys.stdout.isatty() and os.get_terminal_size().columns > 80
said = prompt("> ")
print("heard", said.upper())
sys.exit(3)
"""


def test_a_terminal_gives_typed_lines_and_plain_output():
    session = Session(["/usr/bin/env", "TERM=xterm", sys.executable, "-c", IN_A_TERMINAL], "talk", in_terminal=True)
    session.until_said(">", 60)
    session.type("hello\r")
    assert session.until_said(r"heard \w+", 60)[0] == "heard HELLO"
    assert session.wait(60) == 3 and "\x1b" not in session.output() and "CPR" not in session.output()
    with pytest.raises(CheckFailedError, match="`talk` ended before it said 'more'"):
        session.until_said("more", 60)


@pytest.mark.parametrize("module", ["tools.fresh.__main__", "tools.fresh.inside"])
def test_the_check_needs_no_installed_package(module: str):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", f"import {module}"]
    done = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_readme_without_the_commands_is_refused():
    with pytest.raises(readme.ReadmeError, match="make run"):
        readme.find("run", "nothing to run here")


@pytest.mark.parametrize(("uid", "words"), [(1000, "sudo make fresh-check"), (0, "no apt-get")], ids=["user", "no apt"])
def test_a_machine_that_cannot_says_why(
    uid: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fresh"])
    assert main() == CANNOT
    said = capsys.readouterr().out
    assert "cannot run here" in said and words in said
