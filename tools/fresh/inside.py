"""Runs in the namespaces of one check: mounts what a Linux root needs, then types README's commands in it.

Usage: python -m tools.fresh.inside ROOT LONG(0|1) REPORT. All mounts and processes end with the namespaces.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tools.fresh import readme
from tools.fresh.bare_root import CLONE, bindings, environment
from tools.fresh.session import CheckFailedError, Session

T = TypeVar("T")
SETUP_LIMIT_S = 3600
CURL_LIMIT_S = 120
STOP_LIMIT_S = 60
TEST_LIMIT_S = 3 * 3600
CHAT_LIMIT_S = 300
SHORT_TESTS = "tests/machine"
KERNELS = "root/.cache/tandem/kernels"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def main(argv: list[str]) -> int:
    root, long, report = Path(argv[0]), argv[1] == "1", Path(argv[2])
    try:
        report.write_text(json.dumps(_check(root, long=long)))
    except (CheckFailedError, readme.ReadmeError) as e:
        print(f"fresh-check: FAILED: {e}", flush=True)
        return 1
    except KeyboardInterrupt:
        return 130  # the process outside says so
    return 0


def _check(root: Path, *, long: bool) -> dict[str, object]:
    _mount(root)
    bare = BareMachine(root)
    text = (root / CLONE / "README.md").read_text()
    run, test = (readme.find(what, text) for what in ("run", "test"))
    packages = readme.find("packages", text)
    durations: dict[str, float] = {}

    def timed(name: str, step: Callable[[], T]) -> T:
        print(f"fresh-check: {name}", flush=True)
        begun = time.monotonic()
        result = step()
        durations[name] = round(time.monotonic() - begun, 1)
        return result

    timed(packages, lambda: bare.must(f"apt-get update -qq && DEBIAN_FRONTEND=noninteractive {packages} -y -qq"))
    cluster = bare.session(run)
    printed = timed(f"{run}, until it answers", lambda: _run_answers(bare, cluster, text))
    timed("Ctrl-C", lambda: _ends(bare, cluster))
    kernels = _kernels_used(root, cluster.output())
    chat = readme.find("chat", text)
    talked = timed(f"{chat}, a question, /exit", lambda: _talks(bare, chat, readme.find("question", text)))
    program = readme.find("python", text)
    wrote = timed("the lines of Python", lambda: _runs(bare, f"- <<'END'\n{program}END\n"))
    scripts = sorted(str(path.relative_to(root / CLONE)) for path in (root / CLONE / "examples").glob("*.py"))
    examples = timed("the examples", lambda: {script: _runs(bare, script) for script in scripts})
    command = test if long else f"{test} TESTS={SHORT_TESTS}"
    output = timed(command, lambda: bare.must(command, limit_s=TEST_LIMIT_S))
    _nothing_left(bare)
    return {
        "debian": (root / "etc/debian_version").read_text().strip(),
        "durations_s": durations,
        "printed": _from_tandem_on(printed),
        "kernels_built": kernels,
        "chat": talked,
        "python": wrote,
        "examples": examples,
        "pytest": closing_line(output),
    }


class BareMachine:
    """Runs commands in the root as a user would type them there."""

    def __init__(self, root: Path) -> None:
        self._enter = ["chroot", str(root), "/usr/bin/env", "-i"]
        self._enter += [f"{name}={value}" for name, value in environment(root).items()]

    def session(self, command: str, *, in_terminal: bool = False) -> Session:
        argv = [*self._enter, "/bin/bash", "-c", f"cd /{CLONE} && {command}"]
        return Session(argv, command, in_terminal=in_terminal)

    def must(self, command: str, *, limit_s: float = SETUP_LIMIT_S) -> str:
        """Its output, shown as it comes. Raises CheckFailedError if it fails or takes too long."""
        session = self.session(command)
        status = session.wait(limit_s)
        if status:
            raise CheckFailedError(f"`{command}` ended with status {status}")
        return session.output()


def _run_answers(bare: BareMachine, cluster: Session, text: str) -> list[str]:
    """Waits until the cluster says that it is ready; pastes README's line and the printed one."""
    cluster.until(lambda: "Ctrl-C ends it." in cluster.output() or cluster.ended(), SETUP_LIMIT_S)
    if cluster.ended():
        raise CheckFailedError(f"`{cluster.command}` ended before the cluster was ready")
    wanted = readme.find("answer", text)
    for line in (readme.find("pasted", text), readme.find("printed", cluster.output())):
        reply = bare.must(line, limit_s=CURL_LIMIT_S)
        content = json.loads(reply[reply.index("{") :])["choices"][0]["message"]["content"]
        if content.strip() != wanted:
            raise CheckFailedError(f"the answer is {content!r}, not {wanted!r}, to: {line}")
    return cluster.output().splitlines()


def _ends(bare: BareMachine, cluster: Session) -> None:
    cluster.press_ctrl_c()
    cluster.wait(STOP_LIMIT_S)
    _nothing_left(bare)


def _talks(bare: BareMachine, command: str, question: str) -> str:
    """What the model answers in a terminal, and its figures. The chat's end takes its cluster along."""
    chat = bare.session(f"TERM=xterm {command}", in_terminal=True)
    chat.until_said("/help shows", CHAT_LIMIT_S)
    asked = len(chat.output())
    chat.type(f"{question}\r")
    figures = chat.until_said(r"first token [^\n]*", CHAT_LIMIT_S, after=asked)
    answer = chat.output()[asked : figures.start()].rpartition(question)[2].strip()
    if not re.search(r"\w", answer):
        raise CheckFailedError(f"`{command}` answered {question!r} with no word")
    chat.type("/exit\r")
    if status := chat.wait(STOP_LIMIT_S):
        raise CheckFailedError(f"`{command}` ended with status {status}")
    _nothing_left(bare)
    print(f"  | > {question}\n  | {answer}\n  | {figures[0]}", flush=True)
    return f"{answer}\n{figures[0]}"


def _runs(bare: BareMachine, program: str) -> str:
    """What Python prints for a program: answers of a model in the process, and of a cluster."""
    wrote = bare.must(f".venv/bin/python {program}", limit_s=CHAT_LIMIT_S)
    if len(wrote.split()) < 2:
        raise CheckFailedError(f"`.venv/bin/python {program}` printed {wrote!r}")
    _nothing_left(bare)
    return wrote


def _nothing_left(bare: BareMachine) -> None:
    """Raises CheckFailedError if a process of the root lives; the moment between a signal and its end is granted."""
    deadline = time.monotonic() + 10
    while left := _processes():
        if time.monotonic() > deadline:
            raise CheckFailedError("processes are left running: " + "; ".join(left))
        time.sleep(0.1)


def _processes() -> list[str]:
    """Command lines of these namespaces but for the check's own (its shell is process 1); zombies have none."""
    lines = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
            try:
                lines[entry.name] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    return [f"{pid}: {line}" for pid, line in lines.items() if line]


def _kernels_used(root: Path, said: str) -> list[str]:
    """Names of the C kernels that `make run` built in this root.

    Raises CheckFailedError if it built none, or said otherwise.
    """
    built = sorted({path.name.rpartition("-")[0] for path in (root / KERNELS).glob("*.so")})
    if not built or "No C kernels" in said:
        raise CheckFailedError(f"`make run` did not use C kernels built in this root (built: {built})")
    return built


def _from_tandem_on(lines: list[str]) -> list[str]:
    """Without what the package clients print before `tandem up` starts."""
    start = next((i for i, line in enumerate(lines) if line.startswith("tandem up:")), 0)
    return lines[start:]


def closing_line(output: str) -> str:
    """Pytest's last line: how many passed, and in which time."""
    found = re.findall(r"^.*\d+ passed.*$", output, re.MULTILINE)
    if not found:
        raise CheckFailedError("pytest did not say how many tests passed")
    return str(found[-1]).strip("= ")


def _mount(root: Path) -> None:
    mount("-t", "proc", "proc", "/proc")  # of these processes alone
    mount("-t", "proc", "proc", str(root / "proc"))
    mount("--rbind", "/sys", str(root / "sys"))
    for name in DEVICES:
        device = root / "dev" / name
        device.touch()
        mount("--bind", f"/dev/{name}", str(device))
    for name, kind, options in (
        ("dev/shm", "tmpfs", "mode=1777"),
        ("dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620"),
    ):
        (root / name).mkdir(exist_ok=True)
        mount("-t", kind, "-o", options, kind, str(root / name))
    for source, target, writable in bindings():
        (root / target).mkdir(parents=True, exist_ok=True)
        mount("--bind", str(source), str(root / target))
        if not writable:
            mount("-o", "remount,bind,ro", str(root / target))


def mount(*args: str) -> None:
    done = subprocess.run(["mount", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailedError(f"mount {' '.join(args)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
